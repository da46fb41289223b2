"""Pictures made of block characters: they say the same without colour, and in a log file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
UNKNOWN = "·"
QUIET, LOUD = "cyan", "bold yellow"


def groups(count: int, width: int) -> int:
    """How many values share a cell where `count` of them have at most `width` cells."""
    return max(1, math.ceil(count / max(1, width)))


def strip(
    values: Sequence[float | None],
    width: int,
    *,
    extreme: Callable[[Sequence[float]], float] = max,
    high: float = 1.0,
    loud: Callable[[float], bool] = lambda value: False,
) -> Text:
    """One block a value, its height from 0 to `high`; where values share one, their extreme.

    Args:
        values: None is drawn as a dot.
        width: the most cells there are.
        extreme: what stands for values that share a cell.
        high: the value of a full block.
        loud: which values are to stand out, where there is colour.
    """
    size, text = groups(len(values), width), Text()
    for start in range(0, len(values), size):
        there = [v for v in values[start : start + size] if v is not None]
        if not there:
            text.append(UNKNOWN)
            continue
        value = extreme(there)
        text.append(_level(value / high if high else 0.0), LOUD if loud(value) else QUIET)
    return text


def _level(share: float) -> str:
    return LEVELS[min(len(LEVELS) - 1, max(0, int(share * len(LEVELS))))]


def bar(share: float | None, width: int) -> Text:
    """A bar of `width` cells, filled from the left to an eighth of a cell."""
    if share is None:
        return Text(" " * width)
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (EIGHTHS[rest] if rest else "")
    return Text(drawn.ljust(width), QUIET)


def histogram(counts: Sequence[float], width: int) -> Text:
    """Counts summed into at most `width` cells, the fullest one full height, an empty one blank."""
    size = groups(len(counts), width)
    sums = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    top = max(sums, default=0)
    if not top:
        return Text(" " * len(sums))
    return Text("".join(_level(s / top - 1e-9) if s else " " for s in sums), QUIET)


def logs(sigma: Sequence[float], decades: float = 7.0) -> tuple[list[float], float, float]:
    """log10 of singular values, and the lowest and highest to draw; zeros lie on the floor."""
    positive = [math.log10(s) for s in sigma if s > 0]
    if not positive:
        return [0.0 for _ in sigma], 0.0, 1.0
    high = max(positive)
    low = max(min(positive), high - decades)
    low = min(low, high - 1.0)  # a flat spectrum is to look flat, not like a cliff
    return [max(low, math.log10(s)) if s > 0 else low for s in sigma], low, high


def spectrum(sigma: Sequence[float], width: int, low: float, high: float) -> Text:
    """Singular values in at most `width` cells, log scale from 10^low to 10^high."""
    size, span = groups(len(sigma), width), high - low
    cells = []
    for start in range(0, len(sigma), size):
        part = [max(low, math.log10(s)) if s > 0 else low for s in sigma[start : start + size]]
        cells.append(_level((sum(part) / len(part) - low) / span - 1e-9))
    return Text("".join(cells), QUIET)


def chart(
    sigma: Sequence[float], width: int, height: int, number: Callable[[float], str]
) -> tuple[list[str], int]:
    """A spectrum as columns on a log scale, with its axis on the left.

    Args:
        sigma: singular values, the largest first.
        width: cells in all.
        height: rows of cells.
        number: writes a value of the axis.

    Returns:
        The rows from the top, and the cells that the axis takes.
    """
    values, low, high = logs(sigma)
    marks = {0: number(10**high), height // 2: number(10 ** ((low + high) / 2))}
    marks[height - 1] = number(10**low)
    margin = max(len(mark) for mark in marks.values()) + 2
    size = groups(len(values), width - margin)
    means = [sum(p) / len(p) for p in (values[i : i + size] for i in range(0, len(values), size))]
    wide = max(1, min(4, (width - margin) // max(1, len(means))))
    eighths = [max(1, round((v - low) / (high - low) * height * 8)) for v in means]
    rows = []
    for row in range(height):
        below = (height - 1 - row) * 8
        cells = "".join(_column_cell(e - below) * wide for e in eighths)
        rows.append(f"{marks.get(row, ''):>{margin - 2}} {'┤' if row in marks else '│'}{cells}")
    return rows, margin


def chart_cell(index: float, count: int, width: int, margin: int) -> int:
    """The cell of `chart` in which the singular value number `index` (from 1) stands."""
    size = groups(count, width - margin)
    wide = max(1, min(4, (width - margin) // max(1, math.ceil(count / size))))
    return margin + int((index - 1) // size) * wide


def _column_cell(eighths: int) -> str:
    if eighths <= 0:
        return " "
    return LEVELS[min(eighths, 8) - 1]
