"""Plots of results as files, one idea a file, and an overview of all of them."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from attnprobe.errors import InputError
from attnprobe.files import replacing
from attnprobe.render import axes, overview
from attnprobe.render.names import labels
from attnprobe.render.parts import Part, part_keys, part_title, parts
from attnprobe.render.shares import Named, colour_bar, known, share_top, with_share
from attnprobe.result import Result

FORMATS = ("png", "svg", "pdf")
PANELS = 12  # small drawings on one figure; of more layers so many are picked evenly
DPI = 200
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a plot looks alike everywhere
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "pdf.fonttype": 42,
    "svg.hashsalt": "attnprobe",
}
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


@dataclass(frozen=True)
class Drawing:
    """A figure and the name of its file, without a suffix."""

    name: str
    figure: Figure


Maker = Callable[[Named], Iterator[Drawing]]


def plot(
    results: Sequence[Result],
    directory: str | os.PathLike[str],
    view: str = "scan",
    format: str = "png",
) -> list[Path]:
    """Draws what a view has and what was measured; files appear whole or not at all.

    Args:
        results: one a checkpoint.
        directory: made if it is not there.
        view: "sink" (heat map, alpha over position, F-Attr by layer), "entropy" (heat map), "rank"
            (spectra), "gate" (histograms), or "scan" for all of these and an overview.
        format: "png", "svg" or "pdf".

    Returns:
        The files written.

    Raises:
        InputError: an unknown view or format, or a directory that cannot be written to.
    """
    if view not in VIEWS:
        raise InputError(f"unknown view {view!r}: choose from {', '.join(VIEWS)}")
    if format not in FORMATS:
        raise InputError(f"unknown plot format {format!r}: choose from {', '.join(FORMATS)}")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror or error}") from error
    named = list(zip(labels(results), results, strict=True))
    written = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # a checkpoint may be called in a script that the font lacks: boxes, not noise
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for maker in VIEWS[view]:
            for drawing in maker(named):
                written.append(folder / f"{drawing.name}.{format}")
                with replacing(written[-1]) as temporary:
                    drawing.figure.savefig(
                        temporary, format=format, dpi=DPI, metadata=NO_DATE[format]
                    )
    return written


def file_name(label: str, taken: Sequence[str] = ()) -> str:
    """A checkpoint's name as part of a file name on any system."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[-60:].strip("-.") or "model"
    number, unique = 2, name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def _files(named: Named) -> list[tuple[str, str, Result]]:
    """File name, label and result of each checkpoint."""
    files: list[str] = []
    for label, _ in named:
        files.append(file_name(label, files))
    return [(file, *pair) for file, pair in zip(files, named, strict=True)]


# one file a checkpoint


def _share_maps(named: Named) -> Iterator[Drawing]:
    top = share_top(named)
    for file, label, result in _files(named):
        figure = _heat_maps(label, result, "f_attr", top, "viridis", "F-Attr, share of attention")
        if figure is not None:
            yield Drawing(f"{file}-f_attr", figure)


def _entropy_maps(named: Named) -> Iterator[Drawing]:
    for file, label, result in _files(named):
        figure = _heat_maps(label, result, "entropy_norm", 1.0, "cividis", "entropy, share of ln n")
        if figure is not None:
            yield Drawing(f"{file}-entropy", figure)


def _heat_maps(
    label: str, result: Result, column: str, top: float, colours: str, unit: str
) -> Figure | None:
    """Heat maps of all kinds of attention of a checkpoint side by side, on one scale."""
    own = [part for part in parts(result) if known(part, column)]
    if not own:
        return None
    heads, layers = max(p.head_count for p in own), max(len(p.layers) for p in own)
    width = min(4.4, max(2.0, 0.9 + 0.36 * heads))
    height = min(8.5, max(2.2, 1.3 + 0.3 * layers))
    figure = Figure(figsize=(width * len(own) + 1.0, height), layout="constrained")
    grid = figure.subplots(1, len(own), squeeze=False)[0]
    for ax, part in zip(grid, own, strict=True):
        image = axes.heat_map(ax, part, column, top, colours)
        axes.titled(ax, part_title((part.stack, part.kind)) if len(own) > 1 else label)
    if len(own) > 1:
        figure.suptitle(label, parse_math=False)
    colour_bar(figure, image, list(grid), unit, own if column == "f_attr" else ())
    return figure


def _positions(named: Named) -> Iterator[Drawing]:
    for file, label, result in _files(named):
        own = [p for p in parts(result) if p.rows("positions")["alpha"].notna().any()]
        if not own:
            continue
        figure = Figure(figsize=(_width_of(len(own)), 3.4), layout="constrained")
        grid = figure.subplots(1, len(own), squeeze=False, sharey=True)[0]
        for ax, part in zip(grid, own, strict=True):
            lines = axes.positions(ax, part)
            _colour_layers(figure, ax, lines)
            axes.titled(ax, part_title((part.stack, part.kind)) if len(own) > 1 else label)
            ax.label_outer()
        if len(own) > 1:
            figure.suptitle(label, parse_math=False)
        yield Drawing(f"{file}-positions", figure)


def _width_of(panels: int) -> float:
    """Inches for panels side by side: two and more fill a page."""
    return 4.8 if panels == 1 else 3.2 * panels


def _colour_layers(figure: Figure, ax: Any, lines: dict[int, Any]) -> None:
    """A few lines are named, each with a colour and dash of its own; many are coloured in order."""
    if len(lines) <= axes.NAMED_LINES:
        for n, (layer, line) in enumerate(lines.items()):
            line.set(color=axes.colour(n), linestyle=axes.dashes(n), label=f"layer {layer}")
        axes.plain_legend(ax)
        return
    scale = matplotlib.colors.Normalize(min(lines), max(lines))
    colours = matplotlib.colormaps["viridis"]
    for layer, line in lines.items():
        line.set(color=colours(scale(layer)), linewidth=1.0)
    mapping = matplotlib.cm.ScalarMappable(scale, colours)
    bar = figure.colorbar(mapping, ax=ax, label="layer", pad=0.02, aspect=25)
    bar.outline.set_visible(False)
    axes.plain_legend(ax)


def _spectra(named: Named) -> Iterator[Drawing]:
    for file, label, result in _files(named):
        own = [
            (part, layer)
            for part in parts(result)
            for layer in part.rows("spectra")["layer"].unique().tolist()
        ]
        if not own:
            continue
        chosen = _evenly(own)
        figure, grid = _small_multiples(len(chosen))
        for ax, (part, layer) in zip(grid, chosen, strict=True):
            axes.spectra(ax, part, layer)
            axes.titled(ax, _panel_title(part, layer))
        axes.plain_legend(grid[0])
        _outer_labels(
            figure,
            _headed(label, len(chosen), len(own)),
            "number, the largest first",
            "singular value",
        )
        yield Drawing(f"{file}-spectra", figure)


def _gates(named: Named) -> Iterator[Drawing]:
    for file, label, result in _files(named):
        own = [
            (part, layer, row)
            for part in parts(result)
            for layer, row in axes.gate_rows(part).items()
        ]
        if not own:
            continue
        chosen = _evenly(own)
        figure, grid = _small_multiples(len(chosen))
        for ax, (part, layer, row) in zip(grid, chosen, strict=True):
            axes.gate_histogram(ax, row)
            axes.titled(ax, _panel_title(part, layer))
            axes.plain_legend(ax, handlelength=1.5)
            axes.gate_axis(ax, [row for *_, row in chosen])
        grid[0].set_ylim(bottom=0)  # shared, so only once all are drawn
        row = chosen[0][2]
        name = f"{row['position']} gate, value after its activation ({row['activation']})"
        _outer_labels(figure, _headed(label, len(chosen), len(own)), name, "share of values")
        yield Drawing(f"{file}-gates", figure)


def _evenly(items: Sequence[Any]) -> list[Any]:
    """At most as many as there are panels, the first and the last among them."""
    count = min(len(items), PANELS)
    return [items[i] for i in np.linspace(0, len(items) - 1, count).round().astype(int)]


def _small_multiples(count: int) -> tuple[Figure, list[Any]]:
    columns = min(4, count) if count != 3 else 3
    rows = math.ceil(count / columns)
    size = (max(4.0, 2.0 * columns + 0.4), max(2.6, 1.7 * rows + 0.7))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for ax in grid[count:]:
        ax.remove()
    for ax in grid[max(0, count - columns) : count]:
        ax.tick_params(labelbottom=True)  # also where the panel below it is gone
    return figure, list(grid[:count])


def _panel_title(part: Part, layer: int) -> str:
    several = len(part_keys([part.result])) > 1
    return f"{part.stack} {part.kind} {layer}" if several else f"layer {layer}"


def _headed(label: str, shown: int, there: int) -> str:
    return label if shown == there else f"{label} ({shown} of {there} layers)"


def _outer_labels(figure: Figure, title: str, below: str, beside: str) -> None:
    figure.suptitle(title, parse_math=False, fontsize=10)
    figure.supxlabel(below, fontsize=9)
    figure.supylabel(beside, fontsize=9)


# one file for all checkpoints


def _by_layer(named: Named) -> Iterator[Drawing]:
    groups = {
        key: own
        for key in part_keys([result for _, result in named])
        if (own := with_share(named, key))
    }
    if not groups:
        return
    figure = Figure(figsize=(_width_of(len(groups)), 3.2), layout="constrained")
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for ax, (key, own) in zip(grid, groups.items(), strict=True):
        axes.by_layer(ax, own, "f_attr", "f_attr_uniform")
        axes.plain_legend(ax)
        ax.set_ylabel("F-Attr, share of attention")
        if len(groups) > 1:
            axes.titled(ax, part_title(key))
        ax.label_outer()
    yield Drawing("f_attr-by-layer", figure)


def _overview(named: Named) -> Iterator[Drawing]:
    figure = overview.draw(named)
    if figure is not None:
        yield Drawing("overview", figure)


VIEWS: dict[str, tuple[Maker, ...]] = {
    "sink": (_share_maps, _positions, _by_layer),
    "entropy": (_entropy_maps,),
    "rank": (_spectra,),
    "gate": (_gates,),
}
VIEWS["scan"] = (_overview, *(maker for makers in list(VIEWS.values()) for maker in makers))
