"""No value, however odd, makes a broken rule pass; and no name breaks a report."""

from __future__ import annotations

import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from typing import Any

import pandas as pd
import pytest
from audit_results import make
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.audit import Problem, Rule, audit, judge
from attnprobe.audit.config import Loaded
from attnprobe.audit.formats import FORMATS, render
from attnprobe.audit.report import codes
from attnprobe.audit.rulebook import Asked, build
from attnprobe.result import Result, dumps

odd = st.sampled_from([None, float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 5e-324])
numbers = st.one_of(st.floats(0, 1), st.floats(), odd)
tables = st.lists(st.lists(numbers, min_size=0, max_size=4), max_size=6)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
bounds = st.one_of(
    st.fixed_dictionaries({"max": st.floats(-1, 1)}),
    st.fixed_dictionaries({"min": st.floats(-1, 1)}),
    st.tuples(st.floats(-1, 1), st.floats(-1, 1)).map(
        lambda pair: {"min": min(pair), "max": max(pair)}
    ),
)
aggregates = st.sampled_from(["each", "mean", "min", "max", "count", "share", "p50"])


def figures_of(values: list[Any], aggregate: str) -> list[Fraction]:
    """What a rule bounds, worked out exactly and without any of the code under test."""
    exact = [Fraction(v) for v in values]
    if aggregate == "each":
        return exact
    if aggregate == "mean":
        return [sum(exact) / len(exact)]
    if aggregate == "p50":
        return [statistics.median(exact)]
    count = Fraction(len(exact))
    return [{"min": min(exact), "max": max(exact), "count": count, "share": Fraction(1)}[aggregate]]


@given(heads=tables, aggregate=aggregates, bound=bounds, name=names, on_disk=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_rule_passes_only_if_it_is_kept(
    heads: list[list[Any]], aggregate: str, bound: dict[str, float], name: str, on_disk: bool
) -> None:
    result = make(name, heads=heads)
    if on_disk:
        result = Result.from_dict(json.loads(dumps([result]))["results"][0])
    rule = Rule(metric="f_attr", scope="head", aggregate=aggregate, **bound)
    (finding,) = judge([result], [rule])
    values = [value for layer in heads for value in layer]
    if not values or any(v is None or not math.isfinite(v) for v in values):
        assert finding.status == "broken"
        assert finding.reason
        return
    least, most = bound.get("min", -math.inf), bound.get("max", math.inf)
    kept = all(least <= v <= most for v in figures_of(values, aggregate))
    if aggregate in ("mean", "p50"):  # rounded, so at a bound either is right
        near = any(_is_near(figures_of(values, aggregate)[0], b) for b in bound.values())
        assert finding.status == "broken" or kept or near
        assert finding.status == "passed" or not kept or near or max(map(abs, values)) > 1e300
    else:
        assert (finding.status == "passed") == kept


def _is_near(value: Fraction, bound: float) -> bool:
    return abs(value - Fraction(bound)) <= Fraction(1, 10**12) * max(1, abs(value))


@pytest.mark.parametrize(
    "odd", ["0.1 or so", "", [], {}, object(), 1 + 2j, 10**400, pd.NA, pd.NaT, "nan", "1", b"1"]
)
@pytest.mark.parametrize("aggregate", ["each", "mean", "max", "count", "share", "p95"])
def test_what_is_no_number_breaks(odd: Any, aggregate: str) -> None:
    result = make(heads=[[0.1, 0.2]])
    result.heads["f_attr"] = pd.Series([0.1, odd], dtype="object")
    for bound in ({"max": 1e308}, {"min": -1e308}):
        rule = Rule(metric="f_attr", scope="head", aggregate=aggregate, **bound)
        (finding,) = judge([result], [rule])
        assert finding.status == "broken"
        assert finding.reason


def test_columns_that_are_gone_or_there_twice_break() -> None:
    rule = Rule(metric="f_attr", scope="head", max=1)
    gone, twice = make(), make()
    gone.heads = gone.heads.drop(columns="f_attr")
    twice.heads = pd.concat([twice.heads, twice.heads[["f_attr"]]], axis=1)
    for result in (gone, twice):
        (finding,) = judge([result], [rule])
        assert finding.status == "broken"
        assert "no column heads.f_attr" in (finding.reason or "")


@given(
    before=numbers,
    after=numbers,
    rise=st.one_of(st.floats(0, 1), st.integers(0, 100).map(lambda n: f"{n}%")),
)
@settings(max_examples=60, deadline=None)
def test_a_trend_passes_only_without_a_jump(before: Any, after: Any, rise: Any) -> None:
    results = [make("a", step=1, f_attr=before), make("b", step=2, f_attr=after)]
    (finding,) = judge(results, [Rule(metric="f_attr", max_increase=rise)])
    known = all(v is not None and math.isfinite(v) for v in (before, after))
    if finding.status == "passed":
        assert known
        room = rise if isinstance(rise, float) else float(rise.rstrip("%")) / 100 * abs(before)
        assert after <= before + room or math.isclose(after, before + room, rel_tol=1e-12)
    elif known:
        assert after > before


@given(name=names, token=names, reason=names, value=numbers)
@settings(max_examples=30, deadline=None)
def test_no_name_breaks_a_report(name: str, token: str, reason: str, value: Any) -> None:
    rows = {
        "sinks": [
            {"site": "a", "kind": "self", "layer": 0, "position": 9, "token": token, "alpha": 0.9}
        ],
        "not_measured": [{"site": name, "metric": "f_attr", "reason": reason}],
    }
    book = build(Loaded(), ["kv-cache"], [Asked("f_attr<=0.01"), Asked("ppl<=1")])
    problem = Problem(name, f"{token}.pt", reason, 2)
    report = audit([make(name, f_attr=value, rows=rows)], book, problems=[problem])
    assert set(codes(report)) == {1, 2}
    texts = {format: render(report, format) for format in FORMATS}
    assert json.loads(texts["json"])["counts"]["errors"] >= 1
    assert all(json.loads(line) for line in texts["jsonl"].split("\n") if line)
    root = ElementTree.fromstring(texts["junit"])
    assert int(root.attrib["failures"]) == len(report.errors)
    sarif = json.loads(texts["sarif"])["runs"][0]["results"]
    assert all(r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in sarif)
    lines = re.split(r"\r\n|\r|\n", texts["github"])[:-1]
    assert all(re.match(r"::(error|warning|notice) [^\n]*::", line) for line in lines)
    assert sum(line.startswith("::error") for line in lines) == len(report.errors) + 1
