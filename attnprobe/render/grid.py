"""Columns beside each other, one group a checkpoint, as many as the width holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from attnprobe.render.numbers import MISSING

GAP, BETWEEN = "  ", " │ "


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head.
        cells: one a row.
        order: 0 is always shown; of the others those of lower order come first, if they fit.
        left: whether to align it on the left.
        foot: its cell below the line, "" for none.
        bundle: columns of one bundle are shown all or not at all.
    """

    title: str
    cells: Sequence[str | Text]
    order: int = 0
    left: bool = False
    foot: str | Text = ""
    bundle: str = ""

    @cached_property
    def width(self) -> int:
        return max(cell_len(self.title), *(_cells(c) for c in (*self.cells, self.foot)))

    @property
    def empty(self) -> bool:
        return all(str(c).strip() in ("", MISSING) for c in (*self.cells, self.foot))


@dataclass(frozen=True)
class Group:
    """The columns of one checkpoint; those of all groups are in the same order."""

    name: str
    columns: Sequence[Column]


@dataclass(frozen=True)
class Table:
    """A drawn table, and the titles of the columns that found room in it."""

    text: Text
    titles: frozenset[str]

    def __rich__(self) -> Text:
        return self.text


def tables(stub: Sequence[Column], groups: Sequence[Group], width: int) -> list[Table]:
    """One table, or several below each other where the groups do not fit side by side.

    Args:
        stub: the columns on the left, repeated in every table.
        groups: at least one; one without a name stands alone.
        width: cells there are.
    """
    groups = _filled(groups)
    for count in range(1, len(groups) + 1):  # tables below each other
        size = math.ceil(len(groups) / count)
        chunks = [groups[i : i + size] for i in range(0, len(groups), size)]
        chosen = [_choice(stub, chunk, width) for chunk in chunks]
        if size == 1 or all(c is not None for c in chosen):
            return [
                _draw(stub, chunk, titles or _needed(chunk), width)
                for chunk, titles in zip(chunks, chosen, strict=True)
            ]
    return []


def _filled(groups: Sequence[Group]) -> list[Group]:
    """Groups without the columns that are empty in all of them."""
    used = {c.title for group in groups for c in group.columns if not c.empty}
    return [Group(g.name, [c for c in g.columns if c.title in used]) for g in groups]


def _needed(groups: Sequence[Group]) -> set[str]:
    return {c.title for group in groups for c in group.columns if c.order == 0}


def _choice(stub: Sequence[Column], groups: Sequence[Group], width: int) -> set[str] | None:
    """Titles of the columns that fit, None where not even those of order 0 do."""
    titles = _needed(groups)
    if _width(stub, groups, titles) > width:
        return None
    more = [c for group in groups for c in group.columns if c.order > 0]
    bundles: dict[str, set[str]] = {}
    for column in sorted(more, key=lambda c: c.order):
        bundles.setdefault(column.bundle or column.title, set()).add(column.title)
    for bundle in bundles.values():
        if _width(stub, groups, titles | bundle) <= width:
            titles = titles | bundle
    return titles


def _width(stub: Sequence[Column], groups: Sequence[Group], titles: set[str]) -> int:
    parts = [_joined_width(stub)]
    for group in groups:
        parts.append(_joined_width([c for c in group.columns if c.title in titles]))
    return sum(parts) + len(BETWEEN) * (len(parts) - 1)


def _joined_width(columns: Sequence[Column]) -> int:
    return sum(c.width for c in columns) + len(GAP) * (len(columns) - 1)


def _draw(stub: Sequence[Column], groups: Sequence[Group], titles: set[str], width: int) -> Table:
    parts = [list(stub), *([c for c in g.columns if c.title in titles] for g in groups)]
    room = width - _width(stub, groups, titles)
    for part, group in zip(parts[1:], groups, strict=True):
        more = min(room, cell_len(group.name) - _joined_width(part))
        if more > 0 and part:  # what room is left goes to names, which are cut otherwise
            part[0] = _widened(part[0], more)
            room -= more
    widths = [_joined_width(part) for part in parts]
    lines = []
    if any(g.name for g in groups):
        names = ["", *(g.name for g in groups)]
        fitted = (set_cell_size(clipped(n, w), w) for n, w in zip(names, widths, strict=True))
        lines.append(_beside([Text(name, "bold") for name in fitted]))
    lines.append(_line(parts, [[c.title for c in part] for part in parts], "bold"))
    rule = Text("─┼─".join("─" * w for w in widths), "dim")
    lines.append(rule)
    for row in range(len(stub[0].cells)):
        lines.append(_line(parts, [[c.cells[row] for c in part] for part in parts]))
    if any(c.foot for part in parts for c in part):
        lines.append(rule)
        lines.append(_line(parts, [[c.foot for c in part] for part in parts]))
    for line in lines:
        line.rstrip()
        line.truncate(width)
    return Table(Text("\n", no_wrap=True).join(lines), frozenset(titles))


def _widened(column: Column, cells: int) -> Column:
    width = column.width + cells
    title = column.title.ljust(width) if column.left else column.title.rjust(width)
    return replace(column, title=title)


def _line(
    parts: Sequence[Sequence[Column]], cells: Sequence[Sequence[str | Text]], style: str = ""
) -> Text:
    return _beside(
        [
            Text(GAP).join(_padded(cell, c, style) for cell, c in zip(row, part, strict=True))
            for row, part in zip(cells, parts, strict=True)
        ]
    )


def _beside(parts: Sequence[Text]) -> Text:
    line = Text()
    for number, part in enumerate(parts):
        if number:
            line.append(BETWEEN, "dim")
        line.append_text(part)
    return line


def _padded(cell: str | Text, column: Column, style: str) -> Text:
    text = Text(cell, style) if isinstance(cell, str) else cell.copy()
    space = max(0, column.width - text.cell_len)
    if column.left:
        text.pad_right(space)
    else:
        text.pad_left(space)
    return text


def _cells(cell: str | Text) -> int:
    return cell_len(cell) if isinstance(cell, str) else cell.cell_len


def clipped(text: str, width: int) -> str:
    """The end of a text that is too long: names differ in their ends."""
    if cell_len(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    while cell_len(text) > width - 1:
        text = text[1:]
    return set_cell_size("…" + text, width)
