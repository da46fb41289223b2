"""The gate: a value computed from the hidden state that scales (or shifts) attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe.models.config import GateConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "identity": lambda x: x,
    "half-sigmoid": lambda x: 0.5 + 0.5 * torch.sigmoid(x),
}


class Gate(nn.Module):
    """`g = activation(hidden @ W)`, or `activation(scalar)` per head when input-independent.

    `forward` returns the value after its activation, the one that multiplies or is added, always
    broadcastable to what it gates:

        element            (B, T, H, D)
        head               (B, T, H, 1)
        head-shared        (B, T, 1, D)
        input-independent  (1, 1, H, 1)

    H and D are those of what is gated: at G2 and G3 the key–value heads, at G5 one head as wide as
    the model, whose axis is dropped: (B, T, d_model), (B, T, 1) or (1, 1, 1).

    Source: Qiu et al. 2025, "Gated Attention for Large Language Models", section 2.2.
    """

    def __init__(
        self, config: GateConfig, d_model: int, n_heads: int, head_dim: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.shape = {
            "element": (n_heads, head_dim),
            "head": (n_heads, 1),
            "head-shared": (1, head_dim),
        }[config.granularity]
        self.activation = ACTIVATIONS[config.activation]
        if config.source == "input-independent":
            self.scalar = nn.Parameter(torch.zeros(n_heads))
        else:
            self.projection = nn.Linear(d_model, self.shape[0] * self.shape[1], bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The gate of every token of `hidden` (B, T, d_model)."""
        if self.config.source == "input-independent":
            logits = self.scalar[None, None, :, None]  # (1, 1, H, 1)
        else:
            logits = self.projection(hidden).unflatten(-1, self.shape)  # (B, T, H|1, D|1)
        if self.config.position == "G5":
            logits = logits.squeeze(2)
        return self.activation(logits)

    def combine(self, value: Tensor, gate: Tensor) -> Tensor:
        """`value` with the `gate` of it applied."""
        return value * gate if self.config.mode == "multiplicative" else value + gate
