"""Exact softmax statistics under any mask, one block of queries at a time.

A block of logits is reduced to sums while it lies in the cache, and dropped: memory is linear in
the length. Beside the product of queries and keys six passes are made over it: the largest logit,
the softmax, its largest share and its sum, sum_j A[i, j] s[i, j], and sum_i A[i, j]. The first key
is left out of the block and put back in closed form (`attnprobe.engine.stats.close_row`), so that
no digit is lost where it takes nearly all of a row.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall, Site
from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask
from attnprobe.engine.coverage import Coverage, cover
from attnprobe.engine.plan import Block, Task, length, tasks
from attnprobe.engine.products import exact, logits
from attnprobe.engine.stats import NEVER, AttentionStats, close_row

WORTH_THREADS = 1 << 20  # pairs of a call, below which threads cost more than they save


def measure(call: AttentionCall, *, entropy: bool = True) -> AttentionStats:
    """Reduces one call; half precision is upcast to float32, float64 stays.

    Args:
        call: what was captured.
        entropy: whether entropies are wanted, which cost a pass over every block.
    """
    sums = Sums(call, cover(call), entropy=entropy)
    kernels = kernels_for(call.query.device, call.query.dtype, call.query.shape[-1])
    if kernels is not None and kernels.supports(sums):
        kernels.fill(sums)
        return sums.stats("triton")
    reduce(sums)
    return sums.stats("matrix" if call.is_matrix else "blocks")


@cache
def kernels_for(device: torch.device, dtype: torch.dtype, width: int) -> ModuleType | None:
    """The kernels of our own for a CUDA device, if they are there and agree with the blocks.

    Args:
        device, dtype, width: of queries and keys, for which a kernel is compiled of its own.
    """
    if device.type != "cuda":
        return None
    try:
        from attnprobe.engine import triton_kernels
    except ImportError:
        return None
    return triton_kernels if agree(triton_kernels, device, dtype, width) else None


def agree(kernels: Any, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether kernels take a small call of grouped heads, and fill in what the blocks do."""
    tokens = 150
    rows = torch.arange(3.0 * tokens * width, device=device).sin().view(1, 3, tokens, width)
    rows = rows.to(dtype)
    documents = Documents.whole(1, tokens, device)
    call = AttentionCall(
        Site("", "decoder", "self", 0),
        *(rows[:, :2], rows[:, 2:], rows[:, 2:], rows[:, :2]),
        scale=0.5,
        mask=Mask(tokens, tokens, causal=True, device=device),
        queries=documents,
        keys=documents,
    )
    ours, theirs = (Sums(call, cover(call)) for _ in range(2))
    if not kernels.supports(theirs):
        return False
    reduce(ours)
    try:
        kernels.fill(theirs)
    except Exception:  # whatever keeps a compiler from it
        return False
    want, found = ours.stats(""), theirs.stats("")
    return all(
        torch.allclose(getattr(want, name), getattr(found, name), rtol=1e-4, atol=1e-4)
        for name in ("first4", "lse", "entropy_nosink", "mass", "max_logit")
    )


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
        scratch = sums.add(task, scratch)


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


class Sums:
    """The outputs while they fill up; `other` is the row without the document's first key."""

    def __init__(self, call: AttentionCall, coverage: Coverage, *, entropy: bool = True) -> None:
        rows = call.query.shape[:3]  # (B, H, Tq)
        self.call, self.coverage, self.has_entropy = call, coverage, entropy
        self.dtype = torch.promote_types(call.query.dtype, torch.float32)
        like = torch.empty(0, dtype=self.dtype, device=call.query.device)
        self.leading = like.new_full((*rows, coverage.leading.shape[-1]), NEVER)  # logits
        self.other_top = like.new_full(rows, NEVER)
        self.other_lse = like.new_full(rows, NEVER)
        self.other_entropy = like.new_zeros(rows)
        self.mass = like.new_zeros(*rows[:2], call.key.shape[2])
        self.sinks = None if call.sinks is None else call.sinks.to(like).expand(rows)

    def add(self, task: Task, scratch: Tensor) -> Tensor:
        """Reduces the blocks of a task; tasks may run at once, for none adds to another's sums.

        Args:
            task: from `attnprobe.engine.plan`.
            scratch: (2, n) memory to work in; returned, or what had to take its place.
        """
        query = self.call.query[task.batch, task.heads]  # (b, H', Tq, d)
        key = self.call.key[task.batch, task.key_heads].to(self.dtype).contiguous()
        for block in task.blocks:
            shape = *query.shape[:2], length(block.rows), length(block.keys)
            size = math.prod(shape)
            if scratch.shape[1] < size:
                scratch = scratch.new_empty(2, size)
            values, weights = (part[:size].view(shape) for part in scratch)  # (b, H', r, c)
            scaled = query[:, :, block.rows].to(self.dtype) * self.call.scale
            self._fill(values, scaled, key[:, :, block.keys], task, block)
            self._reduce(values, weights, task, block)
        return scratch

    def _fill(self, out: Tensor, query: Tensor, key: Tensor, task: Task, block: Block) -> None:
        """Writes the logits as the softmax sees them, NEVER where a key is hidden.

        Args:
            out: (b, H', r, c).  query: (b, H', r, d), scaled.  key: (b, K', c, d).
        """
        call, (n_batch, n_key_heads, n_keys, width) = self.call, key.shape
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
            out.add_(bias.to(self.dtype))
        if block.hidden is None:
            visible = call.mask.visible(*at)
            if visible is not None:
                out.masked_fill_(~visible, NEVER)
            return
        for columns, where in block.hidden:
            out[..., columns].masked_fill_(where, NEVER)

    def _reduce(self, values: Tensor, weights: Tensor, task: Task, block: Block) -> None:
        """Adds up a block of logits, which are lost; `weights` is memory of the same size."""
        at = (task.batch, task.heads, block.rows)
        own = task.heads if self.coverage.sees.shape[1] > 1 else slice(None)  # of their masks
        rest = [] if self.sinks is None else [self.sinks[at]]  # (b, H', r) not in the block
        if block.leading is not None:
            self.leading[at] = self._take_out(values, block.leading, block.unseen[:, own])
            rest.append(self.leading[at][..., 0])
        top = values.amax(-1)  # (b, H', r)
        torch.softmax(values, -1, out=weights)
        total = weights.sum(-1)  # 1 but for rounding
        lse = top - (weights.amax(-1) / total).log_()
        full = lse
        for logit in rest:
            full = torch.logaddexp(full, logit)
        share = (lse - full).exp_().mul_(block.counts[:, own]).div_(total)
        mass = self.mass[task.batch, task.heads, block.keys]  # a view
        mass += (share[..., None, :] @ weights)[..., 0, :]
        self.other_top[at] = top
        self.other_lse[at] = lse
        if self.has_entropy:
            self.other_entropy[at] = lse - values.mul_(weights).sum(-1).div_(total)

    @staticmethod
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

    def stats(self, engine: str) -> AttentionStats:
        """Puts the first keys back."""
        coverage = self.coverage
        valid = coverage.visible > 0  # (B, h, Tq)
        first_logit = self.leading[..., 0]
        other_lse = self.other_lse.masked_fill_(~coverage.others, NEVER)
        other_entropy = self.other_entropy.clamp_min_(0).masked_fill_(~coverage.others, 0)
        lse, entropy = close_row(first_logit, other_lse, other_entropy)
        if not self.has_entropy:
            entropy = other_entropy = torch.full_like(entropy, torch.nan)
        full, null = lse, torch.zeros_like(lse)
        if self.sinks is not None:
            full = torch.logaddexp(lse, self.sinks)
            null = (self.sinks - full).exp()
        leading = (self.leading - full[..., None]).exp() * coverage.sees  # (B, H, Tq, 4)
        first = leading[..., 0]
        top = torch.maximum(self.other_top, first_logit)

        def kept(values: Tensor) -> Tensor:
            return values.masked_fill(~valid, 0)

        return AttentionStats(
            valid=valid,
            visible=coverage.visible,
            sees_first=coverage.sees[..., 0],
            first=first,
            first4=leading.sum(-1),
            null=kept(null),
            lse=kept(lse),
            entropy=kept(entropy) if self.has_entropy else entropy,
            entropy_nosink=other_entropy,
            mass=self.mass + self._first_mass(first),
            seen=coverage.seen,
            max_logit=top.masked_fill(~valid, -torch.inf).amax(-1),
            engine=engine,
        )

    def _first_mass(self, first: Tensor) -> Tensor:
        """(B, H, Tk) what the first keys get, which is in no block's sums."""
        wide = first if first.device.type == "mps" else first.double()
        at = self.coverage.leading[:, None, :, 0].clamp_min(0).expand_as(first)
        return wide.new_zeros(self.mass.shape).scatter_add_(2, at, wide).to(first.dtype)
