"""Attention over pieces of a sequence, handed over one by one: images, windows, packed documents.

Vision towers split their queries, keys and values and call attention for every piece. The pieces
of one module are one call over packed documents; two calls over the same tokens are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnprobe.capture.masks import Mask
from attnprobe.capture.raw import RawCall


def follows(last: RawCall, raw: RawCall) -> bool:
    """Whether a call reads the piece behind that of the last one, of the very same tensors."""
    return all(
        is_behind(before, after)
        for before, after in ((last.query, raw.query), (last.key, raw.key), (last.value, raw.value))
    ) and _are_whole(last, raw)


def is_behind(before: Tensor, after: Tensor) -> bool:
    """(B, H, T, d) views of one tensor, the second of the tokens right behind the first's."""
    one = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    behind = before.storage_offset() + before.shape[2] * before.stride(2)
    return one and before.stride() == after.stride() and behind == after.storage_offset()


def _are_whole(*calls: RawCall) -> bool:
    """Whether every query of the pieces sees all keys of its piece, or all up to its own."""
    for call in calls:
        mask = call.mask
        parts = (mask.window, mask.ahead, mask.key_padding, mask.documents, mask.dense, mask.rule)
        is_square = mask.n_queries == mask.n_keys and mask.offset == 0
        if any(part is not None for part in parts) or not is_square or call.sinks is not None:
            return False
    return len({(call.mask.causal, call.scale, call.softcap) for call in calls}) == 1


def joined(calls: Sequence[RawCall]) -> RawCall:
    """Pieces that follow each other as one call over packed documents."""
    first = calls[0]
    if len(calls) == 1:
        return first
    query, key, value, output = (
        torch.cat([getattr(call, name) for call in calls], 2)
        for name in ("query", "key", "value", "output")
    )
    batch, _, length, _ = query.shape
    sizes = torch.tensor([call.query.shape[2] for call in calls], device=query.device)
    ids = torch.repeat_interleave(sizes).expand(batch, length)
    mask = Mask(
        length,
        length,
        causal=first.mask.causal,
        documents=(ids, ids),
        device=query.device,
    )
    return replace(
        first, query=query, key=key, value=value, output=output, mask=mask, documents=ids
    )


def stacked(calls: Sequence[RawCall]) -> RawCall:
    """The samples of a text, each (H, 1, T, d), as one call of (B, H, T, d)."""
    query, key, value, output = (
        torch.cat([getattr(call, name) for call in calls], 1).transpose(0, 1)
        for name in ("query", "key", "value", "output")
    )
    return replace(calls[0], query=query, key=key, value=value, output=output)
