"""Calls whose documents do not begin at the left edge, rewritten as calls whose do.

The fused engine leaves out the leftmost key. Left padding is rolled to the right end of its row,
packed documents are taken one by one; what comes out is put back where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall
from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask
from attnprobe.engine.stats import AttentionStats

Measure = Callable[[AttentionCall], AttentionStats]


def starts_left(call: AttentionCall) -> bool:
    """Whether the first key of every valid query's document is the leftmost of its row."""
    leading = call.keys.leading_for(call.queries)[..., 0]
    return bool((leading[call.queries.valid] == 0).all())


def one_a_row(documents: Documents) -> bool:
    """Whether every row holds exactly one document, in one piece."""
    rows = documents.ids.shape[0]
    return len(documents) == rows == len(documents.names[:, 0].unique()) and in_pieces(documents)


def in_pieces(documents: Documents) -> bool:
    """Whether the tokens of every document stand together."""
    first = documents.leading[documents.index, 0]  # (B, T)
    column = torch.arange(documents.ids.shape[1], device=documents.ids.device)
    return bool((documents.position == column - first)[documents.valid].all())


def rolled(call: AttentionCall, measure: Measure) -> AttentionStats:
    """Measures self-attention over one document a row, each moved to the left edge."""
    length = call.mask.n_keys
    column = torch.arange(length, device=call.query.device)
    start = call.keys.leading[:, :1]  # (B, 1): one document a row, rows in order
    there, back = (column + start) % length, (column - start) % length  # (B, T)
    documents = Documents(call.keys.ids.gather(1, there))
    moved = replace(
        call,
        query=_gathered(call.query, there),
        key=_gathered(call.key, there),
        mask=replace(call.mask, key_padding=documents.valid),
        queries=documents,
        keys=documents,
        sinks=call.sinks if call.sinks is None else _rolled_sinks(call, there),
    )
    stats = measure(moved)
    return _each(stats, lambda x: x.gather(2, back[:, None].expand(-1, x.shape[1], -1)))


def _gathered(x: Tensor, columns: Tensor) -> Tensor:
    """(B, H, T, d) with the tokens of every row in another order."""
    return x.gather(2, columns[:, None, :, None].expand_as(x))


def _rolled_sinks(call: AttentionCall, columns: Tensor) -> Tensor:
    assert call.sinks is not None
    sinks = call.sinks.expand(*call.query.shape[:3])
    return sinks.gather(2, columns[:, None].expand_as(sinks))


def unpacked(call: AttentionCall, measure: Measure) -> AttentionStats:
    """Measures packed documents one by one; a query sees keys of its own document only."""
    shape = call.keys.ids.shape
    whole: AttentionStats | None = None
    for row, start, stop in _pieces(call.keys):
        rows, span = slice(row, row + 1), slice(start, stop)
        documents = Documents(call.keys.ids[rows, span])
        sinks = call.sinks
        part = replace(
            call,
            query=call.query[rows, :, span],
            key=call.key[rows, :, span],
            mask=Mask(stop - start, stop - start, causal=call.mask.causal, device=call.mask.device),
            queries=documents,
            keys=documents,
            sinks=None if sinks is None else sinks.expand(*call.query.shape[:3])[rows, :, span],
        )
        stats = replace(measure(part), max_logit=None, engine="fused")
        if whole is None:
            whole = _each(stats, lambda x: x.new_zeros(shape[0], x.shape[1], shape[1]))
        for field in _tensors(stats):
            getattr(whole, field)[rows, :, span] = getattr(stats, field)
    assert whole is not None
    return whole


def _pieces(documents: Documents) -> list[tuple[int, int, int]]:
    """Row, first token and the token behind the last of every document."""
    starts, lengths = documents.leading[:, 0].tolist(), documents.lengths.tolist()
    rows = documents.names[:, 0].tolist()
    return [(row, a, a + n) for row, a, n in zip(rows, starts, lengths, strict=True)]


def _tensors(stats: AttentionStats) -> list[str]:
    return [f.name for f in fields(stats) if isinstance(getattr(stats, f.name), Tensor)]


def _each(stats: AttentionStats, change: Callable[[Tensor], Tensor]) -> AttentionStats:
    changed: dict[str, Any] = {name: change(getattr(stats, name)) for name in _tensors(stats)}
    return replace(stats, **changed)
