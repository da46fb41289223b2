"""Attention over pieces of a sequence, handed over one by one: images, windows, packed documents.

Vision towers split their queries, keys and values and call attention for every piece. The pieces
of one module are one call over packed documents; two calls over the same tokens are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnprobe.capture.masks import Mask
from attnprobe.capture.raw import RawCall


def follows(last: RawCall, raw: RawCall) -> bool:
    """Whether a call reads the piece behind that of the last one, of the very same tensors."""
    return all(is_behind(*pair) for pair in _pairs(last, raw)) and _are_whole(last, raw)


def is_next(last: RawCall, raw: RawCall) -> bool:
    """Whether a call reads what lies next in memory, of the very same tensors and as much of it.

    So do heads and samples that are attended to one by one.
    """
    return (
        last.query.shape == raw.query.shape
        and last.value.shape == raw.value.shape
        and all(_is_next(*pair) for pair in _pairs(last, raw) if pair[0].shape[-1])
    )


def _pairs(last: RawCall, raw: RawCall) -> list[tuple[Tensor, Tensor]]:
    return [(getattr(last, name), getattr(raw, name)) for name in ("query", "key", "value")]


def is_behind(before: Tensor, after: Tensor) -> bool:
    """(B, H, T, d) views of one tensor, the second of the tokens right behind the first's."""
    behind = before.storage_offset() + before.shape[2] * before.stride(2)
    return _are_of_one(before, after) and behind == after.storage_offset()


def _is_next(before: Tensor, after: Tensor) -> bool:
    """(R, H, T, d) views of one tensor, the second of the rows, tokens or features next to it."""
    sizes = [before.shape[dim] * before.stride(dim) for dim in (0, 2, 3)]
    step = after.storage_offset() - before.storage_offset()
    return _are_of_one(before, after) and step in sizes


def _are_of_one(before: Tensor, after: Tensor) -> bool:
    one = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return one and before.stride() == after.stride()


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


def arrangements(calls: Sequence[RawCall], batch: int) -> list[RawCall]:
    """What pieces of a text of B samples, (R, K, T, d) each, can be as one call of (B, H, T, d)."""
    rows, heads = calls[0].query.shape[:2]
    ways: list[Callable[[Sequence[Tensor]], Tensor]] = []
    if len(calls) * rows == batch:
        ways.append(lambda parts: torch.cat(list(parts), 0))  # samples
    if heads == 1 and len(calls) == batch and rows > 1:
        ways.append(lambda parts: torch.cat(list(parts), 1).transpose(0, 1))  # whose rows are heads
    if rows == batch:
        ways.append(lambda parts: torch.cat(list(parts), 1))  # heads
    return [call for way in ways if (call := _arranged(calls, way)) is not None]


def _arranged(
    calls: Sequence[RawCall], way: Callable[[Sequence[Tensor]], Tensor]
) -> RawCall | None:
    first = calls[0]
    query, key, value, output = (
        way([getattr(call, name) for call in calls]) for name in ("query", "key", "value", "output")
    )
    masks = [call.mask for call in calls]
    dense = [mask.dense for mask in masks if mask.dense is not None]
    mask = replace(first.mask, dense=None)
    others = (call.sinks is not None or call.problem for call in calls)
    parts = (mask.key_padding, mask.documents, mask.rule)
    if any(others) or any(part is not None for part in parts) or len(dense) not in (0, len(calls)):
        return None
    if len({(m.causal, m.offset, m.window, m.ahead) for m in masks}) > 1:
        return None
    if len({(call.scale, call.softcap) for call in calls}) > 1:
        return None
    if dense:
        shape = first.query.shape[:2]
        mask = replace(mask, dense=way([own.expand(*shape, -1, -1) for own in dense]))
    return replace(first, query=query, key=key, value=value, output=output, mask=mask)
