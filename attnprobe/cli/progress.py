"""The progress bar of measuring verbs: on stderr, gone when done, absent without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

Tick = Callable[[int, int], None]


class Bar:
    """One line for every checkpoint."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._start: Any = None

    def say(self, what: str) -> None:
        """Something that goes on before there is anything to count."""
        self._start = self._progress.add_task(what, total=None, count="")

    def add(self, name: str) -> Tick:
        """A line for a checkpoint; what is returned is called with samples done and in all."""
        if self._start is not None:
            self._progress.remove_task(self._start)
            self._start = None
        task = self._progress.add_task(name, total=None, count="")

        def tick(done: int, total: int) -> None:
            count = f"{done:,} of {total:,} samples"
            self._progress.update(task, completed=done, total=total, count=count)

        return tick


@contextmanager
def progress(quiet: bool) -> Iterator[Bar]:
    """The bar for as long as the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    with shown:
        yield Bar(shown)
