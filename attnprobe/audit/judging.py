"""The judging of results by rules. Pure: results in, findings out.

A figure that is missing, null, NaN or infinite breaks the rule that needs it, and so does an empty
table; only tables of finds (`sinks`, `massive`) may be empty where their metric was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnprobe.audit import figures, runs
from attnprobe.audit.findings import PLACES, Change, Finding, Place
from attnprobe.audit.globs import fits_result
from attnprobe.audit.rules import Rule, Step
from attnprobe.audit.selection import Selected, looked_for, select
from attnprobe.render.names import labels
from attnprobe.result import Result

_MISSING_HINT = (
    'measure it, or turn the rule off for this checkpoint with level = "off" in [[overrides]]'
)
_ALONE_HINT = (
    "audit the whole folder of the run, or say with checkpoints = [...] for which the rule is"
)
_NO_GATE_HINT = (
    "the rule is for models with a gate: train one with --gate G1, or turn the rule off for this "
    'checkpoint with level = "off" in [[overrides]]'
)


def judge(
    results: Sequence[Result],
    rules: Sequence[Rule] | Callable[[Result], Sequence[Rule]],
) -> list[Finding]:
    """Judges every result by every rule that is for it, rules of level "off" left out.

    Args:
        results: of one or several checkpoints; those of one run, told by folder, model and seed
            and put in order of their training step, make a trend.
        rules: the same for all, or a function that gives those of a result.

    Returns:
        By result, then by rule.
    """
    before = runs.predecessors(results)
    found = []
    for name, result in zip(labels(results), results, strict=True):
        for rule in rules(result) if callable(rules) else rules:
            if rule.level == "off" or not fits_result(rule.checkpoints, result):
                continue
            verdict = _trend(rule, result, before) if rule.is_trend else _bounds(rule, result)
            if verdict is not None:
                found.append(finding_of(name, rule, result, verdict))
    return found


@dataclass(frozen=True)
class Verdict:
    """What came of a figure, before it is put in words."""

    found: float | None
    places: Sequence[Place] = ()
    rows: int = 0
    broken: int = 0
    reason: str | None = None
    too_high: bool = True
    change: Change | None = None
    alone: bool = False  # it takes other checkpoints to tell


def _bounds(rule: Rule, result: Result) -> Verdict:
    """A rule with a least and a largest value."""
    rows = select(result, rule)
    gap = _gap(rule, rows)
    if gap is not None:
        return gap
    if rule.aggregate == "each":
        return _every(rule, rows)
    value = aggregated(rule, rows)
    if not math.isfinite(value):
        return Verdict(None, reason="it is too large a number", rows=len(rows.values), broken=1)
    high, low = _beyond(rule, np.array([value]))
    places = _extremes(rule, rows, largest=not low[0]) if high[0] or low[0] else ()
    broken = int(high[0] or low[0])
    if broken and rule.aggregate == "count":
        broken = max(1, int(value))  # of these `places` are the first
    return Verdict(value, places, len(rows.values), broken, too_high=not low[0])


def _gap(rule: Rule, rows: Selected) -> Verdict | None:
    """What is missing of the rows a rule needs, None where nothing is."""
    count = len(rows.values)
    if rows.problem is not None:
        return Verdict(None, rows=count, broken=1, reason=rows.problem)
    missing = np.flatnonzero(~np.isfinite(rows.values))
    if len(missing):
        places = [rows.place(int(i)) for i in missing[:PLACES]]
        reason = places[0].reason or "it is null"
        of_rows = f", in {len(missing)} of {count} rows" if count > 1 else ""
        return Verdict(None, places, count, len(missing), f"{reason}{of_rows}")
    if rule.table in figures.EVENTS:
        unseen = looked_for(rows.result, rule)
        if unseen is not None:
            return Verdict(None, rows=count, broken=1, reason=unseen)
        if count == 0 and rule.aggregate != "count":
            told = f'the table {rule.table} is empty; aggregate = "count" lets it be'
            return Verdict(None, broken=1, reason=told)
    return None


def _every(rule: Rule, rows: Selected) -> Verdict:
    """A rule that every row must keep."""
    values = rows.values
    high, low = _beyond(rule, values)
    excess = np.where(high, values - (rule.max or 0.0), (rule.min or 0.0) - values)
    broken = np.flatnonzero(high | low)
    if len(broken) == 0:
        return Verdict(_closest(rule, values), rows=len(values))
    order = broken[np.argsort(-excess[broken], kind="stable")]
    worst = int(order[0])
    places = [rows.place(int(i)) for i in order[:PLACES]]
    return Verdict(
        float(values[worst]), places, len(values), len(broken), too_high=bool(high[worst])
    )


def _beyond(rule: Rule, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which values are above and below the bounds, both (rows,) bool."""
    nowhere = np.zeros(len(values), dtype=bool)
    high = values > rule.max if rule.max is not None else nowhere
    low = values < rule.min if rule.min is not None else nowhere
    return high, low


def _closest(rule: Rule, values: np.ndarray) -> float:
    """Of values within the bounds, the one nearest to either."""
    rooms = [(rule.max - values.max(), values.max())] if rule.max is not None else []
    rooms += [(values.min() - rule.min, values.min())] if rule.min is not None else []
    return float(min(rooms)[1])


def aggregated(rule: Rule, rows: Selected) -> float:
    """The one number that a rule makes of its rows."""
    values = rows.values
    if rule.aggregate in ("count", "share"):
        counted = int(np.count_nonzero(_counted(rule, rows)))
        return float(counted) if rule.aggregate == "count" else counted / len(values)
    with np.errstate(all="ignore"):
        if rule.aggregate.startswith("p"):
            return float(np.quantile(values, int(rule.aggregate[1:]) / 100))
        return float(getattr(np, rule.aggregate)(values))


def _counted(rule: Rule, rows: Selected) -> np.ndarray:
    """Which rows `count` counts, (rows,) bool: of a yes-or-no column those that say yes."""
    values = rows.values
    counted = values != 0 if rows.is_flag else np.ones(len(values), dtype=bool)
    if rule.above is not None:
        counted &= values > rule.above
    if rule.below is not None:
        counted &= values < rule.below
    return counted


def _extremes(rule: Rule, rows: Selected, largest: bool) -> list[Place]:
    """The rows that drive an aggregate: those counted, or the largest or smallest."""
    candidates = np.arange(len(rows.values))
    if rule.aggregate in ("count", "share"):
        if not largest:
            return []  # too few were found: there is no row to show for it
        candidates = np.flatnonzero(_counted(rule, rows))
    values = rows.values[candidates]
    order = candidates[np.argsort(-values if largest else values, kind="stable")]
    return [rows.place(int(i)) for i in order[: PLACES if rule.aggregate == "count" else 3]]


def _trend(rule: Rule, result: Result, before: dict[int, Result | None]) -> Verdict | None:
    """A rule on what changed since the step before; None at the first step of a run."""
    if id(result) not in before:
        return Verdict(None, broken=1, reason=runs.why_no_run(result), alone=True)
    earlier = before[id(result)]
    if earlier is None:
        return None
    against = f"at step {runs.step_of(earlier)}"
    return changed(rule, result, earlier, rule.max_increase, rule.max_decrease, against)


def changed(
    rule: Rule, now: Result, before: Result, rise: Step | None, fall: Step | None, against: str
) -> Verdict:
    """A figure held against what it was, row by row where the rule is for each of them."""
    rows, old = select(now, rule), select(before, rule)
    gap = _gap(rule, rows)
    if gap is not None:
        return gap
    old_gap = _gap(rule, old)
    if old_gap is not None:
        reason = f"{against}: {old_gap.reason}"
        return Verdict(None, rows=len(rows.values), broken=1, reason=reason)
    if rule.aggregate != "each":
        new_value, old_value = aggregated(rule, rows), aggregated(rule, old)
        pairs = [(new_value, old_value)]
    else:
        olds = {old.key(i): float(v) for i, v in enumerate(old.values)}
        keys = [rows.key(i) for i in range(len(rows.values))]
        absent = [key for key in keys if key not in olds]
        if absent or len(olds) != len(keys):
            return Verdict(None, rows=len(keys), broken=1, reason=f"{against} the rows were others")
        pairs = [(float(v), olds[key]) for v, key in zip(rows.values, keys, strict=True)]
    return _moved(rule, rows, pairs, rise, fall, against)


def _moved(
    rule: Rule,
    rows: Selected,
    pairs: Sequence[tuple[float, float]],
    rise: Step | None,
    fall: Step | None,
    against: str,
) -> Verdict:
    """The verdict on pairs of a value and the one before it."""
    if not all(math.isfinite(v) for pair in pairs for v in pair):
        return Verdict(None, rows=len(pairs), broken=1, reason="it is too large a number")
    high = [rise is not None and new > old + rise.room(old) for new, old in pairs]
    low = [fall is not None and new < old - fall.room(old) for new, old in pairs]
    broken = [i for i in range(len(pairs)) if high[i] or low[i]]
    order = sorted(broken or range(len(pairs)), key=lambda i: -abs(pairs[i][0] - pairs[i][1]))
    worst = order[0]
    places = []
    if rule.aggregate == "each":
        places = [rows.place(i, before=pairs[i][1]) for i in order[:PLACES] if i in broken]
    verdict: Any = "regression" if broken else "unchanged"
    return Verdict(
        pairs[worst][0],
        places,
        len(pairs),
        len(broken),
        too_high=pairs[worst][0] > pairs[worst][1],
        change=Change(pairs[worst][1], verdict, against),
    )


def finding_of(name: str, rule: Rule, result: Result, verdict: Verdict) -> Finding:
    """A verdict with all that a report says of it; `name` is what the checkpoint is called."""
    bound = rule.max if verdict.too_high else rule.min
    path = result.checkpoint.get("path")
    return Finding(
        checkpoint=name,
        name=result.name,
        path=None if path is None else str(path),
        step=runs.step_of(result),
        rule=rule.id,
        level=rule.level,
        status="broken" if verdict.broken else "passed",
        subject=rule.subject,
        table=rule.table,
        metric=rule.metric,
        aggregate=rule.aggregate,
        expected=rule.expected,
        found=verdict.found,
        shown=apart(verdict.found, bound),
        reason=verdict.reason,
        places=tuple(verdict.places),
        rows=verdict.rows,
        rows_broken=verdict.broken,
        hint=_hint(rule, verdict),
        source=rule.source,
        change=verdict.change,
    )


def _hint(rule: Rule, verdict: Verdict) -> str:
    """What to do about a broken rule, "" about one that is kept."""
    if not verdict.broken or rule.hint is not None:
        return rule.hint or ""
    if verdict.alone:
        return _ALONE_HINT
    if verdict.reason is not None:
        return _NO_GATE_HINT if "no gate" in verdict.reason else _MISSING_HINT
    known = figures.figure(rule.table, rule.metric)
    return known.too_high if verdict.too_high else known.too_low


def apart(value: float | None, bound: float | None) -> str:
    """A number with as many digits as it takes to tell it from the bound it broke."""
    if value is None:
        return "missing"
    for digits in range(4, 17):
        text = f"{value:.{digits}g}"
        if bound is None or value == bound or float(text) != bound:
            return text
    return repr(value)
