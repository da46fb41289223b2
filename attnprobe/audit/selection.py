"""The rows of a result that a rule speaks of, their numbers, and why a number is missing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pandas as pd

from attnprobe.audit import figures
from attnprobe.audit.findings import Place
from attnprobe.result import Result

#: Tables with rows of layers (their head null) and rows of heads; a rule is for one of the two.
MIXED = ("gates", "spectra")
_PLACING = (
    *("site", "kind", "layer", "head", "sample", "document", "position", "token", "index"),
    *("position_lo", "dimension"),
)


class Wanted(Protocol):
    """What says which rows: a rule, or a figure held against a baseline."""

    @property
    def table(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def scope(self) -> str | None: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def stack(self) -> str | None: ...
    @property
    def layers(self) -> Sequence[int] | None: ...
    @property
    def heads(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, eq=False)
class Selected:
    """Rows of a table and the numbers of one column, NaN where a number is missing.

    `problem` says why the rows themselves are not what was asked for, None where they are.
    """

    result: Result
    table: str
    column: str
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    values: np.ndarray = field(default_factory=lambda: np.empty(0))  # (rows,)
    problem: str | None = None

    @property
    def all_there(self) -> bool:
        """Whether every number is one."""
        return bool(np.isfinite(self.values).all())

    @property
    def is_flag(self) -> bool:
        """Whether the column says yes or no of every row."""
        return (self.table, self.column) == ("heads", "collapsed")

    def key(self, row: int) -> Hashable:
        """What a row is called in every result of the same model."""
        cells = self.rows.iloc[row]
        return tuple(
            None if pd.isna(cells[c]) else cells[c] for c in _PLACING if c in self.rows.columns
        )

    def place(self, row: int, before: float | None = None) -> Place:
        """Where a row is, in words and numbers."""
        cells = {c: _plain(v) for c, v in self.rows.iloc[row].items() if c in (*_PLACING, "stack")}
        value = float(self.values[row])
        reason = None if np.isfinite(value) else self.why(row)
        return Place(
            stack=cells.get("stack"),
            kind=cells.get("kind"),
            layer=cells.get("layer"),
            head=cells.get("head"),
            sample=cells.get("sample", cells.get("document")),
            position=cells.get("position_lo", cells.get("position")),
            token=cells.get("token"),
            value=value if np.isfinite(value) else None,
            before=before,
            reason=reason,
        )

    def why(self, row: int | None = None) -> str:
        """Why a number is missing: from `not_measured`, or from what the result tells of itself."""
        if row is not None and np.isinf(self.values[row]):
            return "it is infinite"
        site = None if row is None or "site" not in self.rows else self.rows["site"].iloc[row]
        return why_missing(self.result, self.table, self.column, site)


def select(result: Result, wanted: Wanted) -> Selected:
    """The rows that a rule speaks of; a problem where there is none, or not all it names."""
    table, column = wanted.table, wanted.metric
    frame = getattr(result, table)
    if column not in frame.columns or not isinstance(frame[column], pd.Series):
        return Selected(result, table, column, problem=f"the result has no column {table}.{column}")
    rows = _scoped(frame, wanted)
    for name, value in (("kind", wanted.kind), ("stack", wanted.stack)):
        if value is not None:
            rows = rows[(rows[name] == value).fillna(False).astype(bool)] if name in rows else rows
    problem = None
    for name, numbers in (("layer", wanted.layers), ("head", wanted.heads)):
        if numbers is not None and problem is None:
            rows, problem = _numbered(rows, name, numbers)
    if problem is not None and table in figures.EVENTS:
        problem = None  # that nothing was found in a layer is no gap; `looked_for` tells
    if rows.empty and problem is None and table not in figures.EVENTS:
        problem = _why_empty(result, wanted, frame)
    return Selected(result, table, column, rows, numbers_of(rows[column]), problem)


def looked_for(result: Result, wanted: Wanted) -> str | None:
    """Why a table of finds says nothing by being empty; None where it was measured."""
    evidence = figures.finds(wanted.table)
    if evidence is None:
        return "the table is empty"
    table, column, metric = evidence
    kind = wanted.kind or ("self" if (result.layers["kind"] == "self").any() else None)
    proof = _Evidence(table, column, kind, wanted.stack, wanted.layers)
    found = select(result, proof)
    if found.problem is not None:
        return found.problem
    gaps = np.flatnonzero(~np.isfinite(found.values))
    if len(gaps) == 0 and len(found.values):
        return None
    reason = found.why(int(gaps[0])) if len(gaps) else "no layer was measured"
    return f"the metric {metric} was not measured: {reason}"


@dataclass(frozen=True)
class _Evidence:
    table: str
    metric: str
    kind: str | None
    stack: str | None
    layers: Sequence[int] | None
    scope: str | None = None
    heads: Sequence[int] | None = None


def numbers_of(column: pd.Series) -> np.ndarray:
    """A column as float64, NaN for whatever is no number."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return column.to_numpy(dtype="float64", na_value=np.nan)
    return np.array([_number(value) for value in column.tolist()], dtype="float64")


def why_missing(result: Result, table: str, column: str, site: object = None) -> str:
    """The reason a figure is null."""
    family = figures.family(table, column)
    notes = result.not_measured
    metrics = notes["metric"].astype("string").fillna("")
    about = [
        m in (column, table, "all")
        or (m and column.startswith(m))
        or (family is not None and (m == family or m.startswith(f"{family} ")))
        for m in metrics
    ]
    notes = notes[np.array(about, dtype=bool)]
    if site is not None and not pd.isna(site):  # type: ignore[call-overload]
        of_site = notes[(notes["site"] == site).fillna(False).astype(bool)]
        notes = of_site if len(of_site) else notes[notes["site"].isna()]
    reasons = [str(r) for r in notes["reason"].dropna().unique()]
    if reasons:
        return "; ".join(reasons[:2])
    ran = result.run.get("metrics")
    if isinstance(ran, (list, tuple)) and family is not None and family not in ran:
        return f"the metric {family} was not asked for"
    if family == "gate" and result.architecture.get("gate") == "none":
        return "the model has no gate"
    return "it is null, and the result does not say why"


def _scoped(frame: pd.DataFrame, wanted: Wanted) -> pd.DataFrame:
    """Rows of layers or of heads, where a table has both."""
    if wanted.table in MIXED:
        of_layer = frame["head"].isna()
        return frame[~of_layer if wanted.scope == "head" else of_layer]
    if wanted.table == "samples":
        return frame[frame["site"].isna() == (wanted.metric == "nll")]
    return frame


def _numbered(
    rows: pd.DataFrame, name: str, numbers: Sequence[int]
) -> tuple[pd.DataFrame, str | None]:
    """Rows of some layers or heads, those below 0 counted from the last."""
    there = rows[name].dropna()
    last = int(there.max()) if len(there) else -1
    asked = {n if n >= 0 else last + 1 + n for n in numbers}
    absent = sorted(asked - {int(n) for n in there.unique()})
    kept = rows[rows[name].isin(list(asked)).fillna(False).astype(bool)]
    if not absent:
        return kept, None
    which = f"{name}{'' if len(absent) == 1 else 's'} {', '.join(map(str, absent[:5]))}"
    return kept, f"there is no {which}" + (f": the last is {last}" if last >= 0 else "")


def _why_empty(result: Result, wanted: Wanted, frame: pd.DataFrame) -> str:
    chosen = [f"{n} {v}" for n, v in (("kind", wanted.kind), ("stack", wanted.stack)) if v]
    if not frame.empty and chosen:
        return f"no row of {wanted.table} has {' and '.join(chosen)}"
    return f"the table {wanted.table} is empty: {why_missing(result, wanted.table, wanted.metric)}"


def _number(value: object) -> float:
    """A number that may be mixed with other things; an integer beyond all floats is infinite."""
    if not isinstance(value, (bool, int, float, np.number)):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _plain(value: object) -> object:
    if value is None or (not isinstance(value, (list, dict)) and pd.isna(value)):  # type: ignore[call-overload]
        return None
    return value.item() if hasattr(value, "item") else value
