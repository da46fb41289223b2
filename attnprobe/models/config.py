"""What a model is, as plain values: everything that is needed to rebuild it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from attnprobe.errors import CheckpointError, InputError

_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "gate": {
        "position": ("none", "G1", "G2", "G3", "G4", "G5"),
        "granularity": ("element", "head", "head-shared"),
        "source": ("query", "input-independent"),
        "activation": ("sigmoid", "silu", "relu", "gelu", "identity", "half-sigmoid"),
        "mode": ("multiplicative", "additive"),
    },
    "model": {
        "architecture": ("decoder", "encoder-decoder"),
        "positions": ("rotary", "sinusoidal", "learned"),
        "norm": ("pre", "post"),
        "activation": ("relu", "gelu", "swiglu"),
    },
}


def _check_choices(config: GateConfig | ModelConfig, kind: str) -> None:
    for name, allowed in _CHOICES[kind].items():
        value = getattr(config, name)
        if value not in allowed:
            raise InputError(f"{kind} {name} is {value!r}; it must be one of {', '.join(allowed)}")


@dataclass(frozen=True)
class GateConfig:
    """Where a gate sits and what it does (Qiu et al. 2025, "Gated Attention for LLMs").

    Attributes:
        position: `none`, or G1 after attention, G2 on the values, G3 on the keys, G4 on the
            queries, G5 after the output projection.
        granularity: `element` one number per head and channel, `head` one per head,
            `head-shared` one per channel, the same for all heads. After the output projection
            (G5) the whole layer is one head.
        source: `query` computes the gate from the hidden state of the token it gates;
            `input-independent` learns one number per head, starting at 0, and is always `head`.
        activation: of the gate; `half-sigmoid` is `0.5 + 0.5·sigmoid(x)`, which cannot close.
        mode: `multiplicative` (y·g) or `additive` (y + g).
    """

    position: str = "none"
    granularity: str = "element"
    source: str = "query"
    activation: str = "sigmoid"
    mode: str = "multiplicative"

    def __post_init__(self) -> None:
        _check_choices(self, "gate")
        if self.source == "input-independent":
            object.__setattr__(self, "granularity", "head")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder language model or of the original encoder–decoder.

    `n_kv_heads`, `head_dim` and `d_ff` may be left out; they are filled in on creation (as many as
    heads, `d_model / n_heads`, and four times `d_model`, or 8/3 of it for SwiGLU). `max_length`
    bounds learned positions only. `window` is the number of keys a query sees, itself included.

    Raises:
        InputError: naming the field that is out of range.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    max_length: int
    architecture: str = "decoder"
    n_kv_heads: int = None  # type: ignore[assignment]  # an int once __post_init__ has run
    head_dim: int = None  # type: ignore[assignment]
    d_ff: int = None  # type: ignore[assignment]
    positions: str = "rotary"
    norm: str = "pre"
    activation: str = "gelu"
    bias: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    window: int | None = None
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        self._check_types()
        _check_choices(self, "model")
        self._derive()
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise InputError(f"rotary positions need an even head_dim, not {self.head_dim}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise InputError(f"sinusoidal positions need an even d_model, not {self.d_model}")

    def _check_types(self) -> None:
        required = ("vocab_size", "d_model", "n_layers", "n_heads", "max_length")
        for name in (*required, "n_kv_heads", "head_dim", "d_ff", "window"):
            value = getattr(self, name)
            if value is None and name not in required:
                continue
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}; it must be a whole number of at least 1")
        for name in ("bias", "tie_embeddings"):
            if type(getattr(self, name)) is not bool:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}; it must be in [0, 1)")
        if not isinstance(self.gate, GateConfig):
            raise InputError(f"gate is {self.gate!r}; it must be a GateConfig")

    def _derive(self) -> None:
        if self.n_kv_heads is None:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise InputError(
                    f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; "
                    "give head_dim"
                )
            object.__setattr__(self, "head_dim", self.d_model // self.n_heads)
        if self.d_ff is None:
            swiglu = -(-8 * self.d_model // 24) * 8  # 8/3 of the width, rounded up to 8s
            object.__setattr__(
                self, "d_ff", swiglu if self.activation == "swiglu" else 4 * self.d_model
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers, booleans and one nested dict, fit for JSON and for a `.pt`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The config that `to_dict` wrote.

        Raises:
            CheckpointError: naming every unknown or missing key, or the first invalid value.
        """
        values = dict(values)
        gate = values.pop("gate", None)
        if gate is not None and not isinstance(gate, Mapping):
            raise CheckpointError(f"model config: gate is {gate!r}; it must be an object")
        _refuse_unknown(values, cls, "model config")
        _refuse_unknown(gate or {}, GateConfig, "model config, gate")
        missing = [
            name
            for name in ("vocab_size", "d_model", "n_layers", "n_heads", "max_length")
            if name not in values
        ]
        if missing:
            raise CheckpointError(f"model config: missing {', '.join(missing)}")
        try:
            return cls(**values, gate=GateConfig(**(gate or {})))
        except InputError as error:
            raise CheckpointError(f"model config: {error}") from None


def _refuse_unknown(values: Mapping[str, Any], cls: type, where: str) -> None:
    known = {f.name for f in fields(cls)}
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        shown = ", ".join(sorted(unknown)[:5]) + (", …" if len(unknown) > 5 else "")
        raise CheckpointError(f"{where}: unknown key {shown}; known are {', '.join(sorted(known))}")
