"""Ranks of the captured tensors themselves against numpy's SVD of the stacked matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnprobe.capture import AttentionCall, Documents, Mask, Projection, Site
from attnprobe.metrics.base import Options, Tables
from attnprobe.metrics.rank import LEFT_OUT, NO_NUMBERS, Rank, effective_rank
from attnprobe.metrics.scatter import Scatter, Scratch

SITE = Site("layers.0.attention", "decoder", "self", 0)
HEADS, WIDTH, D_MODEL = 3, 8, 20


def call(z: Tensor, weight: Tensor, ids: Tensor | None = None) -> AttentionCall:
    """A call whose W_O (d_model, H·d_v) was given z (B, T, H, d_v)."""
    batch, length, heads, _ = z.shape
    q = torch.zeros(batch, heads, length, 4)
    ids = torch.zeros(batch, length, dtype=torch.long) if ids is None else ids
    documents = Documents(ids)
    return AttentionCall(
        site=SITE,
        query=q,
        key=q,
        value=z.transpose(1, 2),
        output=z.transpose(1, 2),
        scale=1.0,
        mask=Mask(length, length, causal=True),
        queries=documents,
        keys=documents,
        projection=Projection(weight, heads),
        consumed=z,
    )


def tables_of(*calls: AttentionCall) -> Tables:
    rank = Rank(Options())
    for one in calls:
        rank.attention(one, None)
    return rank.tables()


def check(z: Tensor, weight: Tensor, *calls: AttentionCall, ids: Tensor | None = None) -> None:
    """Every figure of every head and of the layer, and the spectra."""
    tables = tables_of(*(calls or (call(z, weight, ids),)))
    rows = z.double()[(ids if ids is not None else torch.zeros(z.shape[:2])) >= 0]
    heads, width = rows.shape[1:]
    w = weight.double().unflatten(1, (heads, width))
    parts = [(rows[:, h] @ w[:, h].T).numpy() for h in range(heads)]
    bound = min(heads * width, len(weight))
    wanted = [(h, reference.ranks(m, width)) for h, m in enumerate(parts)]
    wanted.append((None, reference.ranks(sum(parts), bound)))
    found = {row["head"]: row for row in tables.rows["heads"] + tables.rows["layers"]}
    for head, want in wanted:
        assert_figures(found[head], want)
        sigma = [r["sigma"] for r in tables.rows["spectra"] if r["head"] == head]
        wide = want["sigma"][: len(sigma)]
        np.testing.assert_allclose(sigma, wide, rtol=1e-5, atol=1e-5 * max(1.0, wide[0]))


def assert_figures(row: dict, want: dict) -> None:
    for column in reference.RANK_COLUMNS:
        mine, theirs = row[column], want[column]
        assert (mine is None) == (theirs is None), (column, mine, theirs)
        if mine is not None:
            assert abs(mine - theirs) <= 1e-5 + 1e-5 * abs(theirs), (column, mine, theirs)


def weight(d_model: int = D_MODEL, heads: int = HEADS, width: int = WIDTH) -> Tensor:
    return torch.randn(d_model, heads * width)


@pytest.mark.parametrize("d_model", [5, 20, 24, 40])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 2), (1, 7), (2, 8), (3, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_shape(d_model: int, batch: int, length: int, dtype: torch.dtype) -> None:
    """More and fewer tokens than d_v, d_model below d_v, about H·d_v, and above it."""
    z = torch.randn(batch, length, HEADS, WIDTH).to(dtype)
    check(z, weight(d_model).to(dtype))


def test_more_rows_than_are_added_at_once() -> None:
    check(torch.randn(3, 1500, 2, 4) + 3, weight(heads=2, width=4))


@pytest.mark.parametrize(("groups", "width"), [(1, 401), (1, 768), (3, 64), (2, 385)])
def test_scatters_that_are_cut_and_merged(groups: int, width: int) -> None:
    rows = torch.randn(5000, groups * width) * 3 + torch.linspace(-9, 9, groups * width)
    whole, first, last = Scatter(groups), Scatter(groups), Scatter(groups)
    whole.add(rows)
    first.add(rows[:70])
    first.add(rows[70:3000], Scratch())
    last.add(rows[3000:])
    first.merge(last)
    own = rows.double().unflatten(1, (groups, width)).transpose(0, 1)  # (g, N, w)
    mean = own.mean(1)
    exact = (own - mean[:, None]).mT @ (own - mean[:, None])
    for scatter in (whole, first):
        assert scatter.count == 5000
        torch.testing.assert_close(scatter.by_group(groups)[0], mean, rtol=0, atol=1e-11)
        for _ in range(2):
            found = scatter.by_group(groups)[1]
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-8)
    if groups == 1 and width % 4 == 0:
        means, parts = whole.by_group(4)
        w = width // 4
        torch.testing.assert_close(means, mean.view(4, w), rtol=0, atol=1e-11)
        for n in range(4):
            own_part = exact[0, n * w : (n + 1) * w, n * w : (n + 1) * w]
            torch.testing.assert_close(parts[n], own_part, rtol=1e-11, atol=1e-8)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rank_r_product_has_rank_r(rank: int, dtype: torch.dtype) -> None:
    left = torch.randn(2, 60, HEADS, rank, dtype=torch.double)
    right = torch.randn(HEADS, rank, WIDTH, dtype=torch.double)
    z = torch.einsum("bthr,hrd->bthd", left, right).to(dtype)
    check(z, weight().to(dtype))
    row = tables_of(call(z, weight().to(dtype))).rows["heads"][0]
    assert row["num_rank"] == rank
    assert row["erank"] <= rank + 1e-3


def test_orthogonal_equal_directions_have_the_full_effective_rank() -> None:
    z = torch.eye(WIDTH).repeat(4, 1).view(1, 4 * WIDTH, 1, WIDTH)
    row = tables_of(call(z, torch.eye(WIDTH))).rows["heads"][0]
    for column in ("erank", "stable_rank", "participation", "num_rank", "rank_bound"):
        assert math.isclose(row[column], WIDTH, rel_tol=1e-12), column
    assert math.isclose(row["utilisation"], 1.0, rel_tol=1e-12)


def test_constant_rows() -> None:
    """mean_share 1, one direction, and nothing left without it."""
    z = torch.randn(1, 1, HEADS, WIDTH).expand(2, 30, -1, -1)
    tables = tables_of(call(z, weight()))
    for row in tables.rows["heads"] + tables.rows["layers"]:
        assert math.isclose(row["mean_share"], 1.0, abs_tol=1e-12)
        assert math.isclose(row["erank"], 1.0, abs_tol=1e-5)
        assert row["erank_centered"] is None
        assert row["num_rank"] == 1
    told = {row["metric"] for row in tables.rows["not_measured"]}
    assert "erank_centered" in told


@pytest.mark.parametrize("size", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_that_a_sink_makes_nearly_equal(size: float, dtype: torch.dtype) -> None:
    """The centred rank is that of the small rest, although the rest is all but lost in the rows."""
    z = (torch.randn(1, 1, HEADS, WIDTH) * 5 + size * torch.randn(2, 60, HEADS, WIDTH)).to(dtype)
    check(z, weight().to(dtype))
    calls = [call(part, weight().to(dtype)) for part in z.split(1)]
    assert len(calls) == 2


@pytest.mark.parametrize("cuts", [[1, 5], [3, 3], [2, 2, 2], [1] * 6])
def test_batches_stream_and_merge(cuts: list[int]) -> None:
    w = weight()
    z = torch.randn(6, 20, HEADS, WIDTH) + 4
    z[3:] -= 8  # batches with very different means
    parts = [call(part, w) for part in z.split(cuts)]
    check(z, w, *parts)
    merged = Rank(Options())
    for one in parts:
        other = Rank(Options())
        other.attention(one, None)
        merged.merge(other)
    alone = Rank(Options())
    for one in parts:
        alone.attention(one, None)
    for mine, theirs in zip(
        merged.tables().rows["heads"], alone.tables().rows["heads"], strict=True
    ):
        assert_figures(mine, theirs)


def test_padding_is_left_out() -> None:
    ids = torch.tensor([[-1] * 5 + [0] * 15, [0] * 12 + [-1] * 8])
    z = torch.randn(2, 20, HEADS, WIDTH)
    z[ids < 0] = 1e6
    check(z, weight(), ids=ids)


def test_a_zero_output_has_no_rank_but_a_reason() -> None:
    tables = tables_of(call(torch.zeros(1, 9, HEADS, WIDTH), weight()))
    row = tables.rows["heads"][0]
    for column in ("erank", "erank_centered", "stable_rank", "participation", "mean_share"):
        assert row[column] is None, column
    assert row["num_rank"] == 0
    assert [r["metric"] for r in tables.rows["not_measured"]] == ["rank"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=12).filter(
        lambda values: max(values) > 1e-6
    )
)
def test_effective_rank_lies_between_one_and_the_count(values: list[float]) -> None:
    sigma = torch.tensor(values, dtype=torch.double)
    found = effective_rank(sigma)
    assert 1 - 1e-9 <= found <= int((sigma > 0).sum()) + 1e-9


def test_a_scatter_of_nothing_is_nothing() -> None:
    scatter = Scatter()
    scatter.add(torch.zeros(0, 4))
    scatter.merge(Scatter())
    assert scatter.count == 0


def test_a_batch_without_a_token_changes_nothing() -> None:
    z, w = torch.randn(2, 9, HEADS, WIDTH), weight()
    nobody = torch.full((1, 5), -1)
    empty = call(torch.randn(1, 5, HEADS, WIDTH), w, nobody)
    check(z, w, empty, call(z, w), empty)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_map_that_holds_no_numbers_has_no_rank_but_a_reason(odd: float) -> None:
    w = weight()
    w[3, 1] = odd
    tables = tables_of(call(torch.randn(1, 6, HEADS, WIDTH), w))
    assert [row["reason"] for row in tables.rows["not_measured"]] == [NO_NUMBERS]
    assert all(row["erank"] is None for row in tables.rows["heads"] + tables.rows["layers"])


@pytest.mark.parametrize("cuts", [[6], [1, 5], [2, 2, 2]])
@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_heads_alone_have_the_ranks_they_have_among_all(cuts: list[int], offset: float) -> None:
    w, z = weight(), torch.randn(6, 20, HEADS, WIDTH)
    z += offset * torch.randn(HEADS, WIDTH)
    whole = tables_of(call(z, w))
    alone = Rank(Options(layer_rank=False))
    for part in z.split(cuts):
        other = Rank(Options(layer_rank=False))
        other.attention(call(part, w), None)
        alone.merge(other)
    found = alone.tables()
    for mine, theirs in zip(found.rows["heads"], whole.rows["heads"], strict=True):
        assert_figures(mine, theirs)
    (layer,) = found.rows["layers"]
    assert layer["erank"] is None
    assert math.isclose(layer["erank_head"], whole.rows["layers"][0]["erank_head"], rel_tol=1e-9)
    assert {row["head"] for row in found.rows["spectra"]} == set(range(HEADS))
    assert [row["reason"] for row in found.rows["not_measured"]] == [LEFT_OUT]
