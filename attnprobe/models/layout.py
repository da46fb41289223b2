"""Which keys a query may see and at which position each token stands.

No tensor of queries × keys is made unless padding, packing or a window asks for one: a plain
causal call carries the flag alone, and a bidirectional one at most a mask over keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.errors import InputError


@dataclass(frozen=True)
class Layout:
    """The arrangement of one batch of tokens.

    Attributes:
        positions: (1 or B, T), counted from the first token of each document.
        mask: boolean, True where a key may be seen, broadcastable to (B, H, Tq, Tk); or None.
        is_causal: the plain causal rule, in place of a mask.
    """

    positions: Tensor
    mask: Tensor | None
    is_causal: bool


def bidirectional(tokens: Tensor, attention_mask: Tensor | None = None) -> Layout:
    """Every token sees every real token of its sample; `tokens` (B, T), mask 1 where real."""
    real = _real(tokens, attention_mask)
    mask = None if real is None else real[:, None, None, :]  # (B, 1, 1, Tk)
    return Layout(_positions(tokens, real), mask, is_causal=False)


def causal(
    tokens: Tensor,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    window: int | None = None,
) -> Layout:
    """Every token sees itself and those before it in its own document, `window` at most.

    Args:
        tokens: (B, T).
        attention_mask: (B, T), 1 where real; padding forms a document of its own, so that no
            row of attention is empty and none that is real sees it.
        document_ids: (B, T), the same number for the neighbouring tokens of one document.
        window: keys a query sees, itself included.
    """
    segments = _segments(tokens, attention_mask, document_ids)
    length = tokens.shape[1]
    window = length if window is None else window
    if segments is None and window >= length:
        return Layout(_positions(tokens, None), None, is_causal=True)
    index = torch.arange(length, device=tokens.device)
    distance = index[:, None] - index[None, :]  # (Tq, Tk)
    visible = distance >= 0
    if window < length:
        visible &= distance < window
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])  # (B, Tq, Tk)
        visible = visible[:, None]
    return Layout(_positions(tokens, segments), visible, is_causal=False)


def _real(tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """The mask as booleans, or None where it hides nothing."""
    if attention_mask is None:
        return None
    if attention_mask.shape != tokens.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, "
            f"the tokens {tuple(tokens.shape)}; they must agree"
        )
    real = attention_mask.to(torch.bool)
    return None if bool(real.all()) else real


def _segments(
    tokens: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None
) -> Tensor | None:
    """A number per token (B, T) that tells documents and padding apart, or None where all agree."""
    real = _real(tokens, attention_mask)
    if document_ids is None:
        return None if real is None else real.long()
    if document_ids.shape != tokens.shape:
        raise InputError(
            f"document_ids have shape {tuple(document_ids.shape)}, "
            f"the tokens {tuple(tokens.shape)}; they must agree"
        )
    segments = document_ids.long()
    if real is not None:
        segments = torch.where(real, segments, segments.amin() - 1)
    return None if bool((segments == segments[:, :1]).all()) else segments


def _positions(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """Distance of each token to the start of the run of equal `segments` it stands in."""
    index = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, T)
    if segments is None:
        return index
    starts = torch.zeros_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - (index * starts).cummax(dim=1).values  # (B, T)
