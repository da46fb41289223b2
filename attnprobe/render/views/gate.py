"""The gate: what it is, how far it is closed, and what skipping its closed heads would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from attnprobe.render import headline, numbers
from attnprobe.render.blocks import histogram, strip
from attnprobe.render.depth import HeadRows, by_head, hint, in_depth
from attnprobe.render.grid import Column
from attnprobe.render.page import (
    BLANK,
    Page,
    by_part,
    figures,
    footer,
    headlines,
    legend,
    over_heads,
    percents,
)
from attnprobe.render.parts import Part, Row, records
from attnprobe.result import SHARES, SKIP_ERRORS, SKIPS

RANGES = dict(zip(SHARES, ("<0.1", "0.1–0.3", "0.4–0.6", "0.7–0.9", ">0.9"), strict=True))


def view(page: Page) -> Iterator[RenderableType]:
    """The page from top to bottom; checkpoints without a gate are named and left out of tables."""
    yield from headlines(page, headline.gate)
    gated = Page([(n, r) for n, r in page.named if not r.gates.empty], page.width)
    if not gated.results:
        yield from footer(page, "gate")
        return
    width = gated.strip_width
    if in_depth(gated):
        drawn = list(by_head(gated, lambda heads: _head_columns(heads, gated), "gates"))
    else:
        drawn = list(by_part(gated, lambda part, layers: _columns(part, layers, gated, width)))
    drawn += _skipping(gated)
    yield from drawn
    yield from footer(page, "gate", *_remarks(drawn), hint(gated))


def _head_columns(heads: HeadRows, page: Page) -> list[Column]:
    return [
        heads.figures("mean", "mean"),
        _histogram_column(heads.rows, 10 if len(page.results) > 1 else 25),
        heads.figures("gate_first", "first", 2, bundle="first"),
        heads.figures("gate_rest", "rest", 2, bundle="first"),
        heads.figures("below_0.1", RANGES["below_0.1"], 3, percents),
        heads.figures("above_0.9", RANGES["above_0.9"], 4, percents),
        heads.figures("std", "std", 6),
        heads.figures("median", "median", 6),
        *(heads.figures(c, t, 7, percents) for c, t in RANGES.items() if c.startswith("from")),
    ]


def _columns(part: Part, layers: list[int], page: Page, width: int) -> list[Column]:
    def gates(column: str) -> dict[int, float | None]:
        return part.figures(column, "gates")

    def cells(
        column: str, title: str, order: int, percent: bool = False, bundle: str = ""
    ) -> Column:
        values = [gates(column).get(layer) for layer in layers]
        shown = percents(values) if percent else numbers.column(values)
        return Column(title, shown, order, bundle=bundle)

    return [
        figures(part, layers, "gate_mean", "mean"),
        _histograms(part, layers, 10 if len(page.results) > 1 else 25),
        cells("gate_first", "first", 2, bundle="first"),
        cells("gate_rest", "rest", 2, bundle="first"),
        over_heads(
            part, layers, "mean", "heads", lambda v: strip(v, width, high=_top(part)), 3, "gates"
        ),
        cells("below_0.1", RANGES["below_0.1"], 4, percent=True),
        cells("above_0.9", RANGES["above_0.9"], 5, percent=True),
        cells("std", "std", 6),
        cells("median", "median", 6),
        *(cells(c, title, 7, percent=True) for c, title in RANGES.items() if c.startswith("from")),
    ]


def _top(part: Part) -> float:
    """The value of a full block: 1 for a sigmoid, else the largest mean of a head."""
    means = [abs(v) for heads in part.heads("mean", "gates").values() for _, v in heads if v]
    return max([1.0, *means])


def _histograms(part: Part, layers: Sequence[int], width: int) -> Column:
    rows = part.rows("gates")
    found = {int(row["layer"]): row for row in records(rows[rows["head"].isna()])}
    return _histogram_column([found.get(n) for n in layers], width)


def _histogram_column(rows: Sequence[Row | None], width: int) -> Column:
    """Histograms below each other, with the ends of their axis where all have the same."""
    found = [
        (row["histogram"], row["edges"])
        if row and isinstance(row["histogram"], list) and isinstance(row["edges"], list)
        else None
        for row in rows
    ]
    drawn = [Text("") if pair is None else histogram(pair[0], width) for pair in found]
    cells = max((text.cell_len for text in drawn), default=0)
    ends = {(pair[1][0], pair[1][-1]) for pair in found if pair is not None}
    title = "histogram"
    if len(ends) == 1 and cells >= 8:
        low, high = (f"{v:g}" for v in ends.pop())
        title = f"{low}{'histogram' if cells >= 16 else '':^{cells - len(low) - len(high)}}{high}"
    return Column(title, drawn, 1, left=True)


def _skipping(page: Page) -> Iterator[RenderableType]:
    """How many heads are closed so far that they need not be computed, and the error of that."""
    shares = [v for r in page.results for c in SKIPS for v in r.gates[c].dropna()]
    if not shares:
        return
    yield BLANK
    if not any(shares):
        yield Text("No head closes below 0.1 on any token: nothing could be skipped.")
        return
    yield Text(
        "Heads that could be skipped: share of (token, head), and the error that makes", "bold"
    )
    for number, block in enumerate(by_part(page, _skip_columns)):
        if number:  # the first is the empty line before the table
            yield block


def _skip_columns(part: Part, layers: list[int]) -> list[Column]:
    columns = []
    for order, (share, error) in enumerate(
        zip(reversed(SKIPS), reversed(SKIP_ERRORS), strict=True)
    ):
        threshold = float(share.removeprefix("skippable_"))
        for column, title, shown in (
            (share, f"below {threshold:g}", percents),
            (error, f"error {threshold:g}", _errors),
        ):
            values = part.figures(column, "gates")
            cells = shown([values.get(n) for n in layers])
            columns.append(Column(title, cells, order, bundle=share))
    return columns


def _errors(values: Sequence[float | None]) -> list[str]:
    return [numbers.significant(v, 2) for v in values]


def _remarks(drawn: Sequence[RenderableType]) -> Iterator[str]:
    yield "The gate is the value that multiplies (or is added), after its activation."
    yield legend(
        drawn,
        {
            "first": "its mean on the first token of a document",
            "rest": "on all others",
            "heads": "its mean by head",
            "error 0.1": "norm of what skipping takes from the layer's output, relative to it",
        },
    )
