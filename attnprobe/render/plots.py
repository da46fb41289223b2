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
from attnprobe.render import axes
from attnprobe.render.names import labels
from attnprobe.render.parts import Part, part_keys, part_title, parts
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


Maker = Callable[[Sequence[tuple[str, Result]]], Iterator[Drawing]]


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


def _files(named: Sequence[tuple[str, Result]]) -> list[tuple[str, str, Result]]:
    """File name, label and result of each checkpoint."""
    files: list[str] = []
    for label, _ in named:
        files.append(file_name(label, files))
    return [(file, *pair) for file, pair in zip(files, named, strict=True)]


def _known(part: Part, column: str) -> bool:
    return bool(part.rows("heads")[column].notna().any())


def _share_top(named: Sequence[tuple[str, Result]]) -> float:
    """The upper end of the F-Attr scale, the same in all heat maps of a call."""
    largest = max((float(r.heads["f_attr"].max()) for _, r in named if len(r.heads)), default=1.0)
    return next((top for top in (0.1, 0.25, 0.5) if largest <= top), 1.0)


# one file a checkpoint


def _share_maps(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
    top = _share_top(named)
    for file, label, result in _files(named):
        figure = _heat_maps(label, result, "f_attr", top, "viridis", "F-Attr, share of attention")
        if figure is not None:
            yield Drawing(f"{file}-f_attr", figure)


def _entropy_maps(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
    for file, label, result in _files(named):
        figure = _heat_maps(label, result, "entropy_norm", 1.0, "cividis", "entropy, share of ln n")
        if figure is not None:
            yield Drawing(f"{file}-entropy", figure)


def _heat_maps(
    label: str, result: Result, column: str, top: float, colours: str, unit: str
) -> Figure | None:
    """Heat maps of all kinds of attention of a checkpoint side by side, on one scale."""
    own = [part for part in parts(result) if _known(part, column)]
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
    _colour_bar(figure, image, list(grid), unit, own if column == "f_attr" else ())
    return figure


def _colour_bar(
    figure: Figure, image: Any, grid: Sequence[Any], unit: str, own: Sequence[Part]
) -> None:
    """A scale, with the floor marked where all layers have the same."""
    height = figure.bbox.height / figure.dpi
    bar = figure.colorbar(image, ax=grid, label=unit, pad=0.03, aspect=max(15, 8 * height))
    bar.outline.set_visible(False)
    floors = [v for p in own for v in p.figures("f_attr_uniform").values() if v is not None]
    if floors and max(floors) - min(floors) < 1e-6:
        bar.ax.axhline(floors[0], color="white", linewidth=2.5)
        bar.ax.axhline(floors[0], color="black", linewidth=1, linestyle="--")
        bar.ax.annotate(
            "floor",
            (0, floors[0]),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
        )


def _positions(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
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


def _spectra(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
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


def _gates(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
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


def _by_layer(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
    groups = {
        key: own
        for key in part_keys([result for _, result in named])
        if (own := _with_share(named, key))
    }
    if not groups:
        return
    figure = Figure(figsize=(_width_of(len(groups)), 3.2), layout="constrained")
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for ax, (key, own) in zip(grid, groups.items(), strict=True):
        axes.by_layer(ax, own, "f_attr", "f_attr_uniform")
        ax.set_ylabel("F-Attr, share of attention")
        if len(groups) > 1:
            axes.titled(ax, part_title(key))
        ax.label_outer()
    yield Drawing("f_attr-by-layer", figure)


def _with_share(
    named: Sequence[tuple[str, Result]], key: tuple[str, str]
) -> list[tuple[str, Part]]:
    """The checkpoints in which this kind of attention has an F-Attr."""
    own = [(label, Part(result, *key)) for label, result in named]
    return [(label, part) for label, part in own if part.layers and _known(part, "f_attr")]


def _overview(named: Sequence[tuple[str, Result]]) -> Iterator[Drawing]:
    """Heat maps side by side, F-Attr by layer, and the gate: what gating does, on one figure."""
    keys = part_keys([result for _, result in named])
    keys.sort(key=lambda key: (key[1] != "self", key[0] != "decoder"))
    own = _with_share(named, keys[0]) if keys else []
    if not own:
        return
    mapped, top = own[:3], _share_top(named)
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.05, 1))
    upper, lower = halves
    grid = upper.subplots(1, len(mapped), squeeze=False)[0]
    for ax, (label, part) in zip(grid, mapped, strict=True):
        image = axes.heat_map(ax, part, "f_attr", top, "viridis")
        axes.titled(ax, label)
    _colour_bar(upper, image, list(grid), "F-Attr, share of attention", [p for _, p in mapped])
    beside = _gate_panel(own) or _alpha_panel(own)
    panels = lower.subplots(1, 2 if beside else 1, squeeze=False)[0]
    axes.by_layer(panels[0], own, "f_attr", "f_attr_uniform")
    panels[0].set_ylabel("F-Attr, share of attention")
    axes.titled(panels[0], "Attention on the first token")
    if beside is not None:
        beside(panels[1])
    yield Drawing("overview", figure)


def _gate_panel(own: Sequence[tuple[str, Part]]) -> Callable[[Any], None] | None:
    """Draws the gates of all layers in one histogram; None without gates between 0 and 1."""
    pooled = [(n, label, axes.pooled_gate(part)) for n, (label, part) in enumerate(own)]
    gates = [(n, label, row) for n, label, row in pooled if row and axes.unit_gate(row)]

    def draw(ax: Any) -> None:
        for n, label, row in gates:
            axes.gate_histogram(ax, row, n, label)
        axes.gate_axis(ax, [row for *_, row in gates])
        ax.set_ylim(bottom=0)
        ax.set_xlabel("value of the gate")
        ax.set_ylabel("share of values")
        axes.titled(ax, "How far the gate is open")
        axes.plain_legend(ax)

    return draw if gates else None


def _alpha_panel(own: Sequence[tuple[str, Part]]) -> Callable[[Any], None] | None:
    """Draws attention over position, layers averaged; None where it was not measured."""
    lines = [(n, label, *axes.mean_alpha(part)) for n, (label, part) in enumerate(own)]

    def draw(ax: Any) -> None:
        for n, label, x, y in lines:
            ax.plot(x, y, color=axes.colour(n), linestyle=axes.dashes(n), label=label)
        axes.label_positions(ax)
        axes.titled(ax, "Attention by position, mean of layers")
        axes.plain_legend(ax)

    return draw if any(len(x) for _, _, x, _ in lines) else None


VIEWS: dict[str, tuple[Maker, ...]] = {
    "sink": (_share_maps, _positions, _by_layer),
    "entropy": (_entropy_maps,),
    "rank": (_spectra,),
    "gate": (_gates,),
}
VIEWS["scan"] = (_overview, *(maker for makers in list(VIEWS.values()) for maker in makers))
