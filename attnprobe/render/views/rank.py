"""The effective rank of what attention adds: by layer, or one layer in depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from attnprobe.render import headline, numbers
from attnprobe.render.blocks import QUIET, bar, chart, chart_cell, logs, spectrum, strip
from attnprobe.render.grid import Column, Group, tables
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
from attnprobe.render.parts import Part, Row, part_title, parts, records, shown_layers

BAR, SMALL, CHART = 12, 12, 8  # cells of a bar and of a head's spectrum, rows of a layer's


def view(page: Page) -> Iterator[RenderableType]:
    """The page from top to bottom."""
    yield from headlines(page, headline.rank)
    width = page.strip_width
    if all(len(shown_layers(result)) == 1 for result in page.results):
        drawn = [
            block
            for name, result in page.named
            for part in parts(result)
            for block in _depth(page, name, part)
        ]
        yield from drawn
        yield from footer(page, "rank", legend(drawn, _depth_meanings()), bottleneck(page))
        return
    drawn = list(by_part(page, lambda part, layers: _columns(part, layers, width)))
    yield from drawn
    yield from footer(page, "rank", legend(drawn, _meanings(page)), bottleneck(page))


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


def _depth(page: Page, name: str, part: Part) -> Iterator[RenderableType]:
    """One layer: its heads against their bounds, and its spectrum."""
    (layer,) = part.layers
    heads = records(part.rows("heads"))
    whole = records(part.rows("layers"))[0]
    if whole["erank"] is None or numbers.known(whole["erank"]) is None:
        return
    sigma = _sigma(part)
    yield BLANK
    place = f"{part_title((part.stack, part.kind))} · layer {layer}"
    yield Text(f"{name} · {place}" if len(page.results) > 1 else place, "bold")
    rows = [*heads, whole]
    labels = [*(str(row["head"]) for row in heads), "all"]
    spectra = [sigma.get(row["head"]) for row in heads] + [sigma.get(None)]
    columns = _depth_columns(rows, spectra)
    yield from tables([Column("head", labels)], [Group("", columns)], page.width)
    if sigma.get(None):
        yield BLANK
        yield from _chart(page, sigma[None], numbers.known(whole["erank"]))


def _depth_columns(rows: Sequence[Row], spectra: Sequence[list[float] | None]) -> list[Column]:
    values = {name: [numbers.known(row[name]) for row in rows] for name in _FIGURES}
    drawn = [v for sigma in spectra for v in sigma or () if v > 0]
    _, low, high = logs(drawn)
    small = [spectrum(sigma, SMALL, low, high) if sigma else Text("") for sigma in spectra]
    drains = [numbers.known(row.get("value_drain")) for row in rows]
    return [
        Column("erank", _tenths(values["erank"])),
        Column("of", _whole(values["rank_bound"])),
        Column("used", [bar(v, BAR) for v in values["utilisation"]], 1, left=True, bundle="used"),
        Column("", percents(values["utilisation"]), 1, bundle="used"),
        Column("centered", _tenths(values["erank_centered"]), 2),
        Column("mean row", percents(values["mean_share"]), 3),
        Column("spectrum", small, 4, left=True),
        Column("stable", _tenths(values["stable_rank"]), 5),
        Column("num", _whole(values["num_rank"]), 6),
        Column("particip.", _tenths(values["participation"]), 7),
        Column("drain", numbers.short(drains), 8),
    ]


_FIGURES = (
    *("erank", "rank_bound", "utilisation", "erank_centered", "mean_share"),
    *("stable_rank", "num_rank", "participation"),
)


def _sigma(part: Part) -> dict[int | None, list[float]]:
    """Singular values by head, those of the layer under None."""
    rows = part.rows("spectra")
    found: dict[int | None, list[float]] = {}
    for row in records(rows.sort_values("index")):
        head: int | None = None if pd.isna(row["head"]) else int(row["head"])
        if not pd.isna(row["sigma"]):
            found.setdefault(head, []).append(float(row["sigma"]))
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
        f"No head gated at G1–G4 can exceed its width d_v{here}: the “127 -> 157 against a "
        "bottleneck of 128” of popular accounts can only be a layer figure."
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
