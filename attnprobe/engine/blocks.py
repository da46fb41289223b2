"""Exact softmax statistics under any mask, one block of queries at a time.

A block of logits is reduced to sums and dropped, so memory is linear in the length. The first key
is left out of the block's sums and put back in closed form (`attnprobe.engine.stats.close_row`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall
from attnprobe.engine.stats import NEVER, AttentionStats, close_row

BLOCK_ELEMENTS = {"cpu": 1 << 20}  # logits in one block: 4 MB of float32 stay in the cache
BLOCK_ELEMENTS_ACCELERATOR = 1 << 26
BLOCK_ROWS = 128


def measure(call: AttentionCall) -> AttentionStats:
    """Reduces one call; half precision is upcast to float32, float64 stays."""
    sums = _Sums(call)
    for part in _parts(call):
        _reduce(call, part, sums)
    return sums.stats()


class _Part:
    """A run of batch rows × key heads × queries small enough to hold its logits."""

    def __init__(self, batch: slice, key_heads: slice, group: int, rows: slice) -> None:
        self.batch, self.key_heads, self.rows = batch, key_heads, rows
        self.heads = slice(key_heads.start * group, key_heads.stop * group)


def _parts(call: AttentionCall) -> Iterator[_Part]:
    n_batch, n_heads, n_queries, _ = call.query.shape
    n_key_heads, n_keys = call.key.shape[1:3]
    group = n_heads // n_key_heads
    room = BLOCK_ELEMENTS.get(call.query.device.type, BLOCK_ELEMENTS_ACCELERATOR)
    height = max(1, min(n_queries, BLOCK_ROWS, room // max(1, group * n_keys)))
    units = max(1, room // max(1, group * n_keys * height))  # (row, key head) pairs a block
    heads_step = min(n_key_heads, units)
    batch_step = max(1, units // n_key_heads)
    for b in range(0, n_batch, batch_step):
        batch = slice(b, min(b + batch_step, n_batch))
        for k in range(0, n_key_heads, heads_step):
            key_heads = slice(k, min(k + heads_step, n_key_heads))
            for start in range(0, n_queries, height):
                rows = slice(start, min(start + height, n_queries))
                yield _Part(batch, key_heads, group, rows)


class _Sums:
    """The outputs while they fill up."""

    def __init__(self, call: AttentionCall) -> None:
        n_batch, n_heads, n_queries, _ = call.query.shape
        n_keys = call.key.shape[2]
        device = call.query.device
        self.dtype = torch.promote_types(call.query.dtype, torch.float32)
        masks = call.mask.heads

        def real(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=self.dtype, device=device)

        def count(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.leading = call.keys.leading_for(call.queries)  # (B, Tq, 4)
        self.is_token = call.queries.valid  # (B, Tq)
        self.visible = count(n_batch, masks, n_queries)
        self.sees_first = count(n_batch, masks, n_queries).bool()
        self.first, self.first4, self.null, self.lse, self.entropy, self.entropy_nosink = (
            real(n_batch, n_heads, n_queries) for _ in range(6)
        )
        self.mass = real(n_batch, n_heads, n_keys)
        self.seen = count(n_batch, masks, n_keys)
        self.max_logit = real(n_batch, n_heads, fill=-torch.inf)

    def stats(self) -> AttentionStats:
        visible = self.visible * self.is_token[:, None]
        return AttentionStats(
            valid=visible > 0,
            visible=visible,
            sees_first=self.sees_first & (visible > 0),
            first=self.first,
            first4=self.first4,
            null=self.null,
            lse=self.lse,
            entropy=self.entropy,
            entropy_nosink=self.entropy_nosink,
            mass=self.mass,
            seen=self.seen,
            max_logit=self.max_logit,
            engine="blocks",
        )


def _logits(call: AttentionCall, part: _Part, keys: slice, dtype: torch.dtype) -> Tensor:
    """(b, H', Tq', Tk') as the softmax sees them, hidden keys not yet taken out."""
    query = call.query[part.batch, part.heads, part.rows].to(dtype) * call.scale
    key = call.key[part.batch, part.key_heads, keys].to(dtype)
    n_batch, n_heads, n_rows, width = query.shape
    grouped = query.reshape(n_batch, key.shape[1], -1, width)  # heads of a group share their keys
    logits = (grouped @ key.mT).view(n_batch, n_heads, n_rows, key.shape[2])
    if call.softcap is not None:
        logits = logits.div_(call.softcap).tanh_().mul_(call.softcap)
    bias = call.mask.bias(part.rows, keys, part.batch, part.heads)
    return logits if bias is None else logits.add_(bias.to(dtype))


def _reduce(call: AttentionCall, part: _Part, sums: _Sums) -> None:
    keys = call.mask.span(part.rows)
    if keys.start >= keys.stop:
        return
    logits = _logits(call, part, keys, sums.dtype)  # (b, H', Tq', Tk')
    n_batch, n_heads, n_rows, n_keys = logits.shape
    visible = call.mask.visible(part.rows, keys, part.batch, part.heads)
    if visible is None:
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=logits.device)
    else:
        logits = logits.masked_fill_(~visible, NEVER)
    visible = visible.expand(-1, -1, n_rows, n_keys)
    is_token = sums.is_token[part.batch, None, part.rows]  # (b, 1, Tq')
    counts = visible.sum(-1)  # (b, h, Tq')
    valid = is_token & (counts > 0)  # (b, h, Tq')

    leading = sums.leading[part.batch, part.rows] - keys.start  # (b, Tq', 4)
    inside = (leading >= 0) & (leading < n_keys)
    leading = leading.clamp(0, n_keys - 1)
    at = leading[:, None].expand(-1, n_heads, -1, -1)  # (b, H', Tq', 4)
    sees = (
        visible.expand(n_batch, -1, -1, -1).gather(
            -1, leading[:, None].expand(-1, visible.shape[1], -1, -1)
        )
        & inside[:, None]
    )  # (b, h, Tq', 4)
    sees_first = sees[..., 0]

    top = logits.amax(-1)  # (b, H', Tq')
    at_first = at[..., :1]
    first_logit = logits.gather(-1, at_first)[..., 0].masked_fill(~sees_first, NEVER)
    keep = logits.gather(-1, at_first).masked_fill(sees_first[..., None], NEVER)
    logits.scatter_(-1, at_first, keep)

    others = counts - sees_first.long() > 0  # (b, h, Tq') a key besides the first is seen
    peak = logits.amax(-1, keepdim=True)  # (b, H', Tq', 1)
    logits.sub_(peak)
    weights = logits.exp()
    leading_weights = weights.gather(-1, at[..., 1:])  # (b, H', Tq', 3)
    total = weights.sum(-1)
    mean_logit = logits.mul_(weights).sum(-1) / total  # of s - peak, at most 0
    other_entropy = (total.log() - mean_logit).clamp_min(0).masked_fill(~others, 0)
    other_lse = (peak[..., 0] + total.log()).masked_fill(~others, NEVER)

    lse, entropy = close_row(first_logit, other_lse, other_entropy)
    full = lse
    if call.sinks is not None:
        sinks = call.sinks.to(lse).expand(*call.query.shape[:3])
        sinks = sinks[part.batch, part.heads, part.rows]
        full = torch.logaddexp(lse, sinks)
        _store(sums.null, part, (sinks - full).exp(), valid)

    first = (first_logit - full).exp() * sees_first
    scale = (peak[..., 0] - full).exp() * (valid & others)  # from weights to attention
    following = (leading_weights * sees[..., 1:]).sum(-1) * scale

    _store(sums.first, part, first, valid)
    _store(sums.first4, part, first + following, valid)
    _store(sums.lse, part, lse, valid)
    _store(sums.entropy, part, entropy, valid)
    _store(sums.entropy_nosink, part, other_entropy, valid)

    mass = sums.mass[part.batch, part.heads, keys]  # a view
    mass += (scale[..., None, :] @ weights)[..., 0, :]  # (b, H', Tk')
    mass.scatter_add_(-1, at_first[..., 0], first * valid)
    best = top.masked_fill(~valid, -torch.inf).amax(-1)
    sums.max_logit[part.batch, part.heads] = torch.maximum(
        sums.max_logit[part.batch, part.heads], best
    )
    if sums.seen.shape[1] > 1 or part.heads.start == 0:  # a shared mask is counted once
        own = part.heads if sums.seen.shape[1] > 1 else slice(0, 1)
        sums.visible[part.batch, own, part.rows] = counts
        sums.sees_first[part.batch, own, part.rows] = sees_first
        sums.seen[part.batch, own, keys] += (visible & valid[..., None]).sum(-2)


def _store(target: Tensor, part: _Part, values: Tensor, valid: Tensor) -> None:
    target[part.batch, part.heads, part.rows] = values.masked_fill(~valid, 0)
