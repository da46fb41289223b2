"""One drawing a function, on axes that are handed in. Readable in grey and by colour-blind eyes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from attnprobe.render.names import printable
from attnprobe.render.numbers import known
from attnprobe.render.parts import Part, records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

#: Okabe and Ito's colours in an order that stays apart in grey, without their pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), "--", ":", "-.")
GREY, FAINT, NOWHERE = "#555555", "#9A9A9A", "#E3E3E3"
NUMBERED = 80  # cells up to which a heat map carries its numbers
FLOOR = "floor (length and mask)"
NAMED_LINES = 6  # lines that a legend can name; more are coloured by layer

Lines = dict[int, tuple[np.ndarray, np.ndarray]]  # by layer: x, y


def heat_map(
    ax: Axes, part: Part, column: str, top: float, colours: str, ticks: int = 12
) -> AxesImage:
    """Layer × head, from 0 to `top`, with so many ticks at most; what is missing is grey."""
    heads = part.heads(column)
    layers = [layer for layer in part.layers if layer in heads]
    numbers = sorted({number for layer in layers for number, _ in heads[layer]})
    values = np.full((len(layers), len(numbers)), np.nan)  # (layers, heads)
    place = {number: i for i, number in enumerate(numbers)}
    for row, layer in enumerate(layers):
        for number, value in heads[layer]:
            values[row, place[number]] = np.nan if value is None else value
    ax.set_facecolor(NOWHERE)
    image = ax.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=top, aspect="auto")
    if values.size <= NUMBERED:
        for (row, col), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = "white" if value < 0.55 * top else "black"
                ax.text(col, row, _share(value), ha="center", va="center", color=ink, fontsize=8)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    _whole_ticks(ax.xaxis, numbers, ticks)
    _whole_ticks(ax.yaxis, layers, ticks)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


def _share(value: float) -> str:
    """Two decimals; what is below 1 is not rounded to it."""
    text = f"{value:.2f}"
    return ">.99" if text == "1.00" and value < 1 else text


def by_layer(ax: Axes, own: Sequence[tuple[int, str, Part]], column: str, floor: str) -> None:
    """A line a checkpoint over its layers, the floor dashed; one floor where all have the same.

    Args:
        ax: where to draw.
        own: number, which the colour goes by, name and part of each checkpoint.
        column: the figure.
        floor: the column of its floor.
    """
    floors = {}
    for n, name, part in own:
        x, y = _series(part.figures(column))
        every = max(1, len(x) // 16)
        ax.plot(x, y, color=colour(n), marker=marker(n), markevery=every, markersize=5, label=name)
        floors[n] = _series(part.figures(floor))
    same = len({tuple(np.round(y, 9)) for _, y in floors.values()}) == 1
    for drawn, (n, (x, y)) in enumerate(floors.items()):
        if same and drawn:
            continue
        label = None if drawn else FLOOR
        if len(x) == 1:  # a line of one point is none
            x, y = x + np.array([-0.4, 0.4]), y.repeat(2)
        ax.plot(x, y, "--", color=GREY if same else colour(n), linewidth=1.2, label=label)
    ax.set_xlabel("layer")
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
    _whole_limits(ax, sorted({layer for *_, part in own for layer in part.layers}))


def positions(ax: Axes, part: Part) -> dict[int, Any]:
    """alpha over the position of the key, heads averaged, one line a layer; gives the lines."""
    drawn = {}
    for layer, (x, y) in _alpha(part).items():
        drawn[layer] = ax.plot(x, np.where(y > 0, y, np.nan))[0]
    floor = uniform_alpha(part)
    if floor is not None:
        ax.plot(*floor, "--", color="black", linewidth=1.2, label="uniform attention", zorder=3)
    label_positions(ax)
    return drawn


def label_positions(ax: Axes) -> None:
    """Both axes logarithmic, with plain numbers on them."""
    ax.set(xscale="log", yscale="log", xlabel="position of the key, the first is 1")
    ax.set_ylabel("alpha, mean attention on the key")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _alpha(part: Part) -> Lines:
    rows = part.rows("positions")
    rows = rows[rows["alpha"].notna()]
    means = rows.groupby(["layer", "position_lo", "position_hi"])["alpha"].mean()
    lines: Lines = {}
    for layer in part.layers:
        if layer not in means.index.get_level_values(0):
            continue
        own = means.loc[layer].sort_index()
        bounds = np.array(own.index.tolist(), dtype=float) + 1  # (bins, 2)
        lines[layer] = (np.sqrt(bounds[:, 0] * bounds[:, 1]), own.to_numpy(float))
    return lines


def mean_alpha(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """alpha over position, layers averaged."""
    lines = list(_alpha(part).values())
    if not lines or any(len(x) != len(lines[0][0]) for x, _ in lines):
        return np.empty(0), np.empty(0)
    return lines[0][0], np.mean([y for _, y in lines], axis=0)


def uniform_alpha(part: Part) -> tuple[np.ndarray, np.ndarray] | None:
    """What uniform attention gives the key at each position, where the floor tells the mask.

    All documents of n tokens under a plain causal mask have the floor H_n / n, H_n the harmonic
    number, and key k (from 1) then gets (H_n - H_(k-1)) / (n - k + 1). Where every query sees all n
    keys it is 1 / n. For windows, or documents of several lengths, there is no such curve.
    """
    rows = part.rows("positions")
    floors = [v for v in part.figures("f_attr_uniform").values() if v is not None]
    if rows.empty or not floors or max(floors) - min(floors) > 1e-6:
        return None
    last = rows[rows["keys"] > 0][["position_lo", "position_hi"]].max()
    for n in range(int(last["position_lo"]) + 1, int(last["position_hi"]) + 2):
        inverse = 1 / np.arange(1, n + 1)
        if abs(inverse.sum() / n - floors[0]) < 1e-6:
            k = np.arange(1, n + 1)
            return k, np.cumsum(inverse[::-1])[::-1] / (n - k + 1)
        if abs(1 / n - floors[0]) < 1e-6:
            return np.array([1, n]), np.array([1 / n, 1 / n])
    return None


def spectra(ax: Axes, part: Part, layer: int) -> None:
    """Singular values of a layer's output, those of its heads faint behind it; log scale."""
    rows = part.rows("spectra")
    rows = rows[(rows["layer"] == layer) & (rows["sigma"] > 0)]
    labelled = False
    for head, own in rows.groupby("head", dropna=True):
        del head
        ax.plot(
            own["index"].to_numpy(float) + 1,
            own["sigma"].to_numpy(float),
            color=FAINT,
            linewidth=0.8,
            label=None if labelled else "each head",
        )
        labelled = True
    whole = rows[rows["head"].isna()]
    x, y = whole["index"].to_numpy(float) + 1, whole["sigma"].to_numpy(float)
    ax.plot(x, y, color=COLOURS[0], linewidth=1.8, label="layer")
    ax.set_yscale("log")


def gate_histogram(ax: Axes, row: dict[str, Any], n: int = 0, name: str | None = None) -> None:
    """The share of gate values in each bin, the mean marked."""
    counts, edges = np.array(row["histogram"], float), np.array(row["edges"], float)
    shares = counts / max(1.0, counts.sum())
    ax.stairs(shares, edges, fill=name is None, color=colour(n), alpha=0.75 if name is None else 1)
    if name is not None:
        ax.stairs(shares, edges, fill=True, color=colour(n), alpha=0.15)
    mean = known(row["mean"])
    if mean is not None:
        text = f"mean {mean:.2f}" if name is None else f"{name}, mean {mean:.2f}"
        ax.axvline(mean, color="black" if name is None else colour(n), linestyle="--", label=text)


def gate_axis(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The axis of some gates' values: 0 to 1, or symmetric-logarithmic as far as there are any."""
    if all(unit_gate(row) for row in rows):
        ax.set_xlim(0, 1)
        ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        return
    counts = [np.array(row["histogram"]) > 0 for row in rows]
    edges = [np.array(row["edges"], float) for row in rows]
    low = min(0.0, *(e[:-1][there].min() for e, there in zip(edges, counts, strict=True)))
    high = max(0.0, *(e[1:][there].max() for e, there in zip(edges, counts, strict=True)))
    ticks = [t for t in (-100.0, -1.0, -0.01, 0.0, 0.01, 1.0, 100.0) if low <= t <= high]
    ax.set_xscale("symlog", linthresh=1e-3)
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(low, high)


def unit_gate(row: dict[str, Any]) -> bool:
    """Whether a gate's histogram runs from 0 to 1."""
    edges = row["edges"]
    return bool(edges) and edges[0] == 0 and edges[-1] == 1


def gate_rows(part: Part) -> dict[int, dict[str, Any]]:
    """The gate's row of every layer that has a histogram."""
    rows = part.rows("gates")
    return {
        int(row["layer"]): row
        for row in records(rows[rows["head"].isna()])
        if isinstance(row["histogram"], list) and sum(row["histogram"])
    }


def pooled_gate(part: Part) -> dict[str, Any] | None:
    """The gates of all layers in one histogram, where their bins agree."""
    rows = list(gate_rows(part).values())
    if not rows or any(row["edges"] != rows[0]["edges"] for row in rows):
        return None
    shares = [np.array(row["histogram"], float) / sum(row["histogram"]) for row in rows]
    means = [mean for row in rows if (mean := known(row["mean"])) is not None]
    return {
        **rows[0],
        "histogram": np.mean(shares, axis=0).tolist(),
        "mean": float(np.mean(means)) if means else None,
    }


def colour(n: int) -> str:
    """The colour of checkpoint number n."""
    return COLOURS[n % len(COLOURS)]


def marker(n: int) -> str:
    """The marker of checkpoint number n."""
    return MARKERS[n % len(MARKERS)]


def dashes(n: int) -> Any:
    """The line style of line number n."""
    return DASHES[n % len(DASHES)]


def titled(ax: Axes, text: str) -> None:
    """A title taken as it is: a $ in a name is no formula."""
    ax.set_title(printable(text), parse_math=False)


def plain_legend(ax: Axes, **options: Any) -> None:
    """A legend without a frame, its names taken as they are."""
    if not ax.get_legend_handles_labels()[0]:
        return
    legend = ax.legend(frameon=False, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _series(figures: dict[int, float | None]) -> tuple[np.ndarray, np.ndarray]:
    x = np.array(list(figures), float)
    return x, np.array([np.nan if v is None else v for v in figures.values()], float)


def _whole_ticks(axis: Any, numbers: Sequence[int], most: int) -> None:
    """Ticks at cells, named by the layer or head that they hold."""
    step = next(
        s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 100, 10**9) if len(numbers) / s <= most
    )
    axis.set_ticks(range(0, len(numbers), step), [str(n) for n in numbers[::step]])


def _whole_limits(ax: Axes, layers: Sequence[int]) -> None:
    """No layer 0.5 on the axis."""
    if layers:
        ax.set_xlim(layers[0] - 0.4, layers[-1] + 0.4)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
