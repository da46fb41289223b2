"""Quantiles from counts: to their bin, whatever the order and the cuts of the stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.metrics.gate import edges
from attnprobe.metrics.histogram import Histogram

UNIT = torch.linspace(0, 1, 101, dtype=torch.double)


@pytest.mark.parametrize("q", [0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_quantile_is_right_to_its_bin(q: float, count: int, dtype: torch.dtype) -> None:
    values = torch.rand(3, count, dtype=torch.double)
    histogram = Histogram(3, UNIT)
    histogram.add(values.to(dtype), torch.ones(3, count, dtype=torch.bool))
    found = histogram.quantile(q)
    for h in range(3):
        low = np.quantile(values[h], q, method="lower") - 0.01
        high = np.quantile(values[h], q, method="higher") + 0.01
        assert low <= float(found[h]) <= high


def test_what_is_masked_does_not_count_and_nothing_has_no_quantile() -> None:
    histogram = Histogram(2, UNIT)
    values = torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    histogram.add(values, torch.tensor([[True, False], [False, False]]))
    assert histogram.counts.sum(-1).tolist() == [1, 0]
    found = histogram.quantile(0.5)
    assert 0.09 <= float(found[0]) <= 0.12
    assert bool(found[1].isnan())


def test_outliers_fall_in_the_outermost_bins_and_edges_in_the_bin_above() -> None:
    histogram = Histogram(1, torch.tensor([0.0, 1.0, 2.0]))
    values = torch.tensor([[-5.0, 0.0, 1.0, 2.0, 9.0]])
    histogram.add(values, torch.ones(1, 5, dtype=torch.bool))
    assert histogram.counts.tolist() == [[2, 3]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-0.25, 1.25, width=32), min_size=1, max_size=40),
    st.lists(st.floats(-0.25, 1.25, width=32), min_size=1, max_size=40),
)
def test_merging_is_counting_both(one: list[float], other: list[float]) -> None:
    parts = []
    for values in (one, other, one + other):
        histogram = Histogram(1, UNIT)
        histogram.add(torch.tensor([values]), torch.ones(1, len(values), dtype=torch.bool))
        parts.append(histogram)
    parts[0].merge(parts[1])
    assert torch.equal(parts[0].counts, parts[2].counts)


def test_bins_of_unbounded_gates_are_symmetric_and_hold_anything() -> None:
    unbounded = edges("silu")
    assert torch.equal(unbounded, -unbounded.flip(0))
    assert bool((unbounded.diff() > 0).all())
    assert len(edges("sigmoid")) == 1001
