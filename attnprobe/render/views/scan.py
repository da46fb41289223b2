"""Everything on one page: headlines, the model's figures, the layers in short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from attnprobe.render import headline, numbers
from attnprobe.render.depth import HeadRows, by_head, hint, in_depth
from attnprobe.render.grid import Column, Group, tables
from attnprobe.render.page import (
    BLANK,
    Page,
    by_part,
    figures,
    footer,
    headlines,
    legend,
    percents,
    stacked,
)
from attnprobe.render.parts import Part, has
from attnprobe.render.places import massive, sinks
from attnprobe.render.views import entropy, rank, sink
from attnprobe.result import Result


def view(page: Page) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    yield from headlines(
        page,
        headline.sink,
        headline.entropy,
        headline.rank,
        headline.gate,
        headline.around,
    )
    yield from _summary(page)
    width = page.strip_width
    drawn = list(_by_layer(page, width))
    yield from drawn
    yield from sinks(page)
    yield from entropy.collapsed(page)
    yield from massive(page)
    yield from footer(page, "scan", *_remarks(page, drawn))


@dataclass(frozen=True)
class Figure:
    """A line of the summary.

    Attributes:
        label: what people call it.
        shown: gives its text from a result and a kind of attention, "" or – where it is null.
    """

    label: str
    shown: Callable[[Result, str], str]


def _plain(column: str, digits: int = 3) -> Callable[[Result, str], str]:
    return lambda result, kind: numbers.significant(result.figure(column, kind), digits)


def _count(column: str) -> Callable[[Result, str], str]:
    return lambda result, kind: numbers.whole(result.figure(column, kind))


def _percent(column: str) -> Callable[[Result, str], str]:
    return lambda result, kind: numbers.percent(result.figure(column, kind))


def _of_floor(result: Result, kind: str) -> str:
    return numbers.times(result.figure("f_attr", kind), result.figure("f_attr_uniform", kind))


def _rank_of(result: Result, kind: str) -> str:
    value, bound = result.figure("erank", kind), result.figure("rank_bound", kind)
    return f"{numbers.significant(value)} of {numbers.whole(bound)}" if value else ""


def _null_mass(result: Result, kind: str) -> str:
    value = result.figure("null_mass", kind)
    return numbers.significant(value, 2) if value and value > 1e-4 else ""


SUMMARY = (
    Figure("F-Attr, attention on the first token", _plain("f_attr")),
    Figure("  its floor from length and mask", _plain("f_attr_uniform")),
    Figure("  times the floor", _of_floor),
    Figure("heads that sink there", _percent("sink_rate")),
    Figure("attention on the first four tokens", _plain("first4")),
    Figure("attention that goes to no token", _null_mass),
    Figure("first token's value beside others'", _plain("value_drain")),
    Figure("entropy, nats", _plain("entropy")),
    Figure("  share of what the keys allow", _plain("entropy_norm")),
    Figure("  nats without the first token", _plain("entropy_nosink")),
    Figure("collapsed heads", _count("collapsed")),
    Figure("effective rank of a layer", _rank_of),
    Figure("  used share of the bound", _percent("utilisation")),
    Figure("  without the mean row", _plain("erank_centered")),
    Figure("effective rank of a head", _plain("erank_head")),
    Figure("mean row's share of the output", _percent("mean_share")),
    Figure("gate, mean", _plain("gate_mean")),
    Figure("gate, median", _plain("gate_median")),
    Figure("largest activation, mean over layers", _plain("m_act")),
    Figure("perplexity", _plain("ppl")),
)


def _summary(page: Page) -> Iterator[RenderableType]:
    """The model's figures, checkpoints side by side; a table for every kind of attention."""
    kinds = dict.fromkeys(str(k) for r in page.results for k in r.model["kind"].dropna())
    for kind in kinds:
        own = [(name, r) for name, r in page.named if (r.model["kind"] == kind).any()]
        rows = [
            (figure.label, [figure.shown(result, kind) for _, result in own]) for figure in SUMMARY
        ]
        rows = [row for row in rows if any(cell not in ("", numbers.MISSING) for cell in row[1])]
        if not rows:
            continue
        yield BLANK
        labels = Column(
            f"{kind}-attention" if len(kinds) > 1 else "", [r[0] for r in rows], left=True
        )
        columns = [Column(name, [r[1][n] for r in rows]) for n, (name, _) in enumerate(own)]
        yield from stacked(tables([labels], [Group("", [c]) for c in columns], page.width))


def _by_layer(page: Page, width: int) -> Iterator[RenderableType]:
    """The layers in short: one table, or two where several checkpoints stand side by side."""
    if in_depth(page):
        tables = [sink.head_shares, _other_figures]
        if len(page.results) == 1:
            yield from by_head(page, lambda heads: [c for t in tables for c in t(heads)])
        else:
            for columns in tables:
                yield from by_head(page, columns)
        return

    def rest(part: Part, layers: list[int]) -> list[Column]:
        return [
            figures(part, layers, "entropy_norm", "H/ln n", 1),
            figures(part, layers, "utilisation", "rank", 1, percents),
            figures(part, layers, "gate_mean", "gate", 1),
            figures(part, layers, "m_act", "max |h|", 4, numbers.short),
            figures(part, layers, "erank", "erank", 5, numbers.short),
        ]

    def shares(part: Part, layers: list[int]) -> list[Column]:
        return sink.share_columns(part, layers, width)

    if len(page.results) > 1:
        yield from by_part(page, shares)
        yield from by_part(page, rest)
    else:
        yield from by_part(page, lambda part, layers: shares(part, layers) + rest(part, layers))


def _other_figures(heads: HeadRows) -> list[Column]:
    """What `_by_layer` shows beside the shares, of each head."""
    return [
        heads.figures("entropy_norm", "H/ln n", 1),
        heads.figures("utilisation", "rank", 1, percents),
        heads.figures("gate_mean", "gate", 1),
        heads.figures("value_drain", "drain", 4, numbers.short),
        heads.figures("m_act", "max |h|", 4, numbers.short),
        heads.figures("erank", "erank", 5, numbers.short),
    ]


def _remarks(page: Page, drawn: Sequence[RenderableType]) -> Iterator[str]:
    yield legend(
        drawn,
        {
            **sink.meanings(page),
            "H/ln n": entropy.MEANING,
            "rank": "used share of the layer's rank bound",
            "gate": "its mean",
            "max |h|": "largest activation behind the layer",
            "erank": "effective rank of the layer's output",
        },
    )
    yield hint(page)
    if has(page.results, ["erank"]):
        yield rank.bottleneck(page)
