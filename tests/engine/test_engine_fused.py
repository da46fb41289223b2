"""The log-sum-exp engine gives what `blocks` gives, over every mask it takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attnprobe.capture import AttentionCall, Documents, Mask, Site
from attnprobe.capture.masks import as_rule
from attnprobe.engine import blocks, fused, measure

BATCH, HEADS, LENGTH, WIDTH = 4, 4, 40, 8
FIGURES = ("first", "first4", "null", "lse", "entropy", "entropy_nosink", "mass")
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
    return mask


def packs() -> Tensor:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    ids[:, 20:] = 1
    ids[0, 30:] = 2
    ids[1, 35:] = 3  # a document too short for the fused kernel
    return ids


PADDINGS = ("none", "left", "right", "both")
MATRIX = list(itertools.product(PADDINGS, (False, True), (False, True), ("bool", "float")))


@pytest.mark.parametrize(("side", "packed", "causal", "kind"), MATRIX)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_masks_are_recognised(
    side: str, packed: bool, causal: bool, kind: str, with_sinks: bool
) -> None:
    documents = Documents.from_mask(padded(side), packs() if packed else None)
    dense = documents.ids[:, :, None] == documents.ids[:, None, :]
    dense = dense & documents.valid[:, None, :]
    if causal:
        dense = dense & torch.ones(LENGTH, LENGTH).tril().bool()
    dense = (dense | ~documents.valid[:, :, None])[:, None]  # padded queries may see anything
    if kind == "float":
        least = torch.finfo(torch.float32).min
        dense = torch.zeros(dense.shape).masked_fill(~dense, least)
    mask = Mask(LENGTH, LENGTH, dense=dense)
    rule = as_rule(mask, documents)
    assert rule.dense is None
    sinks = torch.randn(HEADS)[None, :, None] if with_sinks else None
    ruled = call(rule, documents, documents, sinks=sinks)
    assert fused.supports(ruled)
    agree(fused.measure(ruled), blocks.measure(call(mask, documents, documents, sinks=sinks)))


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
    assert as_rule(mask, documents) is mask


@pytest.mark.parametrize("n_queries", [1, 7, LENGTH])
def test_cross_attention_over_padded_keys(n_queries: int) -> None:
    keys = Documents.from_mask(padded("right"))
    queries = Documents.whole(BATCH, n_queries)
    masked = call(Mask(n_queries, LENGTH, key_padding=keys.valid), queries, keys)
    assert fused.supports(masked)
    agree(fused.measure(masked), blocks.measure(masked))


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
    assert stats.engine == "fused"

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


def test_a_missing_operator_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents.whole(BATCH, LENGTH)
    plain = call(Mask(LENGTH, LENGTH, causal=True), documents, documents)
    assert measure(plain).engine == "fused"

    def gone(*_: object, **__: object) -> tuple[Tensor, Tensor]:
        raise AttributeError("no such operator")

    monkeypatch.setattr(fused, "_attention", gone)
    fused.available.cache_clear()
    try:
        assert measure(plain).engine == "blocks"
    finally:
        monkeypatch.undo()
        fused.available.cache_clear()
    assert measure(plain, exact_max_logit=True).engine == "blocks"
