"""What the mask alone says of every query and key, in numbers linear in the length.

Under nearly every mask a query sees one run of keys: causal, windows, chunks, padding on either
side, packed documents, prefixes. Such runs are found once and shared by all heads; only other masks
have to be looked at pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall
from attnprobe.capture.masks import Mask

WALK_ELEMENTS = 1 << 22  # pairs of a mask that are looked at together


@dataclass(frozen=True, eq=False)
class Coverage:
    """Which keys the queries of a call see. h is H where heads have masks of their own, else 1.

    Attributes:
        low, high: (B | 1, Tq) a query sees no key outside low <= key < high.
        is_run: every query, in every head, sees all keys between the two.
        leading: (B, Tq, 4) where the query's own document begins, -1 where nowhere.
        visible: (B, h, Tq) n(i), how many keys the query sees; 0 for padding.
        sees: (B, h, Tq, 4) whether the query sees the first four keys of its document.
        seen: (B, h, Tk) how many valid queries see the key.
    """

    low: Tensor
    high: Tensor
    is_run: bool
    leading: Tensor
    visible: Tensor
    sees: Tensor
    seen: Tensor

    @cached_property
    def others(self) -> Tensor:
        """(B, h, Tq) whether a query sees a key besides the first of its document."""
        return self.visible > self.sees[..., 0].long()


def cover(call: AttentionCall) -> Coverage:
    """The coverage of a call, in closed form where its mask allows."""
    leading = call.keys.leading_for(call.queries)  # (B, Tq, 4)
    run = _run(call.mask)
    if run is None:
        return _walked(call, leading)
    low, high = run
    is_token = call.queries.valid  # (B, Tq)
    visible = (high - low) * is_token
    sees = (leading >= low[..., None]) & (leading < high[..., None]) & is_token[..., None]
    change = torch.zeros(len(leading), call.mask.n_keys + 1, dtype=torch.long, device=low.device)
    counted = is_token.long()
    change.scatter_add_(1, low.expand_as(counted), counted)
    change.scatter_add_(1, high.expand_as(counted), -counted)
    return Coverage(
        low=low,
        high=high,
        is_run=True,
        leading=leading,
        visible=visible[:, None],
        sees=sees[:, None],
        seen=change.cumsum(1)[:, None, :-1],
    )


def _run(mask: Mask) -> tuple[Tensor, Tensor] | None:
    """(B | 1, Tq) first key and the key behind the last that each query sees, None where unknown.

    Queries of padding may get anything.
    """
    if mask.is_by_pair:
        return None
    at = torch.arange(mask.n_queries, device=mask.device)[None] + mask.offset  # (1, Tq)
    low, high = torch.zeros_like(at), torch.full_like(at, mask.n_keys)
    if mask.causal:
        high = torch.minimum(high, at + 1)
    if mask.window is not None:
        low = torch.maximum(low, at - mask.window + 1)
    if mask.ahead is not None:
        high = torch.minimum(high, at + mask.ahead + 1)
    for bounds in (_real(mask), _own_document(mask)):
        if bounds is None:
            return None
        low, high = torch.maximum(low, bounds[0]), torch.minimum(high, bounds[1])
    low = low.clamp(0, mask.n_keys)
    return low, torch.maximum(low, high)


Bounds = tuple[Tensor, Tensor]


def _real(mask: Mask) -> Bounds | None:
    """(B, 1) where real keys begin and end, None where padding lies between them."""
    everywhere = torch.zeros(1, 1, dtype=torch.long, device=mask.device)
    if mask.key_padding is None:
        return everywhere, everywhere + mask.n_keys
    real = mask.key_padding.bool()
    if mask.documents is not None:
        query, key = mask.documents
        # padding keys of no document are hidden by their id already, wherever they stand
        if query is key and bool((real | (key < 0)).all()):
            return everywhere, everywhere + mask.n_keys
    count = real.sum(1, keepdim=True)
    start = real.long().argmax(1, keepdim=True)
    stop = mask.n_keys - real.flip(1).long().argmax(1, keepdim=True)
    stop = torch.where(count > 0, stop, start)
    return (start, stop) if torch.equal(stop - start, count) else None


def _own_document(mask: Mask) -> Bounds | None:
    """(B, Tq) where each query's own document begins and ends, None where one is in pieces."""
    everywhere = torch.zeros(1, 1, dtype=torch.long, device=mask.device)
    if mask.documents is None:
        return everywhere, everywhere + mask.n_keys
    query, ids = mask.documents
    if query is not ids and not torch.equal(query, ids):
        return None
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ordered = ids.sort(1).values
    is_new = torch.ones_like(begins)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    if not torch.equal((begins & (ids >= 0)).sum(1), (is_new & (ordered >= 0)).sum(1)):
        return None
    start = torch.where(begins, column, 0).cummax(1).values
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    stop = torch.where(ends, column + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return start, stop


def _walked(call: AttentionCall, leading: Tensor) -> Coverage:
    """The same for any mask, a block of its pairs at a time."""
    mask, (batch, n_queries) = call.mask, call.queries.ids.shape
    every, device = slice(None), call.query.device
    shape = (batch, mask.heads, n_queries)
    low = torch.zeros(shape, dtype=torch.long, device=device)
    high, visible = torch.zeros_like(low), torch.zeros_like(low)
    sees = torch.zeros(*shape, leading.shape[-1], dtype=torch.bool, device=device)
    seen = torch.zeros(batch, mask.heads, mask.n_keys, dtype=torch.long, device=device)
    step = max(1, WALK_ELEMENTS // max(1, batch * mask.heads * mask.n_keys))
    for start in range(0, n_queries, step):
        rows = slice(start, min(start + step, n_queries))
        keys = mask.span(rows)
        if keys.start >= keys.stop:
            continue
        is_token = call.queries.valid[:, None, rows]  # (B, 1, r)
        shown = mask.visible(rows, keys, every, every)
        if shown is None:
            shown = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        shown = shown.expand(batch, mask.heads, rows.stop - start, keys.stop - keys.start)
        shown = shown & is_token[..., None]  # (B, h, r, Tk')
        # counts of less than 2²⁴ are exact in float32, and ten times as fast as in integers
        pairs = shown.float()
        after = torch.arange(keys.start + 1, keys.stop + 1, device=device, dtype=torch.float32)
        visible[:, :, rows] = pairs.sum(-1).long()
        seen[:, :, keys] += pairs.sum(-2).long()
        high[:, :, rows] = (pairs * after).amax(-1).long()
        low[:, :, rows] = mask.n_keys - pairs.mul_(mask.n_keys + 1 - after).amax(-1).long()
        at = leading[:, None, rows] - keys.start  # (B, 1, r, 4)
        inside = (at >= 0) & (at < shown.shape[-1])
        at = at.clamp(0, shown.shape[-1] - 1).expand(-1, mask.heads, -1, -1)
        sees[:, :, rows] = shown.gather(-1, at) & inside
    is_empty = visible == 0
    first = low.masked_fill(is_empty, mask.n_keys).amin(1)  # (B, Tq) over the heads
    last = high.masked_fill(is_empty, 0).amax(1)
    first = torch.minimum(first, last)
    return Coverage(
        low=first,
        high=last,
        is_run=torch.equal(visible, (last - first)[:, None].expand_as(visible)),
        leading=leading,
        visible=visible,
        sees=sees,
        seen=seen,
    )
