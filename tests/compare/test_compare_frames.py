"""What a comparison holds, and what it refuses to compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made import made

from attnprobe.compare import COLUMNS, FIGURES, compare
from attnprobe.errors import InputError
from attnprobe.result import Result


def test_every_figure_of_every_checkpoint_is_there() -> None:
    comparison = compare([made(), made("gated", gate=True, seed=1), made("third", seed=2)])
    assert tuple(comparison.model.columns) == COLUMNS
    assert len(comparison.model) == 3 * len(FIGURES)
    assert len(comparison.layers) == 3 * 2 * (len(FIGURES) - 1)  # perplexity has no layers
    assert set(comparison.model["reference"]) == {"first"}
    own = comparison.model[comparison.model["checkpoint"] == "first"]
    assert own[["difference", "low", "high", "ratio", "seen", "no_interval"]].isna().all(axis=None)


def test_differences_ratios_bounds_and_reasons() -> None:
    a, b = made(), made("gated", gate=True, seed=1, shift=0.1)
    model = compare([a, b]).model.set_index(["checkpoint", "metric"]).loc["gated"]
    assert model.loc["erank", "difference"] == pytest.approx(-3)
    assert model.loc["erank", "ratio"] == pytest.approx(17.5 / 20.5)
    assert model.loc["f_attr", "bound"] == 0.05
    assert (model.loc["erank", "bound"], model.loc["erank_head", "bound"]) == (64, 16)
    assert model.loc["below_0.1", "value"] == pytest.approx(0.255)
    assert model.loc["gate_mean", "value"] > 0
    assert np.isnan(model.loc["gate_mean", "difference"])
    assert "ranks" in model.loc["erank", "no_interval"]
    assert "largest" in model.loc["m_act", "no_interval"]
    assert (
        model.loc["ppl", "ratio_low"] < model.loc["ppl", "ratio"] < model.loc["ppl", "ratio_high"]
    )
    assert bool(model.loc["f_attr", "seen"])
    assert pd.isna(model.loc["erank", "seen"])


def test_layers_go_by_number_and_the_deeper_ones_have_nothing_to_differ_from() -> None:
    comparison = compare([made(layers=2), made("deep", layers=4, seed=1)])
    own = comparison.layers
    own = own[(own["checkpoint"] == "deep") & (own["metric"] == "f_attr")].set_index("layer")
    assert own["difference"].notna().tolist() == [True, True, False, False]
    assert own["low"].notna().tolist() == [True, True, False, False]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": {"sha256": "x"}}, "other was measured on another input than first"),
    ({"input": {"length": 64, "sha256": "x"}}, r"another length .*64 tokens, not 32 tokens"),
    (
        {"checkpoint": {"task": "bpe", "config": {"vocab_size": 512}}},
        "another tokenizer .*bpe of 512 ids, not bytes of 257 ids",
    ),
    ({"checkpoint": {"tokenizer": "cd" * 32}}, "another tokenizer .*cdcd, not abab"),
    ({"input": {"sha256": None}}, "other does not say what it was measured on"),
    ({"run": {"epsilon": 0.2}}, "another --epsilon"),
    ({"run": {"pre_gate": True}}, "another --pre-gate"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_was_measured_differently_is_refused(changes: dict[str, Any], message: str) -> None:
    first = made(checkpoint={"tokenizer": "ab" * 32} if "cdcd" in message else {})
    with pytest.raises(InputError, match=message) as caught:
        compare([first, made("other", seed=1, **changes)])
    assert "--allow-different" in str(caught.value)
    assert "\n" not in str(caught.value)
    comparison = compare([first, made("other", seed=1, **changes)], allow_different=True)
    assert len(comparison.different) == 1
    is_same_input = "input" not in changes
    assert comparison.paired == [True, is_same_input]
    assert comparison.model["difference"].notna().any()


def test_all_reasons_are_given_at_once() -> None:
    other = made("b", input={"sha256": "x", "length": 8}, run={"epsilon": 0.1})
    with pytest.raises(InputError, match=r"length.*epsilon.*c was measured on another input"):
        compare([made("a"), other, made("c", input={"sha256": "y"})])


@pytest.mark.parametrize("results", [[], [made()]])
def test_one_result_is_not_a_comparison(results: list[Result]) -> None:
    with pytest.raises(InputError, match="give two different ones or more"):
        compare(results)


def test_one_document_has_no_interval() -> None:
    comparison = compare([made(samples=1), made("b", samples=1, seed=1)])
    reasons = comparison.model["no_interval"].dropna()
    assert "there is one sample only" in set(reasons)
    assert comparison.model["low"].isna().all()


def test_figures_that_only_one_has_are_null() -> None:
    a, b = made(), made("b", seed=1)
    b.model["ppl"] = np.nan
    b.samples = b.samples[b.samples["site"].notna()]
    model = compare([a, b]).model.set_index(["checkpoint", "metric"])
    assert np.isnan(model.loc[("b", "ppl"), "difference"])
    assert model.loc[("b", "f_attr"), "low"] < model.loc[("b", "f_attr"), "high"]


def test_results_without_samples_or_without_anything() -> None:
    a, b = made(), made("b", seed=1)
    b.samples = b.samples.iloc[:0]
    comparison = compare([a, b])
    assert comparison.paired == [True, False]
    assert comparison.model["low"].isna().all()
    empty = replace(Result.from_rows({}), input=dict(a.input))
    assert compare([empty, empty]).model.empty


def test_a_reference_of_zero_has_no_ratio() -> None:
    a, b = made(), made("b", seed=1, shift=0.2)
    for result in (a,):
        result.model["sink_rate"] = 0.0
    rows = compare([a, b]).model.set_index(["checkpoint", "metric"])
    assert np.isnan(rows.loc[("b", "sink_rate"), "ratio"])
    assert rows.loc[("b", "sink_rate"), "difference"] > 0


def test_two_of_one_name_are_told_apart() -> None:
    comparison = compare([made("a"), made("a", seed=1)])
    assert comparison.names == ["a #1", "a #2"]


def test_the_docs_name_every_column_and_every_figure() -> None:
    page = (Path(__file__).parents[2] / "docs/compare.md").read_text(encoding="utf-8")
    for column in COLUMNS:
        assert f"`{column}`" in page
    for figure in FIGURES:
        answer = "no" if figure.no_interval else "yes"
        assert any(
            line.startswith(f"| {figure.label} |") and line.endswith(f"| {answer} |")
            for line in page.splitlines()
        )
