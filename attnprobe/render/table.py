"""Results on a terminal or in a log: headlines, tables and pictures of block characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType

from attnprobe.errors import InputError
from attnprobe.render.ascii import Ascii
from attnprobe.render.names import labels
from attnprobe.render.page import Page
from attnprobe.render.parts import only_layer
from attnprobe.render.views import entropy, gate, rank, scan, sink
from attnprobe.result import Result

#: The views, and what gives their blocks.
VIEWS: Mapping[str, Callable[[Page], Iterator[RenderableType]]] = {
    "sink": sink.view,
    "entropy": entropy.view,
    "rank": rank.view,
    "gate": gate.view,
    "scan": scan.view,
}


def show(results: Sequence[Result], view: str, console: Console, layer: int | None = None) -> None:
    """Prints results for people: what was found, by layer and head, and what was not measured.

    Nothing depends on colour, every line fits the console's width, and a console that can encode
    nothing but ASCII gets ASCII.

    Args:
        results: one a checkpoint; several are shown side by side as far as the width goes.
        view: "sink", "entropy", "rank", "gate", or "scan" for all of them.
        console: where to print.
        layer: show this layer alone; negative numbers count from the last.

    Raises:
        InputError: an unknown view, or a layer that a result does not have.
    """
    if view not in VIEWS:
        raise InputError(f"unknown view {view!r}: choose from {', '.join(VIEWS)}")
    if not results:
        return
    if layer is not None:
        results = [only_layer(result, layer) for result in results]
    named = list(zip(labels(results), results, strict=True))
    page: RenderableType = Group(*VIEWS[view](Page(named, console.width)))
    console.print(Ascii(page) if console.options.ascii_only else page, highlight=False)
