"""Rows and heads that hand-written code folds into each other, taken apart again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from attnprobe.capture.documents import Documents
from attnprobe.capture.projection import same_as
from attnprobe.capture.raw import RawCall


def unfolded(raw: RawCall, samples: int | None, text: Documents | None) -> RawCall:
    """Undoes B·H rows with one head each, or one row of B·H heads.

    Args:
        raw: the call.
        samples: B, None where that is not known.
        text: the documents of the tokens, None where the model reads none.
    """
    rows, heads = raw.query.shape[:2]
    batch = samples or rows
    if raw.documents is not None or rows == batch:
        return raw
    is_text = text is not None and text.ids.shape[1] == raw.query.shape[2]
    if is_text and heads == batch == raw.key.shape[1]:  # (H, B, T, d)
        return relaid(raw, lambda x: x.transpose(0, 1))
    if rows * heads % batch or 1 not in (rows, heads):
        return raw
    if heads != 1 and (raw.key.shape[1] % batch or raw.mask.heads not in (1, heads)):
        return raw

    def apart(x: Tensor) -> Tensor:
        return x.reshape(batch, x.shape[0] * x.shape[1] // batch, *x.shape[2:])

    return relaid(raw, apart)


def ordered(raw: RawCall, consumed: Tensor) -> RawCall:
    """The call with its rows and heads as H·B instead of B·H, if that is what W_O was given."""
    if same_as(consumed, raw.output):
        return raw
    batch, heads = raw.query.shape[:2]
    if raw.key.shape[1] != heads:
        return raw

    def other(x: Tensor) -> Tensor:
        return x.flatten(0, 1).unflatten(0, (heads, batch)).transpose(0, 1)

    if not same_as(consumed, other(raw.output)):
        return raw
    return relaid(raw, other)


def relaid(raw: RawCall, arrange: Callable[[Tensor], Tensor]) -> RawCall:
    """A call with its rows and heads (B', H', …) arranged in another way."""
    shape, mask, sinks = raw.query.shape[:2], raw.mask, raw.sinks
    if mask.dense is not None and mask.dense.shape[:2] != (1, 1):
        mask = replace(mask, dense=arrange(mask.dense.expand(*shape, -1, -1)))
    if sinks is not None and sinks.shape[:2] == shape:
        sinks = arrange(sinks)
    query, key, value, output = map(arrange, (raw.query, raw.key, raw.value, raw.output))
    return replace(raw, query=query, key=key, value=value, output=output, mask=mask, sinks=sinks)
