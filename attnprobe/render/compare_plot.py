"""A comparison as one figure for a paper: what happens by layer, and the ratios to the first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from attnprobe.compare import FIGURES, Comparison
from attnprobe.errors import InputError
from attnprobe.files import replacing
from attnprobe.render.axes import GREY, colour, marker, titled
from attnprobe.render.parts import part_title, records
from attnprobe.render.plots import DPI, FORMATS, NO_DATE, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {figure.metric: figure.label for figure in FIGURES}
#: Panels over layers, the first five that anyone has: metric, title, unit of the y axis.
PANELS = (
    ("f_attr", "Attention on the first token", "F-Attr"),
    ("entropy_norm", "Entropy", "share of ln n"),
    ("erank", "Effective rank of the layer", "share of its bound"),
    ("m_act", "Largest activation", "max |h|"),
    ("gate_mean", "Gate", "mean of the gate"),
    ("sink_rate", "Heads that sink on it", "share of heads"),
)
SHOWN, COLUMNS = 5, 3
WIDE = 20  # a largest activation so many times the smallest needs a log axis
NAME = 28  # characters of a checkpoint's name in the legend


def plot(comparison: Comparison, path: Path) -> None:
    """Draws a comparison, whole or not at all.

    Args:
        comparison: from `attnprobe.compare.compare`.
        path: ends in .png, .svg or .pdf.

    Raises:
        InputError: another suffix, or a path that cannot be written.
    """
    check_suffix(path)
    format = path.suffix.lower()[1:]
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = draw(comparison)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=format, dpi=DPI, metadata=NO_DATE[format])


def check_suffix(path: Path) -> None:
    """Raises InputError where a suffix stands for no plot format."""
    if path.suffix.lower()[1:] not in FORMATS:
        known = ", ".join(f".{format}" for format in FORMATS)
        raise InputError(f"cannot tell the format of {path}: end it in {known}")


def draw(comparison: Comparison) -> Figure:
    """The figure: panels over layers, and one of the model's ratios with their intervals.

    Where there are several stacks or kinds of attention each has its own panels, and the ratios
    stand beside the first of their kind.
    """
    blocks = _blocks(comparison)
    lines = [-(-len(block.panels) // COLUMNS) for block in blocks]
    columns = min(COLUMNS, max(len(block.panels) for block in blocks))
    heights = [2.0 * n + 0.2 for n in lines]
    figure = Figure(figsize=(2.45 * columns + 0.2, sum(heights) + 0.3), layout="constrained")
    rows: Any = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
    named: dict[str, Any] = {}  # what the legend of all panels explains
    for row, block, count in zip(rows[:, 0], blocks, lines, strict=True):
        grid = list(row.subplots(count, columns, squeeze=False).ravel())
        for ax, panel in zip(grid, block.panels, strict=False):
            panel(ax)
            handles, names = ax.get_legend_handles_labels()
            named |= {n: h for n, h in zip(names, handles, strict=True) if n not in named}
        for ax in grid[len(block.panels) :]:
            ax.remove()
        if block.title:
            row.suptitle(block.title, fontsize=9)
    legend = figure.legend(
        list(named.values()),
        list(named),
        loc="outside upper center",
        ncols=min(4, len(named)),
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


@dataclass(frozen=True)
class _Block:
    """The panels of one stack and kind of attention, "" where there is no other."""

    title: str
    panels: list[Callable[[Any], None]]


def _blocks(comparison: Comparison) -> list[_Block]:
    """Self-attention of the decoder first."""
    layers = comparison.layers
    keys = list(dict.fromkeys(zip(layers["stack"], layers["kind"], strict=True)))
    keys.sort(key=lambda key: (key[1] != "self", key[0] != "decoder"))
    kinds = [kind for kind in comparison.model["kind"].unique() if _has_ratios(comparison, kind)]
    blocks = []
    for stack, kind in keys:
        rows = layers[(layers["stack"] == stack) & (layers["kind"] == kind)]
        there = [p for p in PANELS if rows[rows["metric"] == p[0]]["value"].notna().any()]
        panels: list[Callable[[Any], None]] = [
            partial(_panel, comparison, rows[rows["metric"] == metric], title, unit)
            for metric, title, unit in there[:SHOWN]
        ]
        if kind in kinds:
            kinds.remove(kind)
            panels.append(partial(_ratios, comparison, kind, is_named=len(keys) > 1))
        if panels:
            blocks.append(_Block(part_title((stack, kind)) if len(keys) > 1 else "", panels))
    return blocks


def _panel(comparison: Comparison, rows: pd.DataFrame, title: str, unit: str, ax: Axes) -> None:
    _over_layers(ax, comparison, rows)
    titled(ax, title)
    ax.set_ylabel(unit)


def _over_layers(ax: Axes, comparison: Comparison, rows: pd.DataFrame) -> None:
    """A line a checkpoint; a rank as a share of its bound, F-Attr above its floor."""
    metric = rows["metric"].iloc[0]
    layers = sorted({int(layer) for layer in rows["layer"]})
    for n, name in enumerate(comparison.names):
        own = rows[rows["checkpoint"] == name].sort_values("layer")
        if own.empty:
            continue
        y = own["value"].to_numpy(float)
        if metric == "erank":
            y = y / own["bound"].to_numpy(float)
        x = own["layer"].to_numpy(float)
        (line,) = ax.plot(x, y, color=colour(n), marker=marker(n), label=_short(name), zorder=3)
        line.set(markersize=4, clip_on=False)
    if metric == "f_attr":
        floor = rows.groupby("layer")["bound"].mean()
        x, y = floor.index.to_numpy(float), floor.to_numpy(float)
        if len(x) == 1:  # a line of one point is none
            x, y = x + np.array([-0.4, 0.4]), y.repeat(2)
        ax.plot(x, y, "--", color=GREY, linewidth=1.1, label="floor of length and mask")
    values = rows["value"].dropna()
    if metric == "m_act" and 0 < WIDE * values.min() < values.max():
        ax.set_yscale("log")
        _plain_logs(ax.yaxis)
    elif ax.dataLim.y0 >= 0:
        ax.set_ylim(0, 1.08 * ax.dataLim.y1 or 1.0)
    ax.set_xlabel("layer")
    ax.set_xlim(layers[0] - 0.4, layers[-1] + 0.4)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _has_ratios(comparison: Comparison, kind: str) -> bool:
    model = comparison.model
    return bool(((model["kind"] == kind) & (model["ratio"] > 0)).any())


def _ratios(comparison: Comparison, kind: str, ax: Axes, *, is_named: bool) -> None:
    """A point a figure and checkpoint on a log axis; hollow where no difference is seen."""
    model = comparison.model
    model = model[(model["kind"] == kind) & (model["ratio"] > 0)]
    metrics = [m for m in LABELS if (model["metric"] == m).any()]
    others = comparison.names[1:]
    ends = [1.0]
    for n, name in enumerate(others, start=1):
        shift = min(0.3, 0.7 / len(others)) * (n - (len(others) + 1) / 2)
        for row in records(model[model["checkpoint"] == name]):
            y = metrics.index(row["metric"]) + shift
            low, high = row["ratio_low"], row["ratio_high"]
            if low > 0:  # false for a missing one
                ax.plot([low, high], [y, y], color=colour(n), linewidth=1.4, zorder=2)
                ends += [low, high]
            hollow: bool = not pd.isna(row["seen"]) and not row["seen"]
            ax.plot(
                row["ratio"],
                y,
                linestyle="none",
                marker=marker(n),
                markersize=5,
                color=colour(n),
                markerfacecolor="white" if hollow else colour(n),
                zorder=3,
            )
            ends.append(row["ratio"])
    ax.axvline(1, color=GREY, linewidth=0.9, linestyle="--", zorder=1)
    ax.set_xscale("log")
    low, high = min(ends) / 1.25, max(ends) * 1.25
    ax.set_xlim(low, high)
    _few_logs(ax, low, high)
    ax.set_ylim(len(metrics) - 0.5, -0.5)
    sure = set(model[model["ratio_low"].notna()]["metric"])
    names = [LABELS[m] + ("" if m in sure else "*") for m in metrics]
    ax.set_yticks(range(len(metrics)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(
        f"{100 * comparison.confidence:g} % interval (* none)\nhollow: no difference seen"
    )
    about = f", {kind}-attention" if is_named else ""
    titled(ax, f"Ratio to {_short(comparison.names[0])}{about}")


def _few_logs(ax: Axes, low: float, high: float) -> None:
    """A few ticks with plain numbers, 1 among them."""
    steps: Sequence[float]
    if high / low > 100:
        steps = (1.0,)
    elif high / low > 30:
        steps = (1.0, 3.0)
    elif high / low > 3:
        steps = (1.0, 2.0, 5.0)
    else:
        steps = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)
    decades = range(-6, 7) if len(steps) < 4 else range(1)
    ticks = [s * 10.0**d for d in decades for s in steps]
    ticks = [t for t in ticks if low <= t <= high]
    while len(ticks) > 5:
        ticks = [t for i, t in enumerate(ticks) if (i - ticks.index(1.0)) % 2 == 0]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_minor_locator(FixedLocator([]))


def _plain_logs(axis: matplotlib.axis.Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"
