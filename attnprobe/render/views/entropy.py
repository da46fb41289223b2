"""How widely heads spread their attention, and which have collapsed onto one key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from attnprobe.render import headline, numbers
from attnprobe.render.blocks import strip
from attnprobe.render.depth import BARS, HeadRows, by_head, hint, in_depth
from attnprobe.render.grid import Column, Group, tables
from attnprobe.render.names import plural
from attnprobe.render.page import (
    BLANK,
    Page,
    by_part,
    extreme_head,
    figures,
    footer,
    headlines,
    legend,
    over_heads,
    strip_note,
)
from attnprobe.render.parts import Part, Row, part_keys, records
from attnprobe.render.views.sink import floor_columns
from attnprobe.result import Result

SHOWN = 10
MEANING = "entropy as a share of what n visible keys allow"


def view(page: Page) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    yield from headlines(page, headline.entropy)
    width, is_deep = page.strip_width, in_depth(page)
    if is_deep:
        drawn = list(by_head(page, _head_columns))
    else:
        drawn = list(by_part(page, lambda part, layers: _columns(part, layers, width)))
    yield from drawn
    if not is_deep:  # where each head has its row, and its mark in it
        yield from collapsed(page)
    meanings = legend(drawn, {**_meanings(page), BARS: "H/ln n"})
    yield from footer(page, "entropy", meanings, hint(page))


def share_columns(part: Part, layers: list[int], width: int) -> list[Column]:
    """Entropy as a share of what the visible keys allow, of the layer and over heads."""
    limit = headline.COLLAPSED
    return [
        figures(part, layers, "entropy_norm", "H/ln n"),
        over_heads(
            part,
            layers,
            "entropy_norm",
            "heads",
            lambda v: strip(v, width, extreme=min, loud=lambda x: x < limit),
        ),
        extreme_head(part, layers, "entropy_norm", "sharpest", min, order=3),
    ]


def _columns(part: Part, layers: list[int], width: int) -> list[Column]:
    share, heads, sharpest = share_columns(part, layers, width)
    return [
        figures(part, layers, "entropy", "H", 2, _two),
        share,
        heads,
        sharpest,
        figures(part, layers, "entropy_nosink", "no sink", 5, _two),
        figures(part, layers, "entropy_p05", "5 %", 7, _two),
        figures(part, layers, "entropy_p95", "95 %", 7, _two),
        figures(part, layers, "max_logit", "max logit", 8, numbers.short),
        _collapsed_count(part, layers),
        *floor_columns(part, layers, order=1),
    ]


def _head_columns(heads: HeadRows) -> list[Column]:
    return [
        heads.figures("entropy", "H", 3, _two),
        heads.figures("entropy_norm", "H/ln n"),
        heads.bars("entropy_norm", 2),
        _collapsed_heads(heads),
        heads.figures("f_attr", "F-Attr", 1, bundle="share"),
        heads.figures("f_attr_uniform", "floor", 1, bundle="share"),
        heads.figures("entropy_nosink", "no sink", 5, _two),
        heads.figures("entropy_p05", "5 %", 7, _two),
        heads.figures("entropy_p95", "95 %", 7, _two),
        heads.figures("max_logit", "max logit", 8, numbers.short),
    ]


def _collapsed_heads(heads: HeadRows) -> Column:
    """A word beside the heads that collapsed, how many of them beside their layer."""
    cells = []
    for (_, head), row in zip(heads.places, heads.rows, strict=True):
        mark = None if row is None else numbers.known(row["collapsed"])
        if mark:
            cells.append("yes" if head is not None else str(int(mark)))
        else:
            cells.append(numbers.MISSING if row is not None and mark is None else "")
    return Column("collapsed", cells, 1)


def collapsed(page: Page) -> Iterator[RenderableType]:
    """The collapsed heads, each with the mass on the first token: a sink, or sharp elsewhere."""
    found = [(name, row) for name, result in page.named for row in _collapsed(result)]
    if not found:
        return
    rows = [row for _, row in found[:SHOWN]]
    several = any(len(part_keys([r])) > 1 for r in page.results)
    names = [name for name, _ in found[:SHOWN]]
    columns = [
        *([Column("checkpoint", names, left=True)] if len(page.results) > 1 else []),
        *([Column("attention", [_kind(r) for r in rows], left=True)] if several else []),
        Column("layer", [str(r["layer"]) for r in rows]),
        Column("head", [str(r["head"]) for r in rows]),
        Column("H/ln n", numbers.column([numbers.known(r["entropy_norm"]) for r in rows])),
        Column("F-Attr", numbers.column([numbers.known(r["f_attr"]) for r in rows])),
        Column("floor", numbers.column([numbers.known(r["f_attr_uniform"]) for r in rows])),
    ]
    yield BLANK
    yield Text("Collapsed heads", "bold")
    yield from tables(columns[:1], [Group("", columns[1:])], page.width)
    if len(found) > SHOWN:
        more = plural(len(found) - SHOWN, "more head")
        yield Text(f"and {more}: --format csv --table heads gives them all", "dim")


def _collapsed(result: Result) -> list[Row]:
    rows = result.heads[result.heads["collapsed"].fillna(False).astype(bool)]
    return records(rows.sort_values("entropy_norm"))


def _kind(row: Row) -> str:
    return f"{row['stack']} {row['kind']}"


def _collapsed_count(part: Part, layers: list[int]) -> Column:
    """Shown only where a head collapsed; the headline says so where none did."""
    counts = part.figures("collapsed")
    cells = [str(int(counts.get(layer) or 0)) for layer in layers]
    if not any(counts.values()):
        cells = ["" for _ in layers]
    return Column("collapsed", cells, 4)


def _two(values: Sequence[float | None]) -> list[str]:
    return numbers.column(values, decimals=2)


def _meanings(page: Page) -> dict[str, str]:
    return {
        "H": "mean entropy of a query's attention, nats",
        "H/ln n": MEANING,
        "heads": f"H/ln n, {strip_note(page, 'sharpest')}, ▁ 0 to █ 1",
        "no sink": "H with the first key left out",
        "5 %": "H that 5 % of the queries stay below",
        "95 %": "H that 95 % stay below",
        "collapsed": f"heads with H/ln n below {headline.COLLAPSED}",
        "F-Attr": "attention on the first token, which tells a sink from a head sharp elsewhere",
        "floor": "what length and mask alone would give it",
    }
