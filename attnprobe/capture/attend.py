"""Attention itself, under a mask that is a rule: what the model would get, in linear memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.masks import Mask

BLOCK_ELEMENTS = 1 << 20  # of a mask, or of the logits where they are written out


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
    # pieces kept or taken anew for every block would leave the memory in pieces
    output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=_given(query, is_plain))
    dtype = torch.promote_types(query.dtype, torch.float32)
    scratch = (query.new_empty(0, dtype=dtype), query.new_empty(0, dtype=dtype))
    every = slice(None)
    for rows in _row_blocks(query, mask, per_head=not is_plain):
        if not is_plain:
            part, _ = by_definition(
                query, key, value, mask, rows, scale, softcap, sinks, scratch=scratch
            )
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
    scratch: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, H, r, d_v) the output of a few queries, and (B, H, r) which of them see a key.

    Softmax of the logits written out, in float32 or better; into `scratch`, which grows, if given.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups, keys = key.shape[1], mask.span(rows)  # all other keys are hidden
    few = query[:, :, rows].to(dtype)  # (B, H, r, d)
    n_keys = keys.stop - keys.start
    shape = (*few.shape[:3], n_keys + (sinks is not None))
    if scratch is None:
        scratch = few.new_empty(0), few.new_empty(0)
    logits, weights = (_room(room, shape) for room in scratch)
    product = _room(scratch[1], (len(few), groups, shape[1] // groups * shape[2], n_keys))
    _multiply(_grouped(few, groups), key[:, :, keys].to(dtype).mT, product)
    seen_part = logits[..., :n_keys]  # (B, H, r, k)
    torch.mul(product.view(*shape[:3], n_keys), scale, out=seen_part)
    if softcap is not None:
        seen_part.div_(softcap).tanh_().mul_(softcap)
    bias = mask.bias(rows, keys, slice(None), slice(None))
    if bias is not None:
        seen_part.add_(bias.to(dtype))
    visible = mask.visible(rows, keys, slice(None), slice(None))
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=few.device)
    visible = visible.expand_as(seen_part)
    seen_part.masked_fill_(~visible, -torch.inf)
    if sinks is not None:
        logits[..., -1] = sinks.to(dtype).expand(*query.shape[:3])[:, :, rows]
    torch.softmax(logits, -1, out=weights).nan_to_num_(0)
    output = few.new_empty(*few.shape[:3], value.shape[-1])
    own = value[:, :, keys].to(dtype)
    _multiply(_grouped(weights[..., :n_keys], groups), own, _grouped(output, groups))
    return output, visible.any(-1)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """(B, K, m, p) products of (B, K, m, n) and (B, K, n, p), sample by sample.

    All at once, torch would first copy keys and values that lie side by side with other heads'.
    """
    for one, other, product in zip(left, right, out, strict=True):
        torch.bmm(one, other, out=product)


def _room(scratch: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of that shape in memory that is used again and again."""
    if scratch.numel() < math.prod(shape):
        scratch.resize_(math.prod(shape))
    return scratch[: math.prod(shape)].view(shape)


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


def _given(query: Tensor, is_plain: bool) -> torch.dtype:
    """The type that torch's own function gives, which autocast may change."""
    kind = query.device.type
    if is_plain and query.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return query.dtype


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
