"""Bins of position, value drain, and what a query of its own document is."""

from __future__ import annotations

import pytest
import reference
import torch

from attnprobe.capture import Documents
from attnprobe.metrics.sink import bin_range, drain, position_bins


def test_every_position_lies_in_the_range_of_its_bin() -> None:
    position = torch.arange(20_000)
    numbers = position_bins(position)
    assert numbers[:16].tolist() == list(range(16))
    assert bool((numbers.diff() >= 0).all())
    for number in range(int(numbers.max())):
        low, high = bin_range(number)
        own = position[numbers == number]
        assert (int(own.min()), int(own.max())) == (low, high)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_drain_is_against_the_median_of_the_document(count: int) -> None:
    """Also where the median is that of an even number, and tokens of other documents are near."""
    ids = torch.full((2, 10), -1)
    ids[0, 1 : 1 + count] = 0
    ids[1, :4], ids[1, 4:8] = 0, 1
    v = torch.randn(2, 3, 10, 4)
    weight = torch.randn(6, 12)
    norms = torch.stack(
        [(v[:, h] @ weight[:, 4 * h : 4 * h + 4].T).norm(dim=-1) for h in range(3)], 1
    )
    want = torch.tensor(reference.value_drain(v, weight, ids, 3), dtype=torch.double)
    torch.testing.assert_close(drain(norms, Documents(ids)), want, rtol=1e-5, atol=1e-5)


def test_drain_against_nothing_is_unknown() -> None:
    norms = torch.zeros(1, 1, 4)
    norms[0, 0, 0] = 2.0
    assert bool(drain(norms, Documents.whole(1, 4)).isnan().all())
