"""How much attention the first token gets, in which heads, and where else sinks are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType

from attnprobe.render import headline
from attnprobe.render.blocks import strip
from attnprobe.render.depth import BARS, HeadRows, by_head, hint, in_depth
from attnprobe.render.grid import Column
from attnprobe.render.names import token_alone
from attnprobe.render.numbers import significant, times
from attnprobe.render.page import (
    Page,
    by_part,
    extreme_head,
    figures,
    footer,
    headlines,
    legend,
    mean,
    over_heads,
    percents,
    strip_note,
)
from attnprobe.render.parts import Part, records
from attnprobe.render.places import massive, sinks

REST = 30  # cells that a checkpoint's other columns take beside the strip


def view(page: Page) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    yield from headlines(page, headline.sink)
    width = page.strip_width
    if in_depth(page):
        drawn = list(by_head(page, _head_columns))
    else:
        drawn = list(by_part(page, lambda part, layers: _columns(part, layers, width)))
    yield from drawn
    yield from sinks(page)
    yield from massive(page)
    yield from footer(page, "sink", legend(drawn, meanings(page)), hint(page))


def meanings(page: Page) -> dict[str, str]:
    """What the columns of sinks mean."""
    above = headline.epsilon(page.results[0])
    return {
        "F-Attr": f"mean share of attention on the first token{_first(page)}",
        "floor": "what length and mask alone would give it",
        "heads": f"F-Attr, {strip_note(page)}, ▁ 0 to █ 1",
        "sinks": f"share of heads and documents in which the first token gets more than {above:g}",
        "first 4": "attention on the first four tokens",
        "drain": "size of the first token's value beside the others', 0 where it is drained",
        "to none": "attention that goes to no token",
        BARS: "F-Attr",
    }


def _first(page: Page) -> str:
    """What the first token is, where it is not simply that of a text: " ([CLS])"."""
    firsts: dict[str, list[str]] = {}
    for result in page.results:
        for row in records(result.layers):
            is_text = row["kind"] == "self" and row["stack"].startswith("decoder")
            if isinstance(row["first_token"], str) and not is_text:
                firsts.setdefault(token_alone(row["first_token"]), []).append(
                    f"{row['stack']} {row['kind']}"
                )
    if len(firsts) == 1:
        return f" ({next(iter(firsts))})"
    told = [f"{token} in {' and '.join(dict.fromkeys(where))}" for token, where in firsts.items()]
    return f" ({', '.join(told)})" if told else ""


def floor_columns(part: Part, layers: list[int], order: int = 0) -> list[Column]:
    """F-Attr, never without its floor."""
    return [
        replace(figures(part, layers, column, title, order), bundle="share")
        for column, title in (("f_attr", "F-Attr"), ("f_attr_uniform", "floor"))
    ]


def share_columns(part: Part, layers: list[int], width: int) -> list[Column]:
    """F-Attr, its floor, and F-Attr over heads: what every view of sinks begins with."""
    above = headline.epsilon(part.result)
    return [
        *floor_columns(part, layers),
        over_heads(
            part, layers, "f_attr", "heads", lambda v: strip(v, width, loud=lambda x: x > above)
        ),
        extreme_head(part, layers, "f_attr", "worst head"),
    ]


def head_shares(heads: HeadRows) -> list[Column]:
    """The same of each head: F-Attr beside its floor, and as a bar."""
    return [
        heads.figures("f_attr", "F-Attr", bundle="share"),
        heads.figures("f_attr_uniform", "floor", bundle="share"),
        heads.bars("f_attr"),
    ]


def _head_columns(heads: HeadRows) -> list[Column]:
    shares = heads.values("f_attr"), heads.values("f_attr_uniform")
    ratios = [times(*pair) for pair in zip(*shares, strict=True)]
    return [
        *head_shares(heads),
        Column("× floor", ratios, 3),
        heads.figures("sink_rate", "sinks", 2, percents),
        heads.figures("value_drain", "drain", 4, _two),
        heads.figures("first4", "first 4", 5),
        *([heads.figures("null_mass", "to none", 3)] if _leaks(heads.values("null_mass")) else []),
    ]


def _columns(part: Part, layers: list[int], width: int) -> list[Column]:
    share, floor, heads, worst = share_columns(part, layers, width)
    return [
        share,
        floor,
        _ratio(part, layers),
        heads,
        worst,
        figures(part, layers, "sink_rate", "sinks", 4, percents),
        figures(part, layers, "first4", "first 4", 6),
        figures(part, layers, "value_drain", "drain", 5, _two),
        *_null_mass(part, layers),
    ]


def _ratio(part: Part, layers: list[int]) -> Column:
    share, floor = part.figures("f_attr"), part.figures("f_attr_uniform")
    foot = times(mean(part, "f_attr"), mean(part, "f_attr_uniform"))
    return Column(
        "× floor",
        [times(share[n], floor.get(n)) if n in share else "" for n in layers],
        3,
        foot=foot if mean(part, "f_attr") is not None else "",
    )


def _null_mass(part: Part, layers: list[int]) -> list[Column]:
    if not _leaks(part.figures("null_mass").values()):
        return []
    return [figures(part, layers, "null_mass", "to none", 3)]


def _leaks(values: Iterable[float | None]) -> bool:
    """Whether rows really stay below 1, as behind a learned sink logit."""
    return any(value is not None and value > 1e-4 for value in values)


def _two(values: Sequence[float | None]) -> list[str]:
    return [significant(v, 2) for v in values]
