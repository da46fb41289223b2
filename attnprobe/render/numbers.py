"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

MISSING = "–"


def known(value: object) -> float | None:
    """The number in a cell, None where the cell is null."""
    if value is None or pd.isna(value):  # type: ignore[call-overload]
        return None
    return float(value)  # type: ignore[arg-type]


def significant(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent where that is readable.

    Whole thousands are kept: 1053.2 is "1053", not "1050".
    """
    if value is None:
        return MISSING
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 0.9 < abs(value) < 1 and abs(round(value, digits)) == 1:  # a share is not rounded to all
        return f"{value:.{min(7, math.ceil(-math.log10(1 - abs(value))))}f}"
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    if not -5 <= exponent < 9:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def column(values: Sequence[float | None], decimals: int = 3) -> list[str]:
    """Numbers under each other, all with as many decimals as the smallest needs, up to five."""
    sizes = [abs(v) for v in values if v]
    if sizes:
        decimals = min(5, max(decimals, 1 - math.floor(math.log10(min(sizes)))), _room(sizes))
    return [MISSING if v is None else f"{v:.{decimals}f}" for v in values]


def _room(sizes: Sequence[float]) -> int:
    """The decimals that leave the largest number five digits or so."""
    return max(0, 5 - max(1, math.floor(math.log10(max(sizes))) + 1) + 1)


def whole(value: float | None) -> str:
    """A count without decimals; a mean of counts with those it needs."""
    return f"{value:.0f}" if value is not None and value == round(value) else significant(value)


def short(values: Sequence[float | None]) -> list[str]:
    """Numbers of any size under each other, to three significant digits each."""
    return [significant(v) for v in values]


def percent(value: float | None) -> str:
    """A share as a whole percentage that is never rounded to none or to all."""
    if value is None:
        return MISSING
    if 0 < value < 0.005:
        return "<1 %"
    if 0.995 <= value < 1:
        return ">99 %"
    return f"{100 * value:.0f} %"


def times(value: float | None, base: float | None) -> str:
    """How many times the base a value is."""
    if value is None or not base:
        return MISSING
    ratio = value / base
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"
