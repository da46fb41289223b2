"""`attnprobe compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnprobe.cli.gathering import (
    ALLOW_DIFFERENT,
    Gathering,
    cache_folder,
    gather_options,
    gathering,
)
from attnprobe.cli.options import OUTPUT, WHAT, collected
from attnprobe.cli.output import check_writable, show, write_stdout
from attnprobe.cli.reporting import FAILED, say
from attnprobe.errors import InputError

if TYPE_CHECKING:
    from attnprobe.audit.foreseeing import Foreseen
    from attnprobe.audit.runner import Gathered
    from attnprobe.compare import Comparison

SUFFIXES = (".json", ".csv", ".md", ".tex", ".latex")
PLOTS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Comparing(Gathering):
    """Options of `attnprobe compare`."""

    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CKPT|RESULT",
            show_default=False,
            help="Two or more, the first being what the others are compared to: checkpoints, "
            "results saved with --output FILE.json, folders, globs, or names of packaged "
            "checkpoints. Without any, the packaged pair.",
        ),
    ] = None
    by_layer: Annotated[
        bool, typer.Option("--by-layer", rich_help_panel=WHAT, help="Every layer, too.")
    ] = False
    allow_different: Annotated[
        bool,
        typer.Option(
            *ALLOW_DIFFERENT,
            rich_help_panel=WHAT,
            help="Compare what was measured on another input, length or tokenizer all the same.",
        ),
    ] = False
    format: Annotated[
        Literal["table", "json", "csv", "md", "latex"],
        typer.Option("--format", rich_help_panel=OUTPUT, help="Of what goes to stdout."),
    ] = "table"
    output: Annotated[
        list[Path] | None,
        typer.Option(
            *("--output", "-o"),
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Write a file too, its suffix chooses the format: .json, .csv, .md or .tex; may "
            "be repeated.",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Draw the comparison into this file, a .png, .svg or .pdf.",
        ),
    ] = None


@collected(
    Comparing,
    without=("layer", "head", "layer_rank", "table", "plots", "plot_format", "tensor_parallel"),
)
def compare(options: Comparing) -> int:
    """Compare checkpoints: what differs from the first, by how much, and whether it can be seen.

    Each difference has a bootstrap interval over samples, and where that spans zero, no difference
    is seen. Results saved by attnprobe scan are compared without measuring anything.

    \b
    Examples:
      attnprobe compare                           the packaged pair
      attnprobe compare before.pt after.pt --by-layer
      attnprobe compare base.json a.json b.json --plot figure.pdf
      attnprobe compare a.pt b.pt --text-file book.txt --length 512 -o table.tex
    """
    files = tuple(path.expanduser() for path in options.output or ())
    plot = None if options.plot is None else options.plot.expanduser()
    for path, suffixes in (*((f, SUFFIXES) for f in files), *([(plot, PLOTS)] if plot else [])):
        _check(path, suffixes)
    if not 0 < options.epsilon < 1:
        raise InputError(f"--epsilon is {options.epsilon}: it must lie between 0 and 1")
    _check_several(options.checkpoints)
    from attnprobe.audit.runner import gather

    with gathering(options.quiet) as on_event:
        gathered = gather(
            options.checkpoints or [],
            gather_options(options),
            jobs=options.jobs,
            cache=cache_folder(options),
            on_event=on_event,
            before=None if options.allow_different else _refuse_different,
        )
    failed = _explain(gathered)
    results = [result for entry in gathered for result in entry.results]
    if failed and len(results) < 2:
        return FAILED
    if gathered[0].error is not None:
        say("error", f"{gathered[0].name} is what the others are to be compared to: name another")
        return FAILED
    from attnprobe.compare import compare as compared

    comparison = compared(results, allow_different=options.allow_different)
    _write(comparison, options, files, plot)
    return FAILED if failed else 0


def _check_several(checkpoints: Sequence[str] | None) -> None:
    """Whether there can be two things to compare, before one is measured in vain."""
    from attnprobe.audit.targets import resolve

    found = resolve(checkpoints or [])
    if len(found) == 1 and not found[0].is_result and found[0].problem is None:
        raise InputError(
            f"{found[0].name} alone is nothing to compare: name another checkpoint or result, too"
        )


def _check(path: Path, suffixes: Sequence[str]) -> None:
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"cannot tell the format of {path} from its suffix: use one of {', '.join(suffixes)}"
        )
    check_writable(path)


def _refuse_different(foreseen: list[Foreseen | None]) -> None:
    from attnprobe.compare import refuse_different

    refuse_different(foreseen)


def _explain(gathered: Sequence[Gathered]) -> bool:
    """Says what went wrong; whether anything did."""
    for entry in gathered:
        if entry.error is not None:
            where = "" if entry.path in entry.error else f"{entry.name}: "
            say("error", where + entry.error)
    return any(entry.error is not None for entry in gathered)


def _write(
    comparison: Comparison, options: Comparing, files: Sequence[Path], plot: Path | None
) -> None:
    """Files and the plot first, so that they are there even when nobody reads stdout."""
    from attnprobe.render import compare as rendered

    for path in files:
        rendered.export(comparison, path, options.by_layer)
    if plot is not None:
        from attnprobe.render import compare_plot

        compare_plot.plot(comparison, plot)
    if options.format == "table":
        show(lambda console: rendered.show(comparison, console, options.by_layer))
    else:
        write_stdout(rendered.render(comparison, options.format, options.by_layer))
