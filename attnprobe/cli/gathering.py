"""What verbs that gather results of many checkpoints share: options, and how far they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnprobe.cli.options import HOW, Measuring
from attnprobe.cli.reporting import say

if TYPE_CHECKING:
    from attnprobe.audit.runner import Event, GatherOptions

#: Both verbs that set results side by side take either.
ALLOW_DIFFERENT = ("--allow-different", "--allow-different-input")
ENDED = {"measured": "measured", "cached": "known from the cache", "failed": "failed"}
OnEvent = Callable[["Event"], None]


@dataclass(frozen=True, kw_only=True)
class Gathering(Measuring):
    """The measuring options, and those of a run over many checkpoints."""

    jobs: Annotated[
        int,
        typer.Option(
            *("--jobs", "-j"),
            rich_help_panel=HOW,
            metavar="N",
            min=1,
            help="Processes that measure, each with one checkpoint at a time.",
        ),
    ] = 1
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            rich_help_panel=HOW,
            help="Keep results, and measure only what is new; in $ATTNPROBE_CACHE, or attnprobe "
            "in the user's folder for caches.",
        ),
    ] = True


def gather_options(options: Measuring) -> GatherOptions:
    """The options of the command line as `gather` takes them."""
    from attnprobe.audit.runner import GatherOptions

    names = (
        *("length", "samples", "seed", "batch_size", "device", "dtype", "tokens", "random_tokens"),
        *("repeated_token", "chat_template", "bos", "epsilon", "pre_gate"),
        *("device_map", "revision", "offline", "trust_remote_code"),
    )
    return GatherOptions(
        text=tuple(options.text or ()),
        text_file=tuple(options.text_file or ()),
        image=tuple(options.image or ()),
        model_config=None if options.model_config is None else str(options.model_config),
        **{name: getattr(options, name) for name in names},
    )


def cache_folder(options: Gathering) -> Path | None:
    """Where results are kept; None where they are not."""
    from attnprobe.audit.cache import default_folder

    return default_folder() if options.cache else None


@contextmanager
def gathering(quiet: bool) -> Iterator[OnEvent]:
    """What to call with events: a bar on a terminal, a line on stderr for each target elsewhere."""
    if quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _bar() as on_event:
            yield on_event
    else:
        yield _line


def _line(event: Event) -> None:
    if event.kind in ENDED:
        took = f"{event.name} {ENDED[event.kind]}, {event.seconds:.1f} s"  # why is said at the end
        say(f"{event.done} of {event.total}", took)


@contextmanager
def _bar() -> Iterator[OnEvent]:
    """All targets in one bar, and one below it for each checkpoint at work."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        whole = shown.add_task("gathering", total=None, count="")
        at_work = {}

        def on_event(event: Event) -> None:
            count = f"{event.done:,} of {event.total:,}"
            if event.kind == "started":
                at_work[event.name] = shown.add_task(event.name, total=None, count="starting")
            elif event.kind == "samples":
                task = at_work[event.name]
                shown.update(
                    task, completed=event.done, total=event.total, count=f"{count} samples"
                )
            else:
                if event.name in at_work:
                    shown.remove_task(at_work.pop(event.name))
                shown.update(whole, completed=event.done, total=event.total, count=count)

        yield on_event
