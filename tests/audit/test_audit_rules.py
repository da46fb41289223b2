"""Rules: what they bound, what they take for broken, and what they say of it."""

from __future__ import annotations

from typing import Any

import pytest
from audit_results import FIGURES, make, massive, sink, site
from pydantic import ValidationError

from attnprobe.audit import Finding, Rule, figures, judge
from attnprobe.audit.presets import PRESETS
from attnprobe.result import TABLES, Result


def one(result: Result, **keys: Any) -> Finding:
    """The finding of one rule on one result."""
    (finding,) = judge([result], [Rule(**keys)])
    return finding


@pytest.mark.parametrize(
    ("keys", "status", "found"),
    [
        ({"metric": "f_attr", "max": 0.05}, "passed", 0.05),
        ({"metric": "f_attr", "max": 0.0499}, "broken", 0.05),
        ({"metric": "f_attr", "min": 0.05}, "passed", 0.05),
        ({"metric": "f_attr", "min": 0.06, "max": 0.1}, "broken", 0.05),
        ({"metric": "f_attr", "scope": "head", "max": 0.3}, "broken", 0.9),
        ({"metric": "f_attr", "scope": "head", "max": 0.3, "layers": 0}, "passed", 0.2),
        ({"metric": "f_attr", "scope": "head", "max": 0.3, "layers": "-1"}, "broken", 0.9),
        ({"metric": "f_attr", "scope": "head", "max": 0.3, "heads": [0]}, "passed", 0.3),
        ({"metric": "f_attr", "scope": "head", "aggregate": "mean", "max": 0.4}, "passed", 0.375),
        ({"metric": "f_attr", "scope": "head", "aggregate": "max", "max": 0.4}, "broken", 0.9),
        ({"metric": "f_attr", "scope": "head", "aggregate": "min", "min": 0.1}, "passed", 0.1),
        ({"metric": "f_attr", "scope": "head", "aggregate": "p50", "max": 0.25}, "passed", 0.25),
        ({"metric": "f_attr", "scope": "head", "aggregate": "count", "max": 4}, "passed", 4),
        (
            {"metric": "f_attr", "scope": "head", "aggregate": "count", "above": 0.3, "max": 0},
            "broken",
            1,
        ),
        (
            {"metric": "f_attr", "scope": "head", "aggregate": "share", "below": 0.3, "min": 0.6},
            "broken",
            0.5,
        ),
        ({"metric": "collapsed", "scope": "head", "aggregate": "count", "max": 0}, "passed", 0),
        ({"metric": "mean", "table": "gates", "max": 0.5}, "passed", 0.2),
    ],
)
def test_bounds(keys: dict[str, Any], status: str, found: float) -> None:
    finding = one(make(heads=[[0.1, 0.2], [0.3, 0.9]]), **keys)
    assert (finding.status, finding.found) == (status, pytest.approx(found))


def test_places_name_the_worst_first() -> None:
    finding = one(make(heads=[[0.1, 0.5], [0.4, 0.9]]), metric="f_attr", scope="head", max=0.3)
    assert [(p.layer, p.head, p.value) for p in finding.places] == [
        (1, 1, 0.9),
        (0, 1, 0.5),
        (1, 0, 0.4),
    ]
    assert (finding.rows, finding.rows_broken) == (4, 3)
    assert "gate" in finding.hint


def test_the_worst_of_both_sides() -> None:
    finding = one(make(heads=[[0.1, 0.5]]), metric="f_attr", scope="head", min=0.3, max=0.45)
    assert finding.found == 0.1
    assert finding.rows_broken == 2


def test_figure_is_told_from_its_bound() -> None:
    finding = one(make(f_attr=0.15000001), metric="f_attr", max=0.15)
    assert finding.status == "broken"
    assert finding.shown == "0.15000001"


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("aggregate", ["each", "mean", "min", "max", "p95", "count", "share"])
def test_missing_breaks(missing: float | None, aggregate: str) -> None:
    result = make(heads=[[0.1, missing]])
    for bounds in ({"max": 1e300}, {"min": -1e300}):
        finding = one(result, metric="f_attr", scope="head", aggregate=aggregate, **bounds)
        assert finding.status == "broken"
        assert finding.reason
        assert (finding.places[0].layer, finding.places[0].head) == (0, 1)


def test_reason_is_the_one_of_not_measured() -> None:
    notes = [
        {**site(0), "metric": "entropy", "reason": "linear attention: no attention weights"},
        {**site(1), "metric": "rank", "reason": "another"},
    ]
    heads = [{**site(0), "head": 0, "f_attr": 0.1}]
    result = make(rows={"heads": heads, "not_measured": notes})
    finding = one(result, metric="entropy_norm", scope="head", min=0.1)
    assert finding.reason == "linear attention: no attention weights"
    assert finding.message == (
        "heads.entropy_norm is missing (linear attention: no attention weights), expected >= 0.1"
    )


def test_reason_tells_a_metric_that_was_not_run() -> None:
    result = make(erank=None, about={"metrics": ["sink"]})
    assert one(result, metric="erank", min=1).reason == "the metric rank was not asked for"


def test_no_gate_says_so() -> None:
    result = make(gate_mean=None)
    result.architecture["gate"] = "none"
    finding = one(result, metric="gate_mean", max=0.5)
    assert finding.reason == "the model has no gate"
    assert "--gate G1" in finding.hint


@pytest.mark.parametrize("table", [t for t in TABLES if t != "not_measured"])
def test_empty_table_breaks(table: str) -> None:
    metric = next(c for c in figures.columns(table) if figures.is_number(table, c))
    empty = Result.from_rows({}, checkpoint={"name": "empty"})
    for keys in ({}, {"aggregate": "mean"}, {"aggregate": "count"}):
        finding = one(empty, table=table, metric=metric, max=1e9, **keys)
        assert finding.status == "broken", (table, keys)


def test_tables_of_finds_may_be_empty_where_they_were_looked_for() -> None:
    rule = {"table": "massive", "metric": "value", "aggregate": "count", "max": 0}
    assert one(make(), **rule).status == "passed"
    assert one(make(rows={"massive": [massive(1)]}), **rule).status == "broken"
    blind = make(rows={"layers": [{**site(0), "f_attr": 0.1}]}, about={"metrics": ["sink"]})
    finding = one(blind, **rule)
    assert finding.status == "broken"
    assert "activation was not measured" in (finding.reason or "")
    several = one(make(), table="massive", metric="value", max=1000)
    assert several.status == "broken"
    assert "count" in (several.reason or "")


def test_token_of_a_find_is_shown() -> None:
    result = make(rows={"sinks": [sink(0, 0), sink(1, 7, "\n")]})
    finding = one(result, table="sinks", metric="position", aggregate="count", above=3, max=0)
    (place,) = finding.places
    assert (place.layer, place.position, place.token) == (1, 7, "\n")


def test_layers_that_are_not_there_break() -> None:
    finding = one(make(), metric="f_attr", scope="head", max=1, layers="0-3")
    assert finding.status == "broken"
    assert finding.reason == "there is no layers 2, 3: the last is 1"
    assert one(make(), metric="f_attr", scope="layer", max=1, layers=[-2]).status == "passed"


def test_kind_that_is_not_there_breaks() -> None:
    finding = one(make(), metric="f_attr", max=1, kind="cross")
    assert finding.reason == "no row of model has kind cross"


def test_every_kind_of_attention_is_judged() -> None:
    result = make(rows={"model": [FIGURES, {**FIGURES, "kind": "cross", "f_attr": 0.9}]})
    finding = one(result, metric="f_attr", max=0.5)
    assert [(p.kind, p.value) for p in finding.places] == [("cross", 0.9)]
    assert one(result, metric="f_attr", max=0.5, kind="self").status == "passed"


def test_levels_and_globs() -> None:
    rules = [
        Rule(metric="f_attr", max=0.01, level="off"),
        Rule(metric="f_attr", max=0.01, level="warn"),
        Rule(metric="f_attr", max=0.01, checkpoints="other*"),
    ]
    (finding,) = judge([make()], rules)
    assert (finding.level, finding.status, finding.failed) == ("warn", "broken", False)
    assert len(judge([make("other-1")], rules)) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"metric": "f_atr", "max": 1}, "did you mean 'f_attr'"),
        ({"metric": "sigma", "max": 1}, "sigma is a column of spectra"),
        ({"metric": "f_attr"}, "no bound"),
        ({"metric": "f_attr", "max": 1, "maximum": 2}, "Extra inputs"),
        ({"metric": "f_attr", "max": "1"}, "valid number"),
        ({"metric": "f_attr", "max": True}, "valid number"),
        ({"metric": "f_attr", "max": float("nan")}, "finite"),
        ({"metric": "f_attr", "max": float("inf")}, "finite"),
        ({"metric": "f_attr", "min": 2, "max": 1}, "above max"),
        ({"metric": "f_attr", "max": 1, "max_increase": 1}, "make it two"),
        ({"metric": "f_attr", "max_increase": "ten"}, "10%"),
        ({"metric": "f_attr", "max_increase": -1}, "0 or more"),
        ({"metric": "f_attr", "max": 1, "above": 0}, "count"),
        ({"metric": "f_attr", "max": 1, "layers": "0"}, "no layer"),
        ({"metric": "f_attr", "scope": "head", "max": 1, "layers": "3-1"}, "no range"),
        ({"metric": "f_attr", "scope": "head", "max": 1, "layers": []}, "names none"),
        ({"metric": "token", "table": "sinks", "aggregate": "count", "max": 1}, "no numbers"),
        ({"metric": "histogram", "table": "gates", "max": 1}, "no numbers"),
        ({"metric": "f_attr", "table": "model", "scope": "head", "max": 1}, "does not go with"),
        ({"metric": "mean", "table": "gates", "heads": 0, "max": 1}, "scope"),
        ({"metric": "f_attr", "table": "not_measured", "max": 1}, "Input should be"),
        ({"metric": "f_attr", "max": 1, "id": "two words"}, "pattern"),
    ],
)
def test_rules_that_make_no_sense(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rule(**keys)


def test_a_thousand_layers() -> None:
    heads = [[0.1] * 8 for _ in range(1000)]
    heads[777][3] = 0.31
    finding = one(make(heads=heads), metric="f_attr", scope="head", max=0.3)
    assert finding.status == "broken"
    assert [(p.layer, p.head) for p in finding.places] == [(777, 3)]
    assert finding.rows == 8000


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_rules(name: str) -> None:
    for rule_id, keys in PRESETS[name].entries().items():
        assert Rule(**keys, id=rule_id).id == rule_id
        assert len(PRESETS[name].rules[rule_id.partition("/")[2]].why) > 20


def test_every_figure_has_a_hint() -> None:
    plain = {"kind", *figures.KEY, *figures.INTEGERS, "position"}
    for table in ("model", "layers", "heads", "gates", "spectra", "massive", "sinks"):
        for column in figures.columns(table):
            if column not in plain and figures.is_number(table, column):
                assert column in figures.FIGURES, f"{table}.{column} has no hint in figures.py"


def test_default_tolerances_are_not_zero() -> None:
    from attnprobe.audit.baseline import WATCHED

    for name in WATCHED:
        known = figures.FIGURES[name]
        assert known.absolute > 0 or known.relative > 0, name
