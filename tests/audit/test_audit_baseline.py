"""Baselines: regressions told from improvements, tolerances, refusals, updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit_results import FIGURES, make, site

from attnprobe.audit import Report, audit, baseline
from attnprobe.audit.config import Loaded, load
from attnprobe.audit.report import Held, codes
from attnprobe.audit.rulebook import Asked, RuleBook, build
from attnprobe.errors import InputError
from attnprobe.result import Result, load_results, save_results

HARMLESS = [Asked("f_attr<=1")]


def book(folder: Path | None = None, content: str = "") -> RuleBook:
    """A rule that is always kept, and some configuration."""
    if folder is None:
        return build(Loaded(), [], HARMLESS)
    path = folder / "attnprobe.toml"
    path.write_text(content)
    return build(load(path), [], HARMLESS)


def compared(now: Result, before: Result, rules: RuleBook | None = None, **how: Any) -> Report:
    """The report of a result against a baseline of one."""
    return audit([now], rules or book(), held=Held(Path("b.json"), [before], **how))


def verdicts(report: Report) -> dict[str, str]:
    """By figure, what became of it."""
    return {
        f.rule.removeprefix("baseline/"): f.change.verdict
        for f in report.findings
        if f.change is not None
    }


@pytest.mark.parametrize(
    ("figure", "value", "verdict", "status"),
    [
        ("f_attr", 0.06, "unchanged", "passed"),  # within 0.01 of 0.05
        ("f_attr", 0.0601, "regression", "broken"),
        ("f_attr", 0.03, "improvement", "passed"),
        ("erank", 11.5, "unchanged", "passed"),  # within 0.5 of 12
        ("erank", 11.4, "regression", "broken"),
        ("erank", 13.0, "improvement", "passed"),
        ("ppl", 6.06, "unchanged", "passed"),  # within 1 % of 6
        ("ppl", 6.07, "regression", "broken"),
        ("ppl", 5.0, "improvement", "passed"),
        ("gate_mean", 0.3, "change", "broken"),
        ("gate_mean", 0.1, "change", "broken"),
        ("collapsed", 1, "unchanged", "passed"),
        ("collapsed", 2, "regression", "broken"),
        ("m_act", 21.1, "regression", "broken"),
        ("m_act", 20.9, "unchanged", "passed"),
    ],
)
def test_worse_better_and_noise(figure: str, value: float, verdict: str, status: str) -> None:
    report = compared(make(**{figure: value}), make())
    assert verdicts(report)[figure] == verdict
    finding = next(f for f in report.findings if f.rule == f"baseline/{figure}")
    assert finding.status == status
    others = {v for name, v in verdicts(report).items() if name != figure}
    assert others == {"unchanged"}
    is_warning = figure == "gate_mean"
    assert codes(report) == ([] if status == "passed" or is_warning else [1])


@pytest.mark.parametrize(("value", "says"), [(0.70, "sharper"), (0.90, "wider")])
def test_a_change_of_entropy_is_not_called_a_collapse(value: float, says: str) -> None:
    report = compared(make(entropy_norm=value), make(entropy_norm=0.80))
    (finding,) = [f for f in report.findings if f.rule == "baseline/entropy_norm"]
    assert finding.status == "broken"
    assert finding.hint.startswith(f"attention is {says} than expected: ")


def test_figure_that_is_lost_is_broken_and_one_that_is_new_is_not() -> None:
    report = compared(make(ppl=None), make())
    finding = next(f for f in report.findings if f.rule == "baseline/ppl")
    assert (finding.status, finding.change and finding.change.verdict) == ("broken", "lost")
    assert codes(report) == [1]
    report = compared(make(), make(ppl=None))
    assert verdicts(report)["ppl"] == "new"
    assert codes(report) == []
    assert "ppl" not in verdicts(compared(make(ppl=None), make(ppl=None)))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_odd_values_are_lost(odd: float) -> None:
    assert codes(compared(make(ppl=odd), make())) == [1]
    assert codes(compared(make(ppl=odd), make(ppl=odd))) == []  # no rule asks for it


def test_tolerances_and_levels_of_the_file(tmp_path: Path) -> None:
    content = """
[baseline.metrics]
f_attr = {absolute = 0.5}
ppl = {relative = 0.5, level = "warn"}
gate_mean = {better = "lower", level = "error"}
m_act = {level = "off"}
"layers.erank" = {relative = 0.1}
"""
    rows = {"layers": [{**site(0), "f_attr": 0.1, "entropy_norm": 0.5, "erank": 9.0}]}
    worse = {"layers": [{**site(0), "f_attr": 0.1, "entropy_norm": 0.5, "erank": 8.0}]}
    now = make(f_attr=0.4, ppl=60.0, gate_mean=0.1, m_act=900.0, rows=worse)
    report = compared(now, make(rows=rows), book(tmp_path, content))
    assert verdicts(report)["f_attr"] == "unchanged"
    assert verdicts(report)["gate_mean"] == "improvement"
    assert verdicts(report)["layers.erank"] == "regression"
    assert "m_act" not in verdicts(report)
    assert [f.rule for f in report.warnings] == ["baseline/ppl"]
    assert [f.rule for f in report.errors] == ["baseline/layers.erank"]
    assert report.errors[0].places[0].before == 9.0
    assert report.errors[0].source.line == 7


def test_figure_that_the_file_asks_for_may_not_be_missing(tmp_path: Path) -> None:
    rules = book(tmp_path, "[baseline.metrics]\nmax_logit = {relative = 0.1}\n")
    report = compared(make(), make(), rules)
    assert [f.rule for f in report.errors] == ["baseline/max_logit"]
    assert [f.rule for f in compared(make(max_logit=9.0), make(), rules).errors]


def test_kinds_of_attention_are_compared_apart() -> None:
    def both(cross: float) -> Result:
        second = {**FIGURES, "kind": "cross", "f_attr": cross, "m_act": None}
        return make(rows={"model": [FIGURES, second]})

    report = compared(both(0.5), both(0.1))
    assert len(report.errors) == 1
    assert report.errors[0].places[0].kind == "cross"
    assert codes(compared(both(0.1), both(0.1))) == []


def test_names_are_matched_and_a_lone_one_may_be_called_otherwise() -> None:
    old = [make("a", f_attr=0.05), make("b", f_attr=0.5)]
    new = [make("b", f_attr=0.5), make("a", f_attr=0.05)]
    assert codes(audit(new, book(), held=Held(Path("b.json"), old))) == []
    assert codes(compared(make("step-200"), make("step-100"))) == []
    report = audit([make("a"), make("c")], book(), held=Held(Path("b.json"), old))
    assert [f.rule for f in report.errors] == ["baseline/present"]
    assert "the baseline has no 'c'" in report.errors[0].message


@pytest.mark.parametrize(
    "other",
    [
        {"sha256": "cd" * 32},
        {"length": 128},
        {"dtype": "bfloat16"},
        {"device": "cuda:0"},
        {"epsilon": 0.2},
        {"sha256": None},
    ],
)
def test_what_was_measured_otherwise_is_refused(other: dict[str, Any]) -> None:
    now, before = make(about=other), make()
    report = compared(now, before)
    assert codes(report) == [2]
    assert "--allow-different" in report.problems[0].message
    assert not [f for f in report.findings if f.rule.startswith("baseline/")]
    allowed = compared(now, before, allow_different_input=True)
    assert codes(allowed) == []
    assert verdicts(allowed)["f_attr"] == "unchanged"


def test_another_accelerator_of_the_same_kind_is_not_refused() -> None:
    one, two = make(about={"device": "cuda:0"}), make(about={"device": "cuda:1"})
    assert codes(compared(one, two)) == []


def test_missing_baseline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no baseline"):
        baseline.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match="not a result file"):
        baseline.read(tmp_path / "bad.json")


def test_update_says_what_changes_and_keeps_what_was_not_audited(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save_results([make("a"), make("gone")], path)
    held = Held(path, load_results(path), update=True)
    report = audit([make("a", f_attr=0.3, ppl=5.0), make("new")], book(), held=held)
    assert report.update is not None
    assert report.update.written
    assert report.update.lines == (
        "a: model.f_attr 0.05 -> 0.3 (regression)",
        "a: model.ppl 6 -> 5 (improvement)",
        "new: added",
        "gone: kept as it was, it was not audited",
    )
    assert codes(report) == []
    assert [r.name for r in load_results(path)] == ["a", "gone", "new"]
    assert load_results(path)[0].figure("f_attr") == 0.3
    again = audit([make("a", f_attr=0.3, ppl=5.0)], book(), held=Held(path, load_results(path)))
    assert codes(again) == []


def test_update_swallows_no_broken_rule(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save_results([make("a")], path)
    before = path.read_bytes()
    held = Held(path, load_results(path), update=True)
    report = audit([make("a", f_attr=0.9)], build(Loaded(), ["gated"]), held=held)
    assert codes(report) == [1]
    assert report.update is not None
    assert not report.update.written
    assert "a rule is broken" in (report.update.reason or "")
    assert path.read_bytes() == before


def test_update_takes_one_result_of_a_name(tmp_path: Path) -> None:
    held = Held(tmp_path / "b.json", [], update=True)
    with pytest.raises(InputError, match="several results are called 'a'"):
        audit([make("a"), make("a", path="b/a.pt")], book(), held=held)
    assert not (tmp_path / "b.json").exists()


def test_update_says_that_the_input_changes(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save_results([make("a")], path)
    held = Held(path, load_results(path), update=True)
    report = audit([make("a", about={"length": 128})], book(), held=held)
    assert report.update is not None
    assert "length 128, baseline 64" in report.update.lines[0]
