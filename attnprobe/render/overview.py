"""What was found on one figure: F-Attr by head and by layer in every stack, and the gates."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from attnprobe.render import axes
from attnprobe.render.grid import clipped
from attnprobe.render.parts import Key, part_keys, part_title
from attnprobe.render.shares import Named, Owned, colour_bar, share_top, with_share

MAPPED = 3  # checkpoints whose heads are drawn; the others have files of their own
WIDTH, CHARACTERS = 7.6, 118  # inches, and characters of a note in a line of them
LETTERS, NAME = 11, 28  # of a title in an inch, of a name in a legend
UNIT = "F-Attr, share of attention"

Draw = Callable[[Any], None]


def draw(named: Named) -> Figure | None:
    """The overview; None where nobody has an F-Attr."""
    keys = part_keys([result for _, result in named])
    keys.sort(key=lambda key: (key[1] != "self", key[0] != "decoder"))
    groups = {key: own for key in keys if (own := with_share(named, key))}
    if not groups:
        return None
    figure = _single(named, *groups.values()) if len(groups) == 1 else _several(named, groups)
    lines = [line for note in _notes(named, groups) for line in textwrap.wrap(note, CHARACTERS)]
    if lines:
        text = "\n".join(lines)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=axes.GREY, parse_math=False)
    return figure


def _single(named: Named, own: Owned) -> Figure:
    """One kind of attention: heads above, layers below and the gate beside them."""
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.05, 1))
    upper, lower = halves
    shown = own[:MAPPED]
    _maps(upper, upper.subplots(1, len(shown), squeeze=False)[0], shown, share_top(named), UNIT)
    title, beside = _beside([own])
    panels = lower.subplots(1, 1 + len(beside), squeeze=False)[0]
    axes.by_layer(panels[0], own, "f_attr", "f_attr_uniform")
    axes.plain_legend(panels[0])
    panels[0].set_ylabel(UNIT)
    axes.titled(panels[0], "Attention on the first token")
    for panel in beside.values():
        panel(panels[1])
        axes.titled(panels[1], title)
    return figure


def _several(named: Named, groups: dict[Key, Owned]) -> Figure:
    """A row for each stack and kind, heads beside layers, and one below for gates or positions."""
    title, below = _beside(list(groups.values()))
    heights = [2.2] * len(groups) + [2.5] * bool(below)
    size = (max(WIDTH, 2.5 * len(below)), sum(heights) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    named_lines: dict[str, Any] = {}
    for row, (key, own) in zip(rows[:, 0], groups.items(), strict=False):
        row.suptitle(f"{part_title(key)}, F-Attr by head and by layer", fontsize=10)
        shown = own[:MAPPED]
        grid = row.subplots(1, len(shown) + 1, width_ratios=[1] * len(shown) + [1.3])
        _maps(row, grid[:-1], shown, share_top(named), "")
        axes.by_layer(grid[-1], own, "f_attr", "f_attr_uniform")
        grid[-1].locator_params(axis="x", nbins=6)
        handles, labels = grid[-1].get_legend_handles_labels()
        named_lines |= {n: h for n, h in zip(labels, handles, strict=True) if n not in named_lines}
    _shared_legend(figure, named_lines)
    if below:
        row, keys = rows[-1, 0], list(groups)
        row.suptitle(title, fontsize=10)
        grid = row.subplots(1, len(below), squeeze=False)[0]
        for ax, (place, panel) in zip(grid, below.items(), strict=True):
            panel(ax)
            axes.titled(ax, part_title(keys[place]))
            ax.set_ylabel(ax.get_ylabel() if ax is grid[0] else "")
    return figure


def _shared_legend(figure: Figure, lines: dict[str, Any]) -> None:
    """What the lines of all rows are, above them; the floor, which is anybody's, at the end."""
    names = sorted(lines, key=lambda name: name == axes.FLOOR)
    columns = max(1, min(4, 90 // max(map(len, names))))
    legend = figure.legend(
        [lines[name] for name in names],
        names,
        loc="outside upper center",
        ncols=columns,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _beside(groups: Sequence[Owned]) -> tuple[str, dict[int, Draw]]:
    """What is drawn beside F-Attr, by number of the group: gates, or else positions; its title."""
    for title, panel_of in (
        ("How far the gate is open", _gate_panel),
        ("Attention by position, mean of layers", _alpha_panel),
    ):
        panels = {n: panel for n, own in enumerate(groups) if (panel := panel_of(own))}
        if panels:
            return title, panels
    return "", {}


def _maps(figure: Any, grid: Sequence[Any], own: Owned, top: float, unit: str) -> None:
    room = WIDTH / (len(own) + (0.4 if unit else 1.6))  # inches of a map, one more is for lines
    for ax, (_, label, part) in zip(grid, own, strict=True):
        image = axes.heat_map(ax, part, "f_attr", top, "viridis", 12 if unit else 6)
        axes.titled(ax, clipped(label, int(LETTERS * room)))
    colour_bar(figure, image, list(grid), unit, [part for *_, part in own])


def _gates(own: Owned) -> list[tuple[int, str, dict[str, Any]]]:
    """The gates between 0 and 1, those of all layers of a checkpoint in one histogram."""
    pooled = [(n, label, axes.pooled_gate(part)) for n, label, part in own]
    return [(n, label, row) for n, label, row in pooled if row and axes.unit_gate(row)]


def _gate_panel(own: Owned) -> Draw | None:
    """Draws the gates of all layers in one histogram; None without gates between 0 and 1."""
    gates = _gates(own)

    def panel(ax: Any) -> None:
        for n, label, row in gates:
            axes.gate_histogram(ax, row, n, clipped(label, NAME))
        axes.gate_axis(ax, [row for *_, row in gates])
        ax.set_ylim(bottom=0)
        ax.set_xlabel("value of the gate")
        ax.set_ylabel("share of values")
        axes.plain_legend(ax)

    return panel if gates else None


def _alpha_panel(own: Owned) -> Draw | None:
    """Draws attention over position, layers averaged; None where it was not measured."""
    lines = [(n, label, *axes.mean_alpha(part)) for n, label, part in own]
    lines = [line for line in lines if len(line[2])]

    def panel(ax: Any) -> None:
        for n, label, x, y in lines:
            style = {"color": axes.colour(n), "linestyle": axes.dashes(n)}
            ax.plot(x, y, **style, label=clipped(label, NAME))
        axes.label_positions(ax)
        axes.plain_legend(ax)

    return panel if lines else None


def _notes(named: Named, groups: dict[Key, Owned]) -> Iterator[str]:
    """What is not on the figure, though it is in the results."""
    most = max(len(own) for own in groups.values())
    if most > MAPPED:
        yield f"Heads are drawn of the first {MAPPED} of {most} checkpoints; each has its own file."
    shown = {n for own in groups.values() for n, *_ in own}
    if absent := [label for n, (label, _) in enumerate(named) if n not in shown]:
        yield f"Not on it, for no F-Attr was measured: {', '.join(absent)}."
    silent = [k for k in part_keys([r for _, r in named]) if k not in groups]
    if silent and not absent:
        yield f"No F-Attr was measured of {', '.join(map(part_title, silent))}."
    if odd := _other_gates(groups):
        yield f"Gates that are not between 0 and 1 have a file of their own: {', '.join(odd)}."


def _other_gates(groups: dict[Key, Owned]) -> list[str]:
    """Checkpoints with gates that the histogram of gates cannot hold."""
    found: dict[str, None] = {}
    for own in groups.values():
        drawn = {n for n, *_ in _gates(own)}
        found |= {lab: None for n, lab, part in own if n not in drawn and axes.gate_rows(part)}
    return list(found)
