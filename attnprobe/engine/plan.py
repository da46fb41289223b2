"""How a call is cut into blocks of logits, and what its mask says of each of them.

What depends on the mask alone is worked out once and shared by all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall
from attnprobe.engine.coverage import Coverage

BLOCK_ELEMENTS = {"cpu": 1 << 21}  # logits in a block: 8 MB of float32 stay in the cache
BLOCK_ELEMENTS_ACCELERATOR = 1 << 26
BLOCK_ROWS = 256
STEPS = 8  # into how many runs short texts are cut, so that little of a causal block is hidden
SHARED = 4  # as many heads or more share half a block; fewer are faster one by one on a CPU


@dataclass(frozen=True, eq=False)
class Block:
    """A run of queries of some samples.

    Attributes:
        rows: the queries.
        keys: all that any of them sees.
        hidden: which of these keys some of the queries do not see, from the block's left edge, and
            (b, 1, r, c) where; None if the mask has to be asked pair by pair.
        leading: (b, 1, r, 4) where in the block the document's first keys are; None if no query
            sees any of them.
        unseen: (b, h, r, 4) those that the query does not see.
        counts: (b, h, r) 1 where the query is valid and sees a key besides the first, else 0.
    """

    rows: slice
    keys: slice
    hidden: list[tuple[slice, Tensor]] | None
    leading: Tensor | None
    unseen: Tensor
    counts: Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """Some heads of some samples, whose blocks are reduced one after the other.

    Attributes:
        batch, key_heads, heads: which; several key heads with all query heads that share them.
    """

    batch: slice
    key_heads: slice
    heads: slice
    blocks: list[Block]


def tasks(call: AttentionCall, coverage: Coverage, dtype: torch.dtype) -> list[Task]:
    """Tasks that no two add to the same sums."""
    n_batch, n_heads, n_queries, _ = call.query.shape
    n_key_heads = call.key.shape[1]
    group = n_heads // n_key_heads
    on_cpu = call.query.device.type == "cpu"
    room = BLOCK_ELEMENTS["cpu"] if on_cpu else BLOCK_ELEMENTS_ACCELERATOR
    widest = max(1, int((coverage.high - coverage.low).amax()))
    height = min(BLOCK_ROWS, max(BLOCK_ROWS // 4, widest // STEPS))
    height = max(1, min(n_queries, height, room // widest))
    fit = room // 2 // (height * min(call.mask.n_keys, widest + height))  # heads in half a block
    fit = 1 if on_cpu and fit < SHARED else max(1, fit)
    members, key_heads = min(group, fit), min(n_key_heads, max(1, fit // group))
    samples = min(n_batch, max(1, fit // n_heads))
    found = []
    for batch in _runs(n_batch, samples):
        blocks = [
            block
            for rows in _runs(n_queries, height)
            if (block := _block(coverage, batch, rows, dtype)) is not None
        ]
        for own in _runs(n_key_heads, key_heads):
            for part in _runs(group, members):
                heads = slice(own.start * group + part.start, (own.stop - 1) * group + part.stop)
                found.append(Task(batch, own, heads, blocks))
    return found


def length(part: slice) -> int:
    """How many a slice with both ends has."""
    return part.stop - part.start


def _runs(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _block(coverage: Coverage, batch: slice, rows: slice, dtype: torch.dtype) -> Block | None:
    """What the masks of some samples say of a run of queries, None where none sees a key."""
    own = slice(None) if len(coverage.low) == 1 else batch
    low, high = coverage.low[own, None, rows, None], coverage.high[own, None, rows, None]
    some = low < high  # (b | 1, 1, r, 1)
    if not bool(some.any()):
        return None
    outer, inner_stop = low[some].aminmax(), high[some].aminmax()
    keys = slice(int(outer.min), int(inner_stop.max))
    hidden = None
    if coverage.is_run:
        column = torch.arange(keys.start, keys.stop, device=low.device)
        left = slice(0, int(outer.max) - keys.start)
        right = slice(max(0, int(inner_stop.min) - keys.start), length(keys))
        edges = (left, column[left] < low), (right, column[right] >= high)
        hidden = [(columns, where) for columns, where in edges if columns.start < columns.stop]
    sees = coverage.sees[batch, :, rows]  # (b, h, r, 4)
    leading = None
    if bool(sees.any()):
        leading = coverage.leading[batch, None, rows] - keys.start
        leading = leading.clamp_(0, length(keys) - 1)
    others = coverage.others[batch, :, rows]  # (b, h, r)
    return Block(rows, keys, hidden, leading, ~sees, others.to(dtype))
