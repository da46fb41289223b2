"""Multi-head attention, over its own tokens or over another sequence, with an optional gate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe.models.config import ModelConfig
from attnprobe.models.gate import Gate
from attnprobe.models.layout import Layout
from attnprobe.models.positions import rotate


class Attention(nn.Module):
    """Self or cross attention with `n_heads` query heads in groups over `n_kv_heads`.

    The gate, where the config has one, is the child `gate`. It is computed from the module's own
    input: from the queries' side at G1, G4 and G5, from the keys' side at G2 and G3. Keys and
    queries are gated before they are rotated. Cross attention is never rotated: positions in two
    sequences have no common origin.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        q_width = config.n_heads * config.head_dim
        kv_width = config.n_kv_heads * config.head_dim
        self.query = nn.Linear(config.d_model, q_width, bias=config.bias)
        self.key = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.value = nn.Linear(config.d_model, kv_width, bias=config.bias)
        self.output = nn.Linear(q_width, config.d_model, bias=config.bias)
        self.gate = _gate(config)

    def forward(self, x: Tensor, layout: Layout, memory: Tensor | None = None) -> Tensor:
        """Attends from `x` (B, Tq, d_model) to `memory` (B, Tk, d_model), or to `x` itself.

        `layout` is that of the keys: which may be seen, and, for self attention, the positions.
        """
        config, source = self.config, x if memory is None else memory
        q = self.query(x).unflatten(-1, (config.n_heads, config.head_dim))  # (B, Tq, H, D)
        k = self.key(source).unflatten(-1, (config.n_kv_heads, config.head_dim))  # (B, Tk, G, D)
        v = self.value(source).unflatten(-1, (config.n_kv_heads, config.head_dim))
        q = self._gated("G4", q, x)
        k = self._gated("G3", k, source)
        v = self._gated("G2", v, source)
        if config.positions == "rotary" and memory is None:
            q, k = rotate(q, layout.positions), rotate(k, layout.positions)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=layout.mask,
            dropout_p=config.dropout if self.training else 0.0,
            is_causal=layout.is_causal,
            enable_gqa=config.n_kv_heads != config.n_heads,
        ).transpose(1, 2)  # (B, Tq, H, D)
        mixed = self._gated("G1", mixed, x)
        return self._gated("G5", self.output(mixed.flatten(-2)), x)

    def _gated(self, position: str, value: Tensor, hidden: Tensor) -> Tensor:
        if self.gate is None or self.gate.config.position != position:
            return value
        return self.gate.combine(value, self.gate(hidden))


def _gate(config: ModelConfig) -> Gate | None:
    position = config.gate.position
    if position == "none":
        return None
    heads, width = config.n_heads, config.head_dim
    if position in ("G2", "G3"):
        heads = config.n_kv_heads
    elif position == "G5":
        heads, width = 1, config.d_model
    return Gate(config.gate, config.d_model, heads, width, bias=config.bias)
