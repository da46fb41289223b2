"""How a call is reduced: by kernels of our own where they prove right, else by blocks of logits."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from attnprobe.capture.call import AttentionCall, Site
from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask
from attnprobe.engine.blocks import reduce
from attnprobe.engine.coverage import cover
from attnprobe.engine.stats import AttentionStats
from attnprobe.engine.sums import Sums


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
