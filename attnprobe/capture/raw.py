"""An attention call as a tap reports it, before anything around it is known."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnprobe.capture.masks import Mask


@dataclass(frozen=True, eq=False)
class RawCall:
    """An attention call as its function was given it; shapes as in AttentionCall.

    Attributes:
        weight: W_O, where the call itself holds it.
        learned_keys: how many of the last keys stand for no token: parameters, or summaries
        is_matrix: the model wrote its n × n matrix out. Query and key are then of width 0, and the
            mask's dense part holds the logits as the softmax was given them.
        documents: (B, T) which piece every token belongs to, where they came one by one.
        problem: why its figures could not be trusted.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    mask: Mask
    softcap: float | None = None
    sinks: Tensor | None = None
    weight: Tensor | None = None
    learned_keys: int = 0
    is_matrix: bool = False
    documents: Tensor | None = None
    problem: str | None = None
