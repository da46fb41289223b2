"""Exact softmax statistics under any mask, one block of queries at a time.

A block of logits is reduced to sums while it lies in the cache, and dropped: memory is linear in
the length. Beside the product of queries and keys some passes are made over it: the largest logit,
the softmax, its largest share and its sum, sum_j A[i, j] s[i, j], and sum_i A[i, j]. The first key
is left out of the block and put back in closed form (`attnprobe.engine.stats.close_row`), so that
no digit is lost where it takes nearly all of a row.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from attnprobe.engine.plan import Block, Task, length, tasks
from attnprobe.engine.products import exact, logits
from attnprobe.engine.stats import NEVER
from attnprobe.engine.sums import Sums

WORTH_THREADS = 1 << 20  # pairs of a call, below which threads cost more than they save


def reduce(sums: Sums) -> None:
    """Fills in the sums, a block of logits at a time."""
    call = sums.call
    planned = deque(tasks(call, sums.coverage, sums.dtype))
    threads = min(torch.get_num_threads(), len(planned))
    if call.query.device.type != "cpu" or int(sums.coverage.seen.sum()) < WORTH_THREADS:
        threads = 1
    with exact():
        if threads > 1:
            _in_threads(planned, sums, threads)
        else:
            _work(planned, sums)


def _work(planned: deque[Task], sums: Sums) -> None:
    """Takes tasks until none is left."""
    scratch = sums.leading.new_empty(2, 0)  # fresh memory for every block would cost a third more
    while True:
        try:
            task = planned.popleft()
        except IndexError:
            return
        scratch = _add(sums, task, scratch)


def _in_threads(planned: deque[Task], sums: Sums, threads: int) -> None:
    """One core a thread: a block stays in the cache of the core that made it."""
    is_inference = torch.is_inference_mode_enabled()
    before = torch.get_num_threads()

    def alone(_: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(is_inference), torch.no_grad():
            _work(planned, sums)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(alone, range(threads)))
    finally:
        torch.set_num_threads(before)


def _add(sums: Sums, task: Task, scratch: Tensor) -> Tensor:
    """Reduces the blocks of a task; tasks may run at once, for none adds to another's sums.

    Args:
        task: from `attnprobe.engine.plan`.
        scratch: (2, n) memory to work in; returned, or what had to take its place.
    """
    query = sums.call.query[task.batch, task.heads]  # (b, H', Tq, d)
    key = sums.call.key[task.batch, task.key_heads].to(sums.dtype).contiguous()
    for block in task.blocks:
        shape = *query.shape[:2], length(block.rows), length(block.keys)
        size = math.prod(shape)
        if scratch.shape[1] < size:
            scratch = scratch.new_empty(2, size)
        values, weights = (part[:size].view(shape) for part in scratch)  # (b, H', r, c)
        scaled = query[:, :, block.rows].to(sums.dtype) * sums.call.scale
        _fill(sums, values, scaled, key[:, :, block.keys], task, block)
        _reduce(sums, values, weights, task, block)
    return scratch


def _fill(sums: Sums, out: Tensor, query: Tensor, key: Tensor, task: Task, block: Block) -> None:
    """Writes the logits as the softmax sees them, NEVER where a key is hidden.

    Args:
        out: (b, H', r, c).  query: (b, H', r, d), scaled.  key: (b, K', c, d).
    """
    call, (n_batch, n_key_heads, n_keys, width) = sums.call, key.shape
    if call.is_matrix:  # the logits are all in the mask
        out.zero_()
    else:  # heads of a group share its keys
        grouped = query.reshape(n_batch * n_key_heads, -1, width)
        logits(grouped, key.flatten(0, 1), out.view(*grouped.shape[:2], n_keys))
    if call.softcap is not None:
        out.div_(call.softcap).tanh_().mul_(call.softcap)
    at = (block.rows, block.keys, task.batch, task.heads)
    bias = call.mask.bias(*at)
    if bias is not None:
        out.add_(bias.to(sums.dtype))
    if block.hidden is None:
        visible = call.mask.visible(*at)
        if visible is not None:
            out.masked_fill_(~visible, NEVER)
        return
    for columns, where in block.hidden:
        out[..., columns].masked_fill_(where, NEVER)


def _reduce(sums: Sums, values: Tensor, weights: Tensor, task: Task, block: Block) -> None:
    """Adds up a block of logits, which are lost; `weights` is memory of the same size."""
    at = (task.batch, task.heads, block.rows)
    own = task.heads if sums.coverage.sees.shape[1] > 1 else slice(None)  # of their masks
    rest = [] if sums.sinks is None else [sums.sinks[at]]  # (b, H', r) not in the block
    if block.leading is not None:
        sums.leading[at] = _take_out(values, block.leading, block.unseen[:, own])
        rest.append(sums.leading[at][..., 0])
    top = values.amax(-1)  # (b, H', r)
    if sums.has_entropy:
        values.sub_(top[..., None])  # so that large logits do not drown small entropies
    torch.softmax(values, -1, out=weights)
    total = weights.sum(-1)  # 1 but for rounding
    largest = (weights.amax(-1) / total).log_()
    lse = top - largest
    full = lse
    for logit in rest:
        full = torch.logaddexp(full, logit)
    share = (lse - full).exp_().mul_(block.counts[:, own]).div_(total)
    mass = sums.mass[task.batch, task.heads, block.keys]  # a view
    mass += (share[..., None, :] @ weights)[..., 0, :]
    sums.other_top[at] = top
    sums.other_lse[at] = lse
    if sums.has_entropy:
        sums.other_entropy[at] = -largest - values.mul_(weights).sum(-1).div_(total)


def _take_out(values: Tensor, leading: Tensor, unseen: Tensor) -> Tensor:
    """(b, H', r, 4) logits of the first keys; the very first is not in the block from now on.

    Args:
        values: (b, H', r, c) the block.
        leading: (b, 1, r, 4) where the keys are, anywhere for those not seen.
        unseen: (b, h, r, 4) which are not.
    """
    index = leading.expand(-1, values.shape[1], -1, -1)
    there = values.gather(-1, index)
    found = there.masked_fill(unseen, NEVER)
    left = there[..., :1].masked_fill_(~unseen[..., :1], NEVER)  # what stays in its place
    values.scatter_(-1, index[..., :1], left)
    return found
