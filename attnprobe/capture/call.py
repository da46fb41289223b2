"""One softmax-attention call of a forward pass, as the engine and the metrics are handed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask


@dataclass(unsafe_hash=True)
class Site:
    """Where in the model a call was made; its path tells it from others.

    Attributes:
        path: the module's path, with `#n` behind it for the n-th further call in one pass.
        stack: decoder, encoder, vision, …; "decoder 2" for a second one in the same blocks.
        kind: self or cross.
        layer: the model's own number of the layer in that stack.
        causal: no query of any batch so far sees a key after its own position.
    """

    path: str
    stack: str = field(compare=False)
    kind: str = field(compare=False)
    layer: int = field(compare=False)
    causal: bool = field(default=True, compare=False)

    @property
    def base(self) -> str:
        """The stack, of a second one in the same blocks too."""
        return self.stack.partition(" ")[0]


@dataclass(frozen=True, eq=False)
class Projection:
    """The linear map W_O that consumes the attention output.

    Attributes:
        weight: (d_model, H·d_v), a bias left out.
        heads: H.
    """

    weight: Tensor
    heads: int

    @cached_property
    def is_finite(self) -> bool:
        """Whether the weight is made of numbers."""
        return bool(self.weight.isfinite().all())

    @cached_property
    def by_head(self) -> Tensor:
        """(H, d_model, d_v) float64."""
        d_model, width = self.weight.shape
        return self.weight.double().view(d_model, self.heads, width // self.heads).transpose(0, 1)

    @cached_property
    def factors(self) -> Tensor:
        """(H, r, d_v) float64 R of the QR of every head's part; ‖z·W_Oʰ‖ = ‖R z‖."""
        return torch.linalg.qr(self.by_head, mode="r").R


@dataclass(frozen=True, eq=False)
class Gate:
    """What an attention gate multiplied (or added) in one call.

    Attributes:
        values: after the activation; broadcastable to (B, T, H, d), or (B, T, d_model) at G5.
        position: G1 after attention, G2 value, G3 key, G4 query, G5 after W_O.
        granularity: element, head or head-shared.
        source: query (computed from the hidden state) or input-independent.
        activation: its name, sigmoid where it was read by comparison and lies in [0, 1].
        mode: multiplicative or additive.
    """

    values: Tensor
    position: str
    granularity: str
    source: str
    activation: str
    mode: str = "multiplicative"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """q, k, v and everything that shaped the softmax, of B rows and H query heads.

    Attributes:
        query: (B, H, Tq, d).  key: (B, K, Tk, d), K divides H.  value: (B, K, Tk, d_v).
        output: (B, H, Tq, d_v), the model's own result of this call.
        scale: what q·k is multiplied by.
        softcap: c in c·tanh(s / c), applied before mask and bias.
        sinks: learned sink logits broadcastable to (B, H, Tq).
        queries, keys: the documents of both sides; one object in self-attention.
        consumed: (B, Tq, H, d_v), what W_O was given, so after a gate at G1; None if not found.
        is_matrix: the model wrote its n × n matrix out; query and key are of width 0 and the
            mask's dense part holds the logits.
        reasons: why projection or gate are None, by metric name; "all" where nothing can be told.
    """

    site: Site
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    mask: Mask
    queries: Documents
    keys: Documents
    softcap: float | None = None
    sinks: Tensor | None = None
    projection: Projection | None = None
    consumed: Tensor | None = None
    gate: Gate | None = None
    is_matrix: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.query.shape[1]
