"""Training runs: found, ordered by step, judged from one checkpoint to the next, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit_results import make

from attnprobe.audit import Rule, judge, runs, trend
from attnprobe.result import Result


def run(values: list[Any], folder: str = "runs", metric: str = "f_attr") -> list[Result]:
    """Checkpoints of one run, one every 100 steps."""
    return [
        make(f"s{n}", step=100 * n, path=f"{folder}/s{n}.pt", **{metric: value})
        for n, value in enumerate(values)
    ]


def broken(results: list[Result], **keys: Any) -> list[str]:
    """The checkpoints that break a rule."""
    return [f.checkpoint for f in judge(results, [Rule(**keys)]) if f.status == "broken"]


def test_order_is_that_of_steps_not_of_names_or_files() -> None:
    results = run([0.1, 0.2, 0.3, 0.4])
    shuffled = [results[2], results[0], results[3], results[1]]
    (found,) = runs.find(shuffled)
    assert found.steps == [0, 100, 200, 300]
    assert broken(shuffled, metric="f_attr", max_increase=0.11) == []
    assert broken(shuffled, metric="f_attr", max_increase=0.05) == ["s2", "s3", "s1"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_increase": 0.25}, []),
        ({"max_increase": 0.15}, ["s1"]),
        ({"max_decrease": 0.05}, ["s3"]),
        ({"max_increase": "50%"}, ["s1"]),
        ({"max_increase": "100%"}, []),
        ({"max_increase": 0, "max_decrease": 0}, ["s1", "s3"]),
    ],
)
def test_increase_and_decrease(keys: dict[str, Any], expected: list[str]) -> None:
    assert broken(run([0.2, 0.4, 0.4, 0.3]), metric="f_attr", **keys) == expected


def test_finding_says_what_it_was_and_when() -> None:
    results = run([0.2, 0.4])
    (finding,) = judge(results, [Rule(metric="f_attr", max_increase=0.1)])
    assert finding.message == (
        "model.f_attr is 0.4, after 0.2 at step 0, expected a rise of at most 0.1"
    )
    assert finding.change is not None
    assert (finding.step, finding.change.before) == (100, 0.2)


def test_rows_are_compared_one_by_one() -> None:
    before = make("a", [[0.1, 0.2], [0.3, 0.4]], step=1)
    after = make("b", [[0.2, 0.1], [0.3, 0.9]], step=2)
    (finding,) = judge([before, after], [Rule(metric="f_attr", scope="head", max_increase=0.2)])
    assert [(p.layer, p.head, p.before, p.value) for p in finding.places] == [(1, 1, 0.4, 0.9)]
    mean = Rule(metric="f_attr", scope="head", aggregate="mean", max_increase=0.2)
    assert judge([before, after], [mean])[0].status == "passed"


@pytest.mark.parametrize("odd", [None, float("nan"), float("inf")])
def test_missing_breaks_on_either_side(odd: Any) -> None:
    assert broken(run([0.1, odd, 0.1]), metric="f_attr", max_increase=1) == ["s1", "s2"]


def test_a_checkpoint_alone_breaks() -> None:
    (finding,) = judge([make(step=3)], [Rule(metric="f_attr", max_increase=1)])
    assert (finding.status, "alone" in (finding.reason or "")) == ("broken", True)
    assert "checkpoints = [...]" in finding.hint
    assert broken([make("a"), make("b")], metric="f_attr", max_increase=1) == ["a", "b"]


def test_runs_are_told_apart() -> None:
    first, second = run([0.1, 0.2], "one"), run([0.9, 0.8], "two")
    assert len(runs.find(first + second)) == 2
    other = make("x", [[0.1]], step=5, path="one/x.pt")  # another model in the same folder
    assert [len(r.results) for r in runs.find([*first, other])] == [2]


def test_trend_shows_what_is_there_and_what_rules_are_for() -> None:
    results = run([5.0, 4.0, None], metric="ppl")
    (found,) = trend.of(results, [Rule(metric="mean_share", max=1)])
    assert found.run == "runs"
    assert found.metrics[-2:] == ("ppl", "mean_share")
    assert [p.figures["ppl"] for p in found.points] == [5.0, 4.0, None]
    assert trend.of([make()]) == []


def test_plot(tmp_path: Path) -> None:
    from attnprobe.audit import trend_plot

    results = [*run([0.1, None, 0.3]), *run([0.2, 0.1], "other/runs")]
    files = trend_plot.plot(trend.of(results), tmp_path / "plots")
    assert [f.name for f in files] == ["trend-runs.png", "trend-runs-2.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)
    figure = trend_plot.draw(trend.of(results)[0])
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [0, 100, 200]
    assert str(line.get_ydata()[1]) == "nan"
