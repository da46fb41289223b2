"""Masks: what a block of them says, and which dense ones are known rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnprobe.capture import Documents, Mask
from attnprobe.capture.masks import as_rule

LENGTH = 12
EVERY = slice(None)


def whole(mask: Mask, batch: int = 1) -> Tensor:
    """(b, h, Tq, Tk) of the whole mask."""
    visible = mask.visible(slice(0, mask.n_queries), slice(0, mask.n_keys), EVERY, EVERY)
    if visible is None:
        return torch.ones(1, 1, mask.n_queries, mask.n_keys, dtype=torch.bool)
    return visible


def even_sum(rows: slice, keys: slice) -> Tensor:
    query, key = (torch.arange(part.start, part.stop) for part in (rows, keys))
    return ((query[:, None] + key) % 2 == 0)[None, None]


def random_mask(seed: int, n_queries: int, n_keys: int, parts: list[str]) -> Mask:
    torch.manual_seed(seed)
    ids = torch.randint(-1, 2, (2, max(n_queries, n_keys)))
    return Mask(
        n_queries,
        n_keys,
        causal="causal" in parts,
        offset=int(torch.randint(-3, 6, ())),
        window=3 if "window" in parts else None,
        ahead=2 if "ahead" in parts else None,
        key_padding=torch.rand(2, n_keys) < 0.7 if "padding" in parts else None,
        documents=(ids[:, :n_queries], ids[:, :n_keys]) if "documents" in parts else None,
        dense=torch.rand(2, 3, n_queries, n_keys) < 0.5 if "dense" in parts else None,
        rule=even_sum if "rule" in parts else None,
    )


PARTS = ["causal", "window", "ahead", "padding", "documents", "dense", "rule"]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 1 << 20),
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.sampled_from(PARTS), unique=True),
    st.data(),
)
def test_blocks_spans_and_sums_of_a_mask(
    seed: int, n_queries: int, n_keys: int, parts: list[str], data: st.DataObject
) -> None:
    mask = random_mask(seed, n_queries, n_keys, parts)
    full = whole(mask)
    start = data.draw(st.integers(0, n_queries - 1))
    rows = slice(start, data.draw(st.integers(start + 1, n_queries)))
    span = mask.span(rows)
    part = mask.visible(rows, span, EVERY, EVERY)
    if part is not None and span.start < span.stop:
        assert torch.equal(part, full[:, :, rows, span])
    outside = full[:, :, rows].clone()
    outside[..., span] = False
    assert not bool(outside.any())
    assert torch.equal(mask.sees_any().expand(len(full), -1), full.any(-1).any(1))
    after = torch.arange(n_keys) > torch.arange(n_queries)[:, None] + mask.offset
    assert mask.sees_future() == (bool((full & after).any()) and not mask.causal)


def square(kind: str) -> tuple[Tensor, Tensor]:
    """A dense mask and the ids (B, T) of its tokens."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    if "left" in kind:
        ids[1, :4] = -1
    if "right" in kind:
        ids[0, 7:] = -1
    if "packed" in kind:
        ids[0] = torch.arange(LENGTH) // 5
    visible = (ids >= 0)[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if "causal" in kind:
        visible = visible & (j <= i)
    if "parted" in kind:
        visible = visible & (ids[:, :, None] == ids[:, None])[:, None]
    return visible, ids


KINDS = [
    "causal",
    "full",
    "causal left",
    "causal right",
    "full left",
    "full right",
    "causal packed parted",
    "causal packed",
    "full packed parted",
    "causal packed parted right",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["bool", "-inf", "-1e9", "smallest"])
def test_a_dense_mask_of_a_known_kind_becomes_its_rule(kind: str, form: str) -> None:
    visible, ids = square(kind)
    hidden = {"-inf": -torch.inf, "-1e9": -1e9, "smallest": torch.finfo(torch.float32).min}
    dense = visible
    if form != "bool":
        dense = torch.zeros(visible.shape).masked_fill(~visible, hidden[form])
    rule = as_rule(Mask(LENGTH, LENGTH, dense=dense), Documents(ids))
    assert rule.dense is None
    assert rule.causal == ("causal" in kind)
    real = (ids >= 0)[:, None, :, None]
    assert torch.equal(whole(rule) & real, visible & real)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_padding_may_hold_anything(kind: str) -> None:
    visible, ids = square(kind)
    dense = torch.where((ids >= 0)[:, None, :, None], visible, torch.rand(visible.shape) < 0.5)
    assert as_rule(Mask(LENGTH, LENGTH, dense=dense), Documents(ids)).dense is None


@pytest.mark.parametrize("kind", KINDS)
def test_one_pair_more_or_less_is_no_rule(kind: str) -> None:
    visible, ids = square(kind)
    for row, query, key in ((0, 3, 1), (0, 3, 3), (1, 9, 6), (1, 11, 4)):
        changed = visible.clone()
        changed[row, 0, query, key] = ~changed[row, 0, query, key]
        mask = Mask(LENGTH, LENGTH, dense=changed)
        assert as_rule(mask, Documents(ids)) is mask


def test_what_is_no_rule_stays_dense() -> None:
    visible, ids = square("causal")
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    for dense in (
        visible & (i - j < 4),  # a window
        visible | (j < 3),  # a prefix
        visible & (i - j < torch.tensor([4, LENGTH]).view(2, 1, 1)),  # by head
    ):
        mask = Mask(LENGTH, LENGTH, dense=dense)
        assert as_rule(mask, Documents(ids)) is mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 3])
def test_a_bias_over_a_known_kind_stays_beside_its_rule(kind: str, heads: int) -> None:
    visible, ids = square(kind)
    bias = torch.randn(1, heads, LENGTH, LENGTH)
    dense = bias.masked_fill(~visible, -torch.inf)
    rule = as_rule(Mask(LENGTH, LENGTH, dense=dense), Documents(ids))
    real = (ids >= 0)[:, None, :, None]
    if bool(((whole(rule) & ~visible) & ~real).any()):
        assert not rule.adds_only  # -inf would be added where padding sees a key
        return
    assert rule.dense is dense
    assert rule.adds_only
    assert not rule.is_by_pair
    assert rule.causal == ("causal" in kind)
    assert torch.equal(whole(rule) & real, visible & real)


def test_what_is_added_beside_a_rule_is_known_by_it() -> None:
    """T5: the library's mask is a rule, the bias of the heads a tensor."""
    documents = Documents.whole(1, LENGTH)
    bias = torch.randn(1, 3, LENGTH, LENGTH)
    window = Mask(LENGTH, LENGTH, causal=True, window=4, dense=bias)
    rule = as_rule(window, documents)
    assert (rule.window, rule.dense, rule.adds_only) == (4, bias, True)
    bias[0, 1, 3, 2] = -torch.inf
    assert as_rule(window, documents) is window


def test_padding_that_sees_what_is_no_number_stays_dense() -> None:
    """A rule would let it see real keys, and the sums would be none."""
    visible, ids = square("causal right")
    real = (ids >= 0)[:, None, :, None]
    dense = torch.randn(visible.shape).masked_fill(~(visible & real), -torch.inf)
    mask = Mask(LENGTH, LENGTH, dense=dense)
    assert as_rule(mask, Documents(ids)) is mask


def test_cross_attention_without_padding_of_its_keys_is_a_rule() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    keys = ids[:, :7].clone()
    keys[1, 5:] = -1
    dense = (keys >= 0)[:, None, None].expand(-1, -1, LENGTH, -1)
    rule = as_rule(Mask(LENGTH, 7, dense=dense), Documents(ids), Documents(keys))
    assert rule.dense is None
    assert torch.equal(whole(rule).expand(-1, -1, LENGTH, -1), dense)
