"""Two Triton kernels that fill in what `attnprobe.engine.blocks` sums up, on CUDA devices.

The first walks over the keys of a block of queries and keeps the largest logit, the log-sum-exp and
the mean logit of every row in registers; the second walks over the queries of a block of keys and
adds up the attention that each key gets. Both need a mask under which every query sees one run of
keys, and a plain softmax; everything else stays with blocks of logits.

Half-precision queries and keys are multiplied as they are and added up in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attnprobe.engine.stats import NEVER
from attnprobe.engine.sums import Sums

ROWS = COLUMNS = 64
WIDEST = 256  # of a head; beyond, a block of queries no longer fits a core's fast memory
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(sums: Sums) -> bool:
    """Whether the call is plain enough for the kernels."""
    call = sums.call
    is_plain = call.softcap is None and call.mask.dense is None and not call.is_matrix
    return (
        is_plain
        and sums.coverage.is_run
        and call.query.dtype in DTYPES
        and 16 <= call.query.shape[-1] <= WIDEST
        # a token's place in memory is counted in 32 bits
        and all(x.stride(2) * x.shape[2] < 2**31 for x in (call.query, call.key))
    )


def fill(sums: Sums) -> None:
    """Writes the rows without their first key, the leading logits and the mass on every key."""
    call, coverage = sums.call, sums.coverage
    query, key = call.query, call.key
    n_batch, n_heads, n_queries, width = query.shape
    n_keys = key.shape[2]
    low, high = (
        bound.expand(n_batch, -1).to(torch.int32).contiguous()
        for bound in (coverage.low, coverage.high)
    )
    leading = torch.where(coverage.sees[:, 0], coverage.leading, -1).to(torch.int32).contiguous()
    bounds = _of_blocks(low, high)  # (B, blocks, 2)
    shape: dict[str, Any] = {
        "n_heads": n_heads,
        "group": n_heads // key.shape[1],
        "n_queries": n_queries,
        "n_keys": n_keys,
        "width": width,
        "scale": float(call.scale),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        # Triton's interpreter, which is what runs on a CPU, has no products of bfloat16
        "UPCAST": query.device.type == "cpu",
    }
    runs = (query, key, low, high, leading, bounds, *query.stride(), *key.stride())
    _rows[(triton.cdiv(n_queries, ROWS), n_batch * n_heads)](
        *runs, sums.leading, sums.other_top, sums.other_lse, sums.other_entropy, **shape
    )
    full = torch.logaddexp(sums.other_lse, sums.leading[..., 0])
    if sums.sinks is not None:
        full = torch.logaddexp(full, sums.sinks)
    full = full.masked_fill(~coverage.others, -NEVER).contiguous()  # exp(s - full) is then 0
    _keys[(triton.cdiv(n_keys, COLUMNS), n_batch * n_heads)](*runs, full, sums.mass, **shape)


def _of_blocks(low: Any, high: Any) -> Any:
    """(B, blocks, 2) int32 the first key and the key behind the last of every block of queries."""
    missing = -low.shape[1] % ROWS
    is_empty = low >= high
    first = low.masked_fill(is_empty, torch.iinfo(torch.int32).max)
    last = high.masked_fill(is_empty, 0)
    first = torch.nn.functional.pad(first, (0, missing), value=torch.iinfo(torch.int32).max)
    last = torch.nn.functional.pad(last, (0, missing))
    ends = first.unflatten(1, (-1, ROWS)).amin(-1), last.unflatten(1, (-1, ROWS)).amax(-1)
    return torch.stack(ends, -1).contiguous()


@triton.jit
def _products(q, k, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, COLUMNS) in float32."""
    if UPCAST:
        q, k = q.to(tl.float32), k.to(tl.float32)
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    query, key, low, high, leading, bounds,
    qb, qh, qt, qd, kb, kh, kt, kd,
    out_leading, out_top, out_lse, out_entropy,
    n_heads, group, n_queries, n_keys, width, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; strides by batch, head, token and feature."""
    block = tl.program_id(0)
    batch, head = tl.program_id(1) // n_heads, tl.program_id(1) % n_heads
    row = block * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, WIDTH)
    real = row < n_queries
    inside = real[:, None] & (feature < width)[None, :]
    of_query = query + batch.to(tl.int64) * qb + head.to(tl.int64) * qh
    of_key = key + batch.to(tl.int64) * kb + (head // group).to(tl.int64) * kh
    q = tl.load(of_query + row[:, None] * qt + feature[None, :] * qd, mask=inside, other=0.0)
    at = batch * n_queries + row
    begin = tl.load(low + at, mask=real, other=0)
    end = tl.load(high + at, mask=real, other=0)
    first = tl.load(leading + at * 4, mask=real, other=-1)
    out = tl.program_id(1).to(tl.int64) * n_queries + row
    for n in tl.static_range(4):
        column = tl.load(leading + at * 4 + n, mask=real, other=-1)
        seen = (column >= 0)[:, None] & inside
        there = of_key + column[:, None] * kt + feature[None, :] * kd
        k = tl.load(there, mask=seen, other=0.0)
        logit = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        tl.store(out_leading + out * 4 + n, tl.where(column >= 0, logit, -1e30), mask=real)

    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)  # sum of exp(s - top) (s - top)
    ends = bounds + (batch * tl.num_programs(0) + block) * 2
    start, stop = tl.load(ends), tl.load(ends + 1)
    for c in range(start, stop, COLUMNS):
        column = c + tl.arange(0, COLUMNS)
        there = of_key + column[:, None] * kt + feature[None, :] * kd
        k = tl.load(there, mask=(column < stop)[:, None] & (feature < width)[None, :], other=0.0)
        s = _products(q, k, UPCAST) * scale  # (ROWS, COLUMNS)
        seen = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
        seen = seen & (column[None, :] != first[:, None])
        s = tl.where(seen, s, -1e30)
        higher = tl.maximum(top, tl.max(s, 1))
        shift = top - higher  # at most 0
        weight = tl.where(seen, tl.exp(s - higher[:, None]), 0.0)
        kept = tl.exp(shift)
        moment = kept * (moment + tl.where(total > 0, shift * total, 0.0))
        moment += tl.sum(weight * tl.where(seen, s - higher[:, None], 0.0), 1)
        total = total * kept + tl.sum(weight, 1)
        top = higher
    some = total > 0
    safe = tl.where(some, total, 1.0)
    tl.store(out_top + out, top, mask=real)
    tl.store(out_lse + out, tl.where(some, top + tl.log(safe), -1e30), mask=real)
    tl.store(out_entropy + out, tl.where(some, tl.log(safe) - moment / safe, 0.0), mask=real)


@triton.jit
def _keys(  # type: ignore[no-untyped-def]
    query, key, low, high, leading, bounds,
    qb, qh, qt, qd, kb, kh, kt, kd,
    full, out_mass,
    n_heads, group, n_queries, n_keys, width, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys of one query head: sum_i exp(s[i, j] - full[i]) without first keys."""
    batch, head = tl.program_id(1) // n_heads, tl.program_id(1) % n_heads
    start = tl.program_id(0) * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    feature = tl.arange(0, WIDTH)
    real = column < n_keys
    of_query = query + batch.to(tl.int64) * qb + head.to(tl.int64) * qh
    of_key = key + batch.to(tl.int64) * kb + (head // group).to(tl.int64) * kh
    there = of_key + column[:, None] * kt + feature[None, :] * kd
    k = tl.load(there, mask=real[:, None] & (feature < width)[None, :], other=0.0)
    mass = tl.zeros([COLUMNS], tl.float32)
    blocks = (n_queries + ROWS - 1) // ROWS
    for block in range(blocks):
        ends = bounds + (batch * blocks + block) * 2
        if (tl.load(ends) < start + COLUMNS) & (tl.load(ends + 1) > start):
            row = block * ROWS + tl.arange(0, ROWS)
            own = row < n_queries
            inside = own[:, None] & (feature < width)[None, :]
            q = tl.load(
                of_query + row[:, None] * qt + feature[None, :] * qd, mask=inside, other=0.0
            )
            at = batch * n_queries + row
            begin = tl.load(low + at, mask=own, other=0)
            end = tl.load(high + at, mask=own, other=0)
            first = tl.load(leading + at * 4, mask=own, other=-1)
            norm = tl.load(
                full + tl.program_id(1).to(tl.int64) * n_queries + row, mask=own, other=1e30
            )
            s = _products(q, k, UPCAST) * scale
            seen = (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
            seen = seen & (column[None, :] != first[:, None])
            mass += tl.sum(tl.where(seen, tl.exp(s - norm[:, None]), 0.0), 0)
    tl.store(out_mass + tl.program_id(1).to(tl.int64) * n_keys + column, mass, mask=real)
