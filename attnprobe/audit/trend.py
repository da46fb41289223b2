"""How figures move along a training run: a table by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnprobe.audit import runs
from attnprobe.audit.rules import Rule
from attnprobe.audit.selection import numbers_of
from attnprobe.result import TABLES, Result

#: Figures of the model that a trend shows; those that no checkpoint has are left out.
SHOWN = ("f_attr", "sink_rate", "entropy_norm", "erank", "gate_mean", "m_act", "ppl")


@dataclass(frozen=True)
class Point:
    """A checkpoint of a run and its figures, None where one is missing."""

    checkpoint: str
    step: int
    figures: dict[str, float | None]


@dataclass(frozen=True)
class Trend:
    """A run of one kind of attention.

    Attributes:
        run: the folder of its checkpoints.
        kind: of attention, as in `self`.
        metrics: those that at least one point has.
        points: in the order of their step.
    """

    run: str
    kind: str
    metrics: tuple[str, ...]
    points: tuple[Point, ...]


def of(results: Sequence[Result], rules: Sequence[Rule] = ()) -> list[Trend]:
    """The trends of all runs among some results; figures that rules bound are in them, too."""
    wanted = [r.metric for r in rules if r.table == "model" and r.metric in TABLES["model"]]
    columns = list(dict.fromkeys([*SHOWN, *wanted]))
    trends = []
    for run in runs.find(results):
        kinds = dict.fromkeys(k for r in run.results for k in r.model["kind"].dropna())
        for kind in kinds:
            points = [_point(result, str(kind), columns) for result in run.results]
            there = [c for c in columns if any(p.figures[c] is not None for p in points)]
            if there:
                trends.append(Trend(run.name, str(kind), tuple(there), tuple(points)))
    return trends


def _point(result: Result, kind: str, columns: Sequence[str]) -> Point:
    rows = result.model[result.model["kind"] == kind]
    found: dict[str, float | None] = {}
    for column in columns:
        values = numbers_of(rows[column])
        is_there = len(values) > 0 and abs(values[0]) < float("inf")
        found[column] = float(values[0]) if is_there else None
    return Point(result.name, runs.step_of(result) or 0, found)
