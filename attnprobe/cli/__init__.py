"""The command line: `attnprobe VERB [CKPT…] [options]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from attnprobe._version import __version__
from attnprobe.cli import (
    audit,
    compare,
    entropy,
    gate,
    init,
    models,
    processes,
    rank,
    scan,
    sink,
    train,
)
from attnprobe.cli.help import Command, Group
from attnprobe.cli.reporting import FAILED, INTERRUPTED, fault, say, silence_stdout
from attnprobe.cli.usage import in_words

VERBS = {
    "Measure": (scan.scan, sink.sink, entropy.entropy, rank.rank, gate.gate),
    "Judge": (compare.compare, audit.audit, init.init),
    "Checkpoints": (models.models, train.train),
}

app = typer.Typer(
    name="attnprobe",
    cls=Group,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command(cls=Command, rich_help_panel=panel)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnprobe {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def attnprobe(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which version."),
    ] = False,
) -> None:
    """What the attention of a transformer is doing: sinks, entropy, effective rank and gates.

    \b
    Examples:
      attnprobe scan                   the packaged pair, without and with a gate
      attnprobe sink model.pt          what the first token gets of the attention
      attnprobe rank model.pt --layer 3
      attnprobe scan a.pt b.pt --output results.json --plots figures
      attnprobe compare a.pt b.pt      what differs, and whether it can be seen
      attnprobe train mine.pt --gate G1 --steps 500

    attnprobe VERB --help has the options of a verb. Exit codes: 0 fine, 1 a rule was broken
    (audit), 2 wrong usage or an unreadable checkpoint, 3 nothing could be measured, 130
    interrupted.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and gives its exit code: what the `attnprobe` script calls.

    130 interrupted · 2 usage, an unreadable checkpoint or any other error · 1 a rule was broken
    (audit) · 3 nothing could be measured · 0 fine, also when the reader of the pipe went away.
    """
    _survive_narrow_encodings()
    given = sys.argv[1:] if arguments is None else list(arguments)
    measuring = {verb.__name__ for verb in VERBS["Measure"]}
    with processes.as_one() if measuring & {*given[:1]} else nullcontext():
        return _run(given)


def _run(arguments: list[str]) -> int:
    try:
        code = app(
            args=arguments,
            prog_name="attnprobe",
            standalone_mode=False,
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted", "stopped before it was done")
        return INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        return 0
    except SystemExit as stop:  # rich and typer leave so when the reader of a pipe went away
        if isinstance(stop.__context__, OSError):
            silence_stdout()
            return 0
        raise
    except Exception as error:
        say("error", in_words(error, arguments, typer.main.get_command(app)) or fault(error))
        return FAILED


def _survive_narrow_encodings() -> None:
    """A terminal that knows no box drawing gets question marks, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
