"""What the engine takes from a mask alone, and that it is the same however the mask is given."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attnprobe.capture import AttentionCall, Documents, Mask, Site
from attnprobe.capture.masks import as_rule
from attnprobe.engine import coverage, measure
from attnprobe.engine.coverage import cover

BATCH, HEADS, LENGTH, WIDTH = 4, 4, 40, 8
FIGURES = ("first", "first4", "null", "lse", "entropy", "entropy_nosink", "mass", "max_logit")
COUNTS = ("valid", "visible", "sees_first", "seen")
SITE = Site("attention", "decoder", "self", 0)


def call(mask: Mask, queries: Documents, keys: Documents, **change: object) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    batch = queries.ids.shape[0]

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, WIDTH, generator=generator)

    query = normal(HEADS, mask.n_queries) * 3
    key, value = normal(HEADS // 2, mask.n_keys), normal(HEADS // 2, mask.n_keys)
    given = {"query": query, "key": key, "value": value, "output": query} | change
    return AttentionCall(SITE, scale=WIDTH**-0.5, mask=mask, queries=queries, keys=keys, **given)


def agree(ours: object, theirs: object) -> None:
    for name in FIGURES:
        torch.testing.assert_close(
            getattr(ours, name), getattr(theirs, name), rtol=2e-5, atol=2e-5, msg=name
        )
    for name in COUNTS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def padded(side: str) -> Tensor:
    mask = torch.ones(BATCH, LENGTH)
    if side in ("left", "both"):
        mask[0, :7] = 0
        mask[1, :33] = 0
    if side in ("right", "both"):
        mask[2, -7:] = 0
        mask[0, -3:] = 0
    if side == "between":
        mask[1, 5:9] = 0
    return mask


def packs() -> Tensor:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    ids[:, 20:] = 1
    ids[0, 30:] = 2
    ids[1, 35:] = 3
    return ids


def by_pair(documents: Documents, causal: bool, packed: bool) -> Tensor:
    """(B, 1, T, T) the pairs that a mask of these documents lets through, written out."""
    visible = documents.valid[:, None, :].expand(-1, LENGTH, -1)
    if packed:
        visible = visible & (documents.ids[:, :, None] == documents.ids[:, None, :])
    if causal:
        visible = visible & torch.ones(LENGTH, LENGTH).tril().bool()
    return visible[:, None]


PADDINGS = ("none", "left", "right", "both")
MATRIX = list(itertools.product(PADDINGS, (False, True), (False, True), ("bool", "float")))


@pytest.mark.parametrize(("side", "packed", "causal", "kind"), MATRIX)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_masks_are_recognised(
    side: str, packed: bool, causal: bool, kind: str, with_sinks: bool
) -> None:
    documents = Documents.from_mask(padded(side), packs() if packed else None)
    dense = by_pair(documents, causal, packed)
    dense = dense | ~documents.valid[:, None, :, None]  # padded queries may see anything
    if kind == "float":
        least = torch.finfo(torch.float32).min
        dense = torch.zeros(dense.shape).masked_fill(~dense, least)
    mask = Mask(LENGTH, LENGTH, dense=dense)
    rule = as_rule(mask, documents)
    assert rule.dense is None
    sinks = torch.randn(HEADS)[None, :, None] if with_sinks else None
    ruled = call(rule, documents, documents, sinks=sinks)
    assert cover(ruled).is_run
    agree(measure(ruled), measure(call(mask, documents, documents, sinks=sinks)))


@pytest.mark.parametrize("change", ["a key more", "a key less", "a bias"])
def test_nearly_causal_masks_stay_dense(change: str) -> None:
    documents = Documents.whole(BATCH, LENGTH)
    dense = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(
        ~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf
    )
    if change == "a key more":
        dense[0, 0, 3, 30] = 0
    elif change == "a key less":
        dense[0, 0, 30, 3] = -torch.inf
    else:
        dense[0, 0, 30, 3] = 1e-3
    mask = Mask(LENGTH, LENGTH, dense=dense)
    rule = as_rule(mask, documents)
    assert rule.dense is dense
    assert rule.adds_only == (change == "a bias")


RUNS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 6},
    "window that looks ahead": {"window": 6, "ahead": 4},
    "window of one": {"causal": True, "window": 1},
    "window wider than the text": {"causal": True, "window": 99},
    "fewer queries": {"causal": True, "offset": 9},
    "a window of fewer queries": {"causal": True, "window": 5, "offset": 9},
    "queries that see nothing": {"causal": True, "offset": -7},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("side", [*PADDINGS, "between"])
@pytest.mark.parametrize("packed", [False, True])
def test_runs_in_closed_form_are_those_of_the_pairs(
    name: str, side: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = RUNS[name].get("offset", 0)
    n_queries = LENGTH - max(0, offset)
    keys = Documents.from_mask(padded(side), packs() if packed else None)
    queries = keys if n_queries == LENGTH else Documents(keys.ids[:, -n_queries:])
    mask = Mask(
        n_queries,
        LENGTH,
        key_padding=None if side == "none" else keys.valid,
        documents=(keys.ids, keys.ids) if packed and queries is keys else None,
        **RUNS[name],
    )
    given = call(mask, queries, keys)
    closed = cover(given)
    if side != "between":
        assert coverage._run(mask) is not None
    monkeypatch.setattr(coverage, "_run", lambda mask: None)
    walked = cover(given)
    every = slice(None)
    pairs = mask.visible(slice(0, n_queries), slice(0, LENGTH), every, every)
    pairs = torch.ones(1, 1, 1, 1) if pairs is None else pairs.float()
    pairs = pairs.expand(BATCH, 1, n_queries, LENGTH) * queries.valid[:, None, :, None]
    starts = pairs[..., 0] + (pairs.diff(dim=-1) > 0).sum(-1)  # runs that a query sees
    assert walked.is_run is bool((starts <= 1).all())
    assert closed.is_run is walked.is_run
    for field in ("visible", "sees", "seen"):
        assert torch.equal(getattr(closed, field), getattr(walked, field)), field
    some = closed.visible[:, 0] > 0
    for field in ("low", "high"):
        ours, theirs = getattr(closed, field).expand_as(some), getattr(walked, field)
        assert torch.equal(ours[some], theirs[some]), field


@pytest.mark.parametrize("step", [1, 100, 1 << 20])
def test_walking_in_any_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    visible = torch.rand(BATCH, HEADS, LENGTH, LENGTH) < 0.2
    documents = Documents.from_mask(padded("both"), packs())
    monkeypatch.setattr(coverage, "WALK_ELEMENTS", step)
    found = cover(call(Mask(LENGTH, LENGTH, dense=visible), documents, documents))
    shown = visible & documents.valid[:, None, :, None]
    assert not found.is_run
    assert torch.equal(found.visible, shown.sum(-1))
    assert torch.equal(found.seen, shown.sum(-2))
    column = torch.arange(LENGTH)
    outside = (column < found.low[..., None]) | (column >= found.high[..., None])  # (B, T, T)
    assert not bool((shown & outside[:, None]).any())


@pytest.mark.parametrize("n_queries", [1, 7, LENGTH])
def test_cross_attention_over_padded_keys(n_queries: int) -> None:
    keys = Documents.from_mask(padded("right"))
    queries = Documents.whole(BATCH, n_queries)
    dense = keys.valid[:, None, None].expand(-1, -1, n_queries, -1)
    ruled = call(Mask(n_queries, LENGTH, key_padding=keys.valid), queries, keys)
    agree(measure(ruled), measure(call(Mask(n_queries, LENGTH, dense=dense), queries, keys)))


def test_the_log_sum_exp_holds_at_any_sink() -> None:
    """entropy_nosink and entropy where the first key takes all but 1e-7 of every row."""
    documents = Documents.whole(1, LENGTH)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 1, LENGTH, WIDTH, generator=generator, dtype=torch.double)
    key = torch.randn(1, 1, LENGTH, WIDTH, generator=generator, dtype=torch.double)
    query[..., 0], key[..., 0] = 1, 0
    key[:, :, 0] = 0
    key[:, :, 0, 0] = 22 * WIDTH**0.5
    mask = Mask(LENGTH, LENGTH, causal=True)
    sunk = call(mask, documents, documents, query=query.float(), key=key.float(), value=key)
    stats = measure(sunk)

    logits = query @ key.mT * WIDTH**-0.5
    hidden = ~torch.ones(LENGTH, LENGTH).tril().bool()
    rest = logits.masked_fill(hidden, -torch.inf)[..., 1:, 1:].log_softmax(-1)
    expected = -(rest.exp() * rest.masked_fill(rest == -torch.inf, 0)).sum(-1)
    assert float(stats.first[..., 1:].min()) > 1 - 1e-7 * LENGTH * 20
    torch.testing.assert_close(
        stats.entropy_nosink[..., 1:].double(), expected, rtol=1e-5, atol=1e-5
    )
    full = logits.masked_fill(hidden, -torch.inf).log_softmax(-1)
    entropy = -(full.exp() * full.masked_fill(full == -torch.inf, 0)).sum(-1)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=1e-9)
    assert bool((stats.entropy >= 0).all())
