"""The effective rank of what attention adds: by layer, or one layer in depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from attnprobe.render import headline, numbers
from attnprobe.render.blocks import QUIET, bar, chart, chart_cell, logs, spectrum, strip
from attnprobe.render.depth import HeadRows, Place, heads_of, hint, in_depth
from attnprobe.render.grid import Column
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
    percents,
    strip_note,
)
from attnprobe.render.parts import Part, parts, records
from attnprobe.result import Result

BAR, SMALL, CHART = 12, 12, 8  # cells of a bar and of a head's spectrum, rows of a layer's


def view(page: Page) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    yield from headlines(page, headline.rank)
    width = page.strip_width
    if in_depth(page):
        drawn = [block for name, result in page.named for block in _depth(page, name, result)]
        yield from drawn
        yield from footer(page, "rank", legend(drawn, _depth_meanings()), bottleneck(page))
        return
    drawn = list(by_part(page, lambda part, layers: _columns(part, layers, width)))
    yield from drawn
    yield from footer(page, "rank", legend(drawn, _meanings(page)), hint(page), bottleneck(page))


def share_columns(part: Part, layers: list[int], width: int) -> list[Column]:
    """Effective rank of the layer, its bound, and how far heads use theirs."""
    return [
        figures(part, layers, "erank", "erank", 0, _tenths),
        figures(part, layers, "rank_bound", "of", 0, _whole),
        figures(part, layers, "utilisation", "use", 2, percents),
        over_heads(part, layers, "utilisation", "heads", lambda v: strip(v, width, extreme=min)),
    ]


def _columns(part: Part, layers: list[int], width: int) -> list[Column]:
    return [
        *share_columns(part, layers, width),
        figures(part, layers, "erank_head", "a head", 3, _tenths),
        extreme_head(part, layers, "erank", "least", min, order=4, decimals=1),
        figures(part, layers, "mean_share", "mean row", 5, percents),
        figures(part, layers, "erank_centered", "centered", 6, _tenths),
        figures(part, layers, "stable_rank", "stable", 7, _tenths),
        figures(part, layers, "participation", "particip.", 8, _tenths),
        figures(part, layers, "num_rank", "num", 9, _whole),
    ]


def _depth(page: Page, name: str, result: Result) -> Iterator[RenderableType]:
    """A checkpoint's heads against their bounds; of one layer its spectrum, too."""
    label = name if len(page.results) > 1 else ""
    for part in parts(result):
        erank = part.figures("erank")
        if all(value is None for value in erank.values()):
            continue
        sigma = _sigma(part)
        columns = partial(_depth_columns, sigma=sigma)
        own, key = Page([("", result)], page.width), (part.stack, part.kind)
        is_named = len(parts(result)) > 1
        yield from heads_of(own, key, [("", part)], columns, is_named=is_named, label=label)
        if len(erank) == 1:
            ((layer, value),) = erank.items()
            if whole := sigma.get((layer, None)):
                yield BLANK
                yield from _chart(page, whole, value)


def _depth_columns(heads: HeadRows, sigma: Mapping[Place, list[float]]) -> list[Column]:
    _, low, high = logs([v for values in sigma.values() for v in values if v > 0])
    spectra = [
        spectrum(sigma[place], SMALL, low, high) if place in sigma else Text("")
        for place in heads.places
    ]
    used = [bar(v, BAR) for v in heads.values("utilisation")]
    return [
        heads.figures("erank", "erank", 0, _tenths),
        heads.figures("rank_bound", "of", 0, _whole),
        Column("used", used, 1, left=True, bundle="used"),
        heads.figures("utilisation", "", 1, percents, bundle="used"),
        heads.figures("erank_centered", "centered", 2, _tenths),
        heads.figures("mean_share", "mean row", 3, percents),
        Column("spectrum", spectra, 4, left=True),
        heads.figures("stable_rank", "stable", 5, _tenths),
        heads.figures("num_rank", "num", 6, _whole),
        heads.figures("participation", "particip.", 7, _tenths),
        heads.figures("value_drain", "drain", 8, numbers.short),
    ]


def _sigma(part: Part) -> dict[Place, list[float]]:
    """Singular values by layer and head, those of a layer under the head None."""
    found: dict[Place, list[float]] = {}
    for row in records(part.rows("spectra").sort_values("index")):
        head: int | None = None if pd.isna(row["head"]) else int(row["head"])
        if not pd.isna(row["sigma"]):
            found.setdefault((int(row["layer"]), head), []).append(float(row["sigma"]))
    return found


def _chart(page: Page, sigma: list[float], erank: float | None) -> Iterator[RenderableType]:
    """The layer's singular values on a log scale, its effective rank marked below."""
    yield Text("Singular values of the layer's output, the largest first, log scale")
    rows, margin = chart(sigma, page.width - 2, CHART, lambda v: numbers.significant(v, 2))
    for row in rows:
        yield Text("  " + row[:margin], no_wrap=True).append(row[margin:].rstrip(), QUIET)
    width = max(len(row) for row in rows)
    ends = "1" + f"{len(sigma)}".rjust(width - margin - 1)
    yield Text("  " + " " * (margin - 1) + "└" + ends, no_wrap=True)
    if erank is not None:
        cell = chart_cell(erank, len(sigma), page.width - 2, margin)
        label = f"effective rank {numbers.significant(erank)}"
        mark = f"▲ {label}" if cell + len(label) + 2 < page.width - 2 else f"{label} ▲"
        start = cell if mark.startswith("▲") else cell - len(label) - 1
        yield Text("  " + " " * start + mark, no_wrap=True)


def _tenths(values: Sequence[float | None]) -> list[str]:
    return [numbers.MISSING if v is None else f"{v:.1f}" for v in values]


def _whole(values: Sequence[float | None]) -> list[str]:
    return [numbers.whole(v) for v in values]


def bottleneck(page: Page) -> str:
    """Why a gated head's rank has a ceiling, whatever has been told of it; "" without gates."""
    if all(result.architecture.get("gate") in (None, "none") for result in page.results):
        return ""
    bounds = {
        int(head.value)
        for result in page.results
        for head in headline.heads_of(parts(result), "rank_bound")
    }
    here = f", here {bounds.pop()}" if len(bounds) == 1 else ""
    return (
        f"No head gated at G1–G4 can exceed its width d_v{here}: what is told of ranks above it is "
        "told of layers."
    )


def _meanings(page: Page) -> dict[str, str]:
    return {
        "erank": "effective rank of the layer's output",
        "of": "its bound",
        "heads": f"used share of a head's bound, {strip_note(page, 'lowest')}, ▁ 0 to █ 1",
        "a head": "mean effective rank of the heads",
        **_COMMON,
        "num": "numerical rank",
    }


def _depth_meanings() -> dict[str, str]:
    return {
        "erank": "effective rank",
        "of": "its bound",
        **_COMMON,
        "spectrum": "singular values on a log scale, the same for all rows",
        "num": "numerical rank",
        "drain": "size of the first token's value beside the others'",
    }


_COMMON = {
    "mean row": "share of the output that is one constant vector",
    "centered": "effective rank without it",
    "stable": "stable rank",
    "particip.": "participation ratio",
}
