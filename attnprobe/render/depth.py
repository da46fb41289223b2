"""Layers or heads that were asked for, in depth: one head a row, its layer's figures below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from attnprobe.render import numbers
from attnprobe.render.blocks import bar
from attnprobe.render.grid import Column, Group, tables
from attnprobe.render.page import BLANK, Page, each_part, stacked
from attnprobe.render.parts import (
    Key,
    Part,
    Row,
    is_partial,
    part_title,
    parts,
    records,
    shown_layers,
)
from attnprobe.result import Result

ROWS, BAR = 128, 10  # heads that a page lists, cells of a bar
BARS = f"0{'1':>{BAR - 1}}"  # the title of bars, and their axis
Place = tuple[int, int | None]  # layer and head, None for the layer as a whole


@dataclass(frozen=True)
class HeadRows:
    """The heads of a part in one result, each layer behind its heads.

    Attributes:
        part: that they are of.
        places: layer and head of each.
        rows: their figures; None where this checkpoint has no such head.
    """

    part: Part
    places: Sequence[Place]
    rows: Sequence[Row | None]

    def values(self, column: str) -> list[float | None]:
        """A figure of all of them, None where it is null."""
        return [None if row is None else numbers.known(row.get(column)) for row in self.rows]

    def figures(
        self,
        column: str,
        title: str,
        order: int = 0,
        shown: Callable[[Sequence[float | None]], list[str]] = numbers.column,
        bundle: str = "",
    ) -> Column:
        """A column of a figure, empty where there is no such head."""
        cells = zip(shown(self.values(column)), self.rows, strict=True)
        return Column(title, ["" if r is None else c for c, r in cells], order, bundle=bundle)

    def bars(self, column: str, order: int = 1) -> Column:
        """A figure from 0 to 1 as bars."""
        return Column(BARS, [bar(v, BAR) for v in self.values(column)], order, left=True)


Columns = Callable[[HeadRows], list[Column]]


def in_depth(page: Page) -> bool:
    """Whether there is one layer, or so few heads were asked for that each can have a row."""
    return all(
        len(shown_layers(result)) == 1 or (_asked(result) and _count(result) <= ROWS)
        for result in page.results
    )


def hint(page: Page) -> str:
    """Where to find the heads that were asked for, "" where they are shown."""
    if in_depth(page) or not any(_asked(result) for result in page.results):
        return ""
    return "each head: fewer layers at a time, or --format csv --table heads"


def by_head(page: Page, columns: Columns, table: str = "heads") -> Iterator[RenderableType]:
    """A table for each stack and kind of attention, checkpoints side by side.

    Args:
        page: the page.
        columns: those of a part, a cell for each row.
        table: "heads", whose layers stand in `layers`, or "gates", which has both.
    """
    keys = dict(each_part(page))
    for key, own in keys.items():
        yield from heads_of(page, key, own, columns, table, is_named=len(keys) > 1)


def heads_of(
    page: Page,
    key: Key,
    own: Sequence[tuple[str, Part]],
    columns: Columns,
    table: str = "heads",
    *,
    is_named: bool,
    label: str = "",
) -> Iterator[RenderableType]:
    """The table of one stack and kind; nothing where it has no figure."""
    found = [_rows(part, table) for _, part in own]
    places = sorted({p for rows in found for p in rows}, key=_last_is_the_layer)
    groups = [
        Group(
            name if len(own) > 1 or len(page.results) > 1 else "",
            columns(HeadRows(part, places, [rows.get(p) for p in places])),
        )
        for (name, part), rows in zip(own, found, strict=True)
    ]
    if all(column.empty for group in groups for column in group.columns):
        return
    layers = sorted({layer for layer, _ in places})
    titles = [label] if label else []
    titles += [part_title(key)] if is_named or len(layers) == 1 else []
    titles += [f"layer {layers[0]}"] if len(layers) == 1 else []
    stub = [Column("layer", [str(layer) for layer, _ in places])] if len(layers) > 1 else []
    stub.append(Column("head", ["all" if head is None else str(head) for _, head in places]))
    yield BLANK
    if titles:
        yield Text(" · ".join(titles), "bold")
    yield from stacked(tables(stub, groups, page.width))


def _asked(result: Result) -> bool:
    """Whether not all layers, or not all heads, are in the result."""
    listed = max((part.head_count for part in parts(result)), default=0)
    return is_partial(result) or 0 < listed < int(result.architecture.get("heads") or 0)


def _count(result: Result) -> int:
    return len(result.heads)


def _rows(part: Part, table: str) -> dict[Place, Row]:
    frames = [part.rows(table)] if table == "gates" else [part.rows("heads"), part.rows("layers")]
    return {
        (int(row["layer"]), None if pd.isna(row["head"]) else int(row["head"])): row
        for frame in frames
        for row in records(frame)
    }


def _last_is_the_layer(place: Place) -> tuple[int, bool, int]:
    layer, head = place
    return layer, head is None, head or 0
