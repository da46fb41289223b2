"""`attnprobe train`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from attnprobe.cli import space
from attnprobe.cli.options import SEEDS, Common, collected
from attnprobe.cli.output import check_writable, write_stdout
from attnprobe.cli.reporting import INTERRUPTED, say
from attnprobe.errors import InputError

if TYPE_CHECKING:
    from attnprobe.train import Progress, TrainConfig, Trained

DATA, GATE, SHAPE, RUN = "What to learn", "The gate", "The model", "The run"
LINE_EVERY = 30.0  # seconds between lines on stderr where that is no terminal
OnStep: TypeAlias = "Callable[[Progress], None]"


def _option(name: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel=panel, help=help, **more)


def _number(name: str, panel: str, help: str, least: float = 1) -> Any:
    return _option(name, panel, help, metavar="N", min=least)


#: What makes a dimension of the model, by the name that its config has for it.
_OPTIONS = {
    "d_model": "--width",
    "n_layers": "--layers",
    "n_heads": "--heads",
    "n_kv_heads": "--kv-heads",
    "head_dim": "--width / --heads",
    "d_ff": "--ff",
    "max_length": "--length",
}


@dataclass(frozen=True, kw_only=True)
class Training(Common):
    """Options of `attnprobe train`; defaults are those of `TrainConfig`."""

    given: frozenset[str] = frozenset()  # which options were typed

    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The checkpoint to write, as in mine.pt.")
    ]

    task: Annotated[
        space.Task, _option("--task", DATA, "Bigram back-copy, or the text itself.")
    ] = "backcopy"
    text_file: Annotated[
        Path | None,
        _option("--text-file", DATA, "UTF-8. Default: the packaged Moby-Dick.", metavar="FILE"),
    ] = None
    tokens: Annotated[space.Tokens, _option("--tokens", DATA, "Of the task text.")] = "bytes"
    vocab_size: Annotated[int, _number("--vocab-size", DATA, "Of bpe tokens.", 257)] = 512
    length: Annotated[int, _number("--length", DATA, "Tokens a sequence.", 2)] = 64

    gate: Annotated[
        space.GatePosition,
        _option(
            "--gate",
            GATE,
            "Behind attention (G1), on values (G2), keys (G3) or queries (G4), behind the output "
            "projection (G5).",
        ),
    ] = "none"
    granularity: Annotated[
        space.Granularity,
        _option("--granularity", GATE, "A number an element, a head, or an element of all heads."),
    ] = "element"
    source: Annotated[
        space.GateSource, _option("--source", GATE, "What the gate is computed from.")
    ] = "query"
    activation: Annotated[
        space.GateActivation,
        _option(
            "--activation",
            GATE,
            "Of the gate: sigmoid, silu, relu, gelu, identity or half-sigmoid, which cannot close.",
            metavar="NAME",
        ),
    ] = "sigmoid"
    mode: Annotated[
        space.GateMode, _option("--mode", GATE, "Whether the gate multiplies or is added.")
    ] = "multiplicative"

    layers: Annotated[int, _number("--layers", SHAPE, "How many layers.")] = 4
    width: Annotated[int, _number("--width", SHAPE, "Of the residual stream.")] = 64
    heads: Annotated[int, _number("--heads", SHAPE, "Query heads a layer.")] = 4
    kv_heads: Annotated[
        int | None, _number("--kv-heads", SHAPE, "Key and value heads. Default: as --heads.")
    ] = None
    ff: Annotated[
        int | None,
        _number("--ff", SHAPE, "Width of the feed-forward. Default: as --width."),
    ] = None
    feed_forward: Annotated[
        space.FeedForward, _option("--feed-forward", SHAPE, "Its activation.")
    ] = "gelu"
    positions: Annotated[
        space.Positions, _option("--positions", SHAPE, "How positions are told.")
    ] = "rotary"
    norm: Annotated[
        space.Norm, _option("--norm", SHAPE, "LayerNorm before or behind each part.")
    ] = "post"
    window: Annotated[
        int | None, _number("--window", SHAPE, "Keys a query sees. Default: all before it.")
    ] = None
    bias: Annotated[bool, _option("--bias/--no-bias", SHAPE, "Biases in linear maps.")] = False
    tie_embeddings: Annotated[
        bool, _option("--tie-embeddings/--no-tie-embeddings", SHAPE, "One matrix in and out.")
    ] = False
    dropout: Annotated[
        float, _option("--dropout", SHAPE, "Share of values dropped.", metavar="SHARE", min=0)
    ] = 0.0

    steps: Annotated[int, _number("--steps", RUN, "Steps of the optimiser, in all.")] = 3000
    batch_size: Annotated[int, _number("--batch-size", RUN, "Sequences a step.")] = 64
    lr: Annotated[float, _option("--lr", RUN, "Peak learning rate.", metavar="RATE")] = 6e-3
    warmup: Annotated[int, _number("--warmup", RUN, "Steps up to the peak.", 0)] = 50
    weight_decay: Annotated[
        float, _option("--weight-decay", RUN, "Of AdamW.", metavar="RATE", min=0)
    ] = 0.0
    clip: Annotated[
        float, _option("--clip", RUN, "Largest norm of a step's gradient.", metavar="NORM")
    ] = 1.0
    seed: Annotated[
        int,
        _option("--seed", RUN, "The same seed gives the same run.", metavar="N", min=0, max=SEEDS),
    ] = 0
    save_every: Annotated[
        int, _number("--save-every", RUN, "Steps between checkpoints; 0: only the last.", 0)
    ] = 250
    monitor_every: Annotated[
        int, _number("--monitor-every", RUN, "Steps between points of the curve; 0: none.", 0)
    ] = 50
    resume: Annotated[
        bool,
        _option("--resume", RUN, "Go on from OUT, with its options where none are given."),
    ] = False
    force: Annotated[bool, _option("--force", RUN, "Anew, even over a checkpoint.")] = False
    device: Annotated[
        str, _option("--device", RUN, "auto, cpu, cuda, cuda:1 or mps.", metavar="DEVICE")
    ] = "auto"


@collected(Training)
def train(options: Training) -> int:
    """Train a small transformer, gated or not, and watch its sinks grow.

    Bigram back-copy, the default task, grows a sink within minutes on a CPU. Beside OUT the curve
    of loss, F-Attr, entropy and gate goes to OUT.metrics.csv. Ctrl-C saves before it stops.

    \b
    Examples:
      attnprobe train ungated.pt
      attnprobe train gated.pt --gate G1
      attnprobe train heads.pt --gate G1 --granularity head --steps 500 --width 64
      attnprobe train text.pt --task text --text-file novel.txt --length 256
      attnprobe train ungated.pt --resume --steps 3000
    """
    if options.out.suffix == ".safetensors":
        raise InputError(f"{options.out}: checkpoints are written as .pt, name it so")
    if options.out.exists() and not (options.resume or options.force):
        raise InputError(
            f"{options.out} is there already: --resume goes on with it, --force trains it anew"
        )
    check_writable(options.out)
    with _shown(options.quiet) as shown:
        from attnprobe.train import train as run

        config = _config(options)
        last = 0

        def on_step(progress: Progress) -> None:
            nonlocal last
            last = progress.step
            shown(progress)

        try:
            trained = run(config, options.out, resume=options.resume, on_step=on_step)
        except InputError as error:
            raise InputError(_in_options(str(error))) from error
        except KeyboardInterrupt:
            if last:
                say(
                    "interrupted",
                    f"saved {options.out} after {last:,} steps; "
                    f"attnprobe train {options.out} --resume goes on",
                )
                return INTERRUPTED
            raise
    if not options.quiet:
        write_stdout(_summary(trained, config))
    return 0


def _in_options(message: str) -> str:
    """What is said of a model's shape, in the options that make it."""
    message = message.removesuffix("; give head_dim")
    return re.sub(r"\b[a-z_]+\b", lambda word: _OPTIONS.get(word[0], word[0]), message)


def _config(options: Training) -> TrainConfig:
    """The run as asked for; when resuming, what was not typed is as it was."""
    from attnprobe.train import TrainConfig

    names = {f.name for f in fields(TrainConfig)} - {"activation", "gate"}
    typed = {name: getattr(options, name) for name in names}
    typed |= {"activation": options.feed_forward, "gate": _gate(options, None)}
    if not options.resume:
        return TrainConfig(**typed)
    before = _before(options)
    as_typed = {name for name in names if name in options.given} | {"device"}
    if "feed_forward" in options.given:
        as_typed.add("activation")
    return replace(
        before,
        **{name: typed[name] for name in as_typed},
        gate=_gate(options, before.gate),
    )


def _gate(options: Training, before: Any) -> Any:
    from attnprobe.models import GateConfig

    values = {
        "position": options.gate,
        **{n: getattr(options, n) for n in ("granularity", "source", "activation", "mode")},
    }
    position = options.gate if before is None or "gate" in options.given else before.position
    idle = [f"--{name}" for name in values if name in options.given]
    if position == "none" and idle:
        raise InputError(f"{', '.join(idle)} means nothing without a gate: give --gate G1, too")
    if before is None:
        return GateConfig(**values)
    given = {"position" if name == "gate" else name for name in options.given}
    return replace(before, **{name: v for name, v in values.items() if name in given})


def _before(options: Training) -> TrainConfig:
    """The config of the run that OUT comes from."""
    from attnprobe.models import GateConfig, load_checkpoint
    from attnprobe.train import DEFAULT_TEXT, TrainConfig

    kept = load_checkpoint(options.out).train.get("options") or {}
    known = {f.name for f in fields(TrainConfig)}
    values = {name: value for name, value in kept.items() if name in known}
    values["gate"] = GateConfig(**values.get("gate", {}))
    text = values.pop("text_file", None)
    if text not in (None, DEFAULT_TEXT.name) and options.text_file is None:
        raise InputError(f"{options.out} was trained on {text}: give it again with --text-file")
    return TrainConfig(**values)


def _summary(trained: Trained, config: TrainConfig) -> str:
    lines = [
        f"{trained.path}: {config.steps:,} steps, {trained.parameters:,} parameters",
        f"held-out loss {trained.loss:.4f}, perplexity {trained.perplexity:.3f}",
    ]
    if trained.metrics_path.exists():
        lines.append(f"{trained.metrics_path}: the curve")
    return "\n".join([*lines, f"Next: attnprobe scan {trained.path}"])


@contextmanager
def _shown(quiet: bool) -> Iterator[OnStep]:
    """What to call with every step: a bar on a terminal, elsewhere a line now and then."""
    if quiet:
        yield lambda progress: None
    elif sys.stderr.isatty():
        with _bar() as on_step:
            yield on_step
    else:
        yield _lines()


def _figures(progress: Progress) -> str:
    figures = f"loss {progress.loss:.3f}  ppl {progress.perplexity:.2f}"
    return figures if progress.f_attr is None else f"{figures}  F-Attr {progress.f_attr:.3f}"


def _lines() -> OnStep:
    """A line on stderr every `LINE_EVERY` seconds, so that a log shows that the run goes on."""
    said = time.monotonic()

    def on_step(progress: Progress) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_EVERY:
            said = time.monotonic()
            say(f"step {progress.step:,} of {progress.steps:,}", _figures(progress))

    return on_step


@contextmanager
def _bar() -> Iterator[OnStep]:
    """Steps, loss, perplexity and F-Attr as they move."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    shown = RichProgress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with shown:
        task = shown.add_task("training", total=None, figures="")
        yield lambda progress: shown.update(
            task, completed=progress.step, total=progress.steps, figures=_figures(progress)
        )
