"""The options that verbs share, declared once; a verb takes them as one object."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from attnprobe.cli.reporting import reporting
from attnprobe.errors import InputError

Format = Literal["table", "json", "jsonl", "csv", "md", "latex"]
PlotFormat = Literal["png", "svg", "pdf"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Table = Literal[
    "model",
    "layers",
    "heads",
    "samples",
    "sinks",
    "positions",
    "gates",
    "spectra",
    "massive",
    "not_measured",
]

WHAT, INPUT, HOW, OUTPUT = "What to measure", "Input", "How to run", "Output"
SEEDS = 2**63 - 1  # the largest that torch takes
T = TypeVar("T")


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every verb has."""

    quiet: Annotated[
        bool,
        _option("--quiet", "-q", panel=OUTPUT, help="No progress bar and no notes on stderr."),
    ] = False
    verbose: Annotated[
        bool,
        _option("--verbose", panel=OUTPUT, help="Tracebacks of errors, warnings of libraries."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Measuring(Common):
    """What every measuring verb has, save the few that say something to some verbs only."""

    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CKPT",
            show_default=False,
            help="Checkpoints: folders of transformers or of PEFT adapters, org/name of the "
            "Hugging Face hub (or org/name@revision), .gguf, .pt and .safetensors files, folders "
            "with such files, globs such as 'runs/*.pt', or names of packaged ones. Without any, "
            "the packaged pair ungated and gated is measured.",
        ),
    ] = None

    layer: Annotated[
        list[str] | None,
        _option(
            *("--layer", "--layers"),
            panel=WHAT,
            metavar="RANGES",
            help="Only these layers, as in 0-3,-1: both ends included, -1 is the last. Of one or a "
            "few, each head is shown.",
        ),
    ] = None
    head: Annotated[
        list[str] | None,
        _option(
            *("--head", "--heads"),
            panel=WHAT,
            metavar="RANGES",
            help="List only these heads, one by one; layer figures stay those of all heads.",
        ),
    ] = None
    epsilon: Annotated[
        float,
        _option("--epsilon", panel=WHAT, metavar="SHARE", help="Mass above which a key is a sink."),
    ] = 0.3
    pre_gate: Annotated[
        bool,
        _option("--pre-gate", panel=WHAT, help="Ranks before a gate at G1 instead of behind it."),
    ] = False
    layer_rank: Annotated[
        bool,
        _option(
            "--layer-rank/--no-layer-rank",
            panel=WHAT,
            help="Ranks of whole layers, too, which cost most in wide models.",
        ),
    ] = True

    text: Annotated[
        list[str] | None,
        _option(
            "--text", panel=INPUT, metavar="TEXT", help="Measure on this text; may be repeated."
        ),
    ] = None
    text_file: Annotated[
        list[str] | None,
        _option(
            "--text-file",
            panel=INPUT,
            metavar="FILE",
            help="Measure on a .txt, on the 'text' of every line of a .jsonl, or on - for stdin; "
            "long texts are cut into windows of --length tokens.",
        ),
    ] = None
    chat_template: Annotated[
        bool,
        _option(
            "--chat-template",
            panel=INPUT,
            help="Put texts, and the 'messages' or 'prompt' of the lines of a .jsonl, into the "
            "model's own chat template.",
        ),
    ] = False
    tokens: Annotated[
        str | None,
        _option(
            "--tokens",
            panel=INPUT,
            metavar="FILE",
            help="Measure on token ids: a .npy, .json, .pt or .txt, one sample a row; or on the "
            "floats of a .npy or .pt, for a model that reads images or sound.",
        ),
    ] = None
    random_tokens: Annotated[
        bool, _option("--random-tokens", panel=INPUT, help="Measure on tokens drawn at random.")
    ] = False
    repeated_token: Annotated[
        str | None,
        _option(
            "--repeated-token",
            panel=INPUT,
            metavar="TOKEN",
            help="Measure on one token over and over: its id, its text, or random for another one "
            "in every sample.",
        ),
    ] = None
    image: Annotated[
        list[str] | None,
        _option(
            "--image",
            panel=INPUT,
            metavar="FILE",
            help="Measure a model that reads images on this one; may be repeated. Default: pixels "
            "drawn at random.",
        ),
    ] = None
    length: Annotated[
        int | None,
        _option(
            "--length",
            panel=INPUT,
            metavar="N",
            min=1,
            help="Tokens a sample, the start token included. Default: as trained, at most 512.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        _option(
            "--samples",
            panel=INPUT,
            metavar="N",
            min=1,
            help="How many samples. Default: some 8,192 tokens in all, at least 16 samples.",
        ),
    ] = None
    seed: Annotated[
        int,
        _option("--seed", panel=INPUT, metavar="N", min=0, max=SEEDS, help="Of whatever is drawn."),
    ] = 0
    bos: Annotated[
        bool | None,
        _option(
            "--bos/--no-bos",
            panel=INPUT,
            show_default=False,
            help="Start samples with the start token. Default: what the tokenizer puts before and "
            "behind a text by its own rule, such as [CLS] and [SEP], of which --no-bos takes "
            "away what stands before; --tokens are taken as they are.",
        ),
    ] = None

    model_config: Annotated[
        Path | None,
        _option(
            "--model-config",
            panel=HOW,
            metavar="FILE",
            help="JSON with the model's shape, for a bare state dict: what attnprobe models CKPT "
            "--format json lists as config of one of the kind.",
        ),
    ] = None
    device: Annotated[
        str,
        _option("--device", panel=HOW, metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps."),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        _option(
            "--dtype",
            panel=HOW,
            metavar="DTYPE",
            help="Of the weights: float32, bfloat16, float16, or auto, as they are in the file.",
        ),
    ] = "auto"
    device_map: Annotated[
        str | None,
        _option(
            "--device-map",
            panel=HOW,
            metavar="MAP",
            show_default=False,
            help="Spread a model of transformers over GPUs, memory and disk by accelerate: auto, "
            "balanced or sequential.",
        ),
    ] = None
    tensor_parallel: Annotated[
        bool,
        _option(
            "--tensor-parallel",
            panel=HOW,
            help="Split every layer of a model of transformers over the processes of torchrun: "
            "torchrun --nproc-per-node 2 -m attnprobe VERB CKPT --tensor-parallel.",
        ),
    ] = False
    revision: Annotated[
        str | None,
        _option(
            "--revision",
            panel=HOW,
            metavar="REV",
            show_default=False,
            help="Branch, tag or commit of models of the hub; nothing else has one.",
        ),
    ] = None
    offline: Annotated[
        bool,
        _option(
            "--offline",
            panel=HOW,
            help="Take models of the hub from its cache only, as with HF_HUB_OFFLINE=1.",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        _option(
            "--trust-remote-code",
            panel=HOW,
            help="Run the Python code that a model brings; without it none is ever run.",
        ),
    ] = False
    batch_size: Annotated[
        int | None,
        _option(
            "--batch-size",
            panel=HOW,
            metavar="N",
            min=1,
            help="Samples a forward pass; no figure depends on it. Default: some 4,096 tokens.",
        ),
    ] = None

    format: Annotated[Format, _option("--format", panel=OUTPUT, help="Of what goes to stdout.")] = (
        "table"
    )
    output: Annotated[
        list[Path] | None,
        _option(
            *("--output", "-o"),
            panel=OUTPUT,
            metavar="FILE",
            help="Write a file too, its suffix chooses the format: .json, .jsonl, .csv, .md, "
            ".tex, .parquet; may be repeated.",
        ),
    ] = None
    table: Annotated[
        Table | None,
        _option(
            "--table",
            panel=OUTPUT,
            metavar="TABLE",
            show_default=False,
            help="The one table that csv and the like hold (json holds all): model, layers, "
            "heads, samples, sinks, positions, gates, spectra, massive or not_measured. "
            "Default: layers; for attnprobe gate, gates.",
        ),
    ] = None
    plots: Annotated[
        Path | None,
        _option("--plots", panel=OUTPUT, metavar="DIR", help="Draw the plots into this folder."),
    ] = None
    plot_format: Annotated[
        PlotFormat, _option("--plot-format", panel=OUTPUT, help="Of the plots.")
    ] = "png"


def collected(
    into: type[T], without: Collection[str] = ()
) -> Callable[[Callable[[T], int | None]], Callable[..., None]]:
    """Makes a verb of a function that takes its options as one object and gives an exit code.

    The command line sees the fields of `into` one by one, less those in `without`, which keep
    their defaults. A field `given` is no option: it takes the names of the options that were typed.
    """
    hints = get_type_hints(into, include_extras=True)
    shown = [f for f in fields(into) if f.name not in (*without, "given")]  # type: ignore[arg-type]
    shown.sort(key=lambda f: f.name in ("quiet", "verbose"))  # inherited, so they would come first
    wants_given = "given" in hints

    def decorate(verb: Callable[[T], int | None]) -> Callable[..., None]:
        @wraps(verb)
        def command(ctx: typer.Context, **values: Any) -> None:
            if wants_given:
                there = [name for name, value in values.items() if value not in (None, (), [])]
                values["given"] = frozenset(name for name in there if _typed(ctx, name))
            with reporting(verbose=values["verbose"]):
                code = verb(into(**values)) or 0
            raise typer.Exit(code)

        parameters = [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[f.name],
                default=inspect.Parameter.empty if f.default is MISSING else f.default,
            )
            for f in shown
        ]
        ctx = inspect.Parameter(
            "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        command.__doc__ = _unwrapped(verb.__doc__ or "")
        command.__signature__ = inspect.Signature([ctx, *parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (ctx, *parameters)}
        return command

    return decorate


def _unwrapped(text: str) -> str:
    """A docstring with a line a paragraph, for the help to wrap; those marked \\b stay as is."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith("\b") else p.replace("\n", " ") for p in paragraphs)


def _typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def ranges(option: str, given: Collection[str] | None) -> list[int] | None:
    """`["0-3,-1"]` as [0, 1, 2, 3, -1]; None where nothing was given.

    Raises:
        InputError: naming the part that is no range.
    """
    if not given:
        return None
    numbers: list[int] = []
    for part in ",".join(given).split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:\s*-\s*(-?\d+))?\s*", part, re.ASCII)
        if match is None:
            raise InputError(f"{option} {part.strip()!r} is no range: write 3, 0-3 or 0-3,-1")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if (first < 0) != (last < 0) or last < first:
            raise InputError(
                f"{option} {part.strip()!r} runs from {first} to {last}: "
                "write the smaller end first, both counted from the same side"
            )
        if last - first > 100_000:
            raise InputError(f"{option} {part.strip()!r} is too long a range")
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))
