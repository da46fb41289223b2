"""Attention itself, under a mask that is a rule: what the model would get, in linear memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.masks import Mask

BLOCK_ELEMENTS = 1 << 22  # of a mask, or of the logits where they are written out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(B, H, Tq, d_v) the attention output; 0 where a query sees no key.

    Args:
        query: (B, H, Tq, d).  key: (B, K, Tk, d), K divides H.  value: (B, K, Tk, d_v).
        scale, softcap, sinks: as in AttentionCall.
    """
    is_plain = softcap is None and sinks is None
    if is_plain and (causal := _whole(mask)) is not None:
        return _fused(query, key, value, scale=scale, causal=causal)
    # written into one tensor, for pieces kept between the blocks would leave the memory in pieces
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    every = slice(None)
    for rows in _row_blocks(query, mask, per_head=not is_plain):
        if not is_plain:
            part, _ = by_definition(query, key, value, mask, rows, scale, softcap, sinks)
            output[:, :, rows] = part
            continue
        keys = mask.span(rows)
        if keys.start >= keys.stop:
            continue
        seen = mask.visible(rows, keys, every, every)
        added = seen
        if (bias := mask.bias(rows, keys, every, every)) is not None:
            assert seen is not None  # a bias hides keys too
            added = bias.to(query.dtype).masked_fill(~seen, -torch.inf)
        part = _fused(
            query[:, :, rows], key[:, :, keys], value[:, :, keys], scale=scale, added=added
        )
        if seen is not None:
            part = part.masked_fill(~seen.any(-1)[..., None], 0)
        output[:, :, rows] = part
    return output


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    rows: slice,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, H, r, d_v) the output of a few queries, and (B, H, r) which of them see a key.

    Softmax of the logits written out, in float32 or better.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = key.shape[1]
    everything = slice(0, mask.n_keys), slice(None), slice(None)
    few = query[:, :, rows].to(dtype)  # (B, H, r, d)
    logits = (_grouped(few, groups) @ key.to(dtype).mT * scale).view(*few.shape[:3], -1)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    bias = mask.bias(rows, *everything)
    if bias is not None:
        logits = logits + bias.to(dtype)
    visible = mask.visible(rows, *everything)
    if visible is None:
        visible = torch.ones_like(logits, dtype=torch.bool)
    visible = visible.expand_as(logits)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        own = sinks.to(dtype).expand(*query.shape[:3])[:, :, rows, None]
        logits = torch.cat([logits, own], -1)
    weights = logits.softmax(-1).nan_to_num(0)[..., : mask.n_keys]
    output = _grouped(weights, groups) @ value.to(dtype)
    return output.view(*few.shape[:3], -1), visible.any(-1)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, H, r, n) as (B, K, H / K · r, n): no key is copied for the heads that share it."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _whole(mask: Mask) -> bool | None:
    """Whether torch's function is causal under a mask it needs no tensor for, None if it does."""
    parts = (mask.window, mask.ahead, mask.key_padding, mask.documents, mask.dense, mask.rule)
    if any(part is not None for part in parts):
        return None
    if not mask.causal:
        return False
    is_square = mask.n_queries == mask.n_keys and mask.offset == 0
    return True if is_square else None


def _row_blocks(query: Tensor, mask: Mask, *, per_head: bool) -> Iterator[slice]:
    n_batch, n_heads, n_queries, _ = query.shape
    wide = n_heads if per_head else mask.heads
    n_keys = mask.n_keys if mask.window is None else min(mask.n_keys, 2 * mask.window)
    step = max(1, BLOCK_ELEMENTS // max(1, n_batch * wide * n_keys))
    if mask.window is not None:
        step = min(step, mask.window)  # a block sees the window of its first query up to its last
    for start in range(0, n_queries, step):
        yield slice(start, min(start + step, n_queries))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """torch's own function; values of another width would lead it to write the matrix out."""
    width = value.shape[-1]
    room = max(query.shape[-1], width)
    query, key, value = (
        x if x.shape[-1] == room else F.pad(x, (0, room - x.shape[-1])) for x in (query, key, value)
    )
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=added,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :width]
