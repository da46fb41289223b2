"""What ran around an attention call: the maps that may hold its gate, and what touched its output.

Kept from a map's end until the attention module's, and only in modules that could attend, so that
a pass holds one layer's tensors at a time and never those of a feed-forward part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

ATTENTION = re.compile(r"att", re.IGNORECASE)
FEED_FORWARD = re.compile(r"mlp|ffn|feed|expert|moe|router", re.IGNORECASE)
GATE = re.compile(r"gate|(^|_)g(_|$)", re.IGNORECASE)
NORM = re.compile(r"norm", re.IGNORECASE)
ACTIVATION_MODULES = ("sigmoid", "hardsigmoid", "softplus", "silu", "tanh", "relu", "gelu")


def feeds_forward(path: str, scope: str = "") -> bool:
    """Whether a module within a scope is of a feed-forward part, by its path (or class name)."""
    parts = path[len(scope) :].split(".")
    return any(FEED_FORWARD.search(part) and not ATTENTION.search(part) for part in parts)


@dataclass(frozen=True, eq=False)
class Ran:
    """A module that ran around an attention call.

    Attributes:
        path: its path in the model.
        inputs: the tensors it was given.
        output: what it gave; None if that is no tensor, or the module still runs.
        late: it ended after the call.
    """

    path: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    output: Tensor | None
    late: bool = False

    @classmethod
    def of(
        cls, path: str, module: nn.Module, inputs: Iterable[Any], output: Any, late: bool
    ) -> Ran:
        tensors = tuple(x for x in inputs if isinstance(x, Tensor))
        return cls(path, module, tensors, output if isinstance(output, Tensor) else None, late)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_norm(self) -> bool:
        kind = type(self.module).__name__
        return bool(NORM.search(kind)) and not GATE.search(kind) and len(self.inputs) == 1

    @property
    def activation(self) -> str | None:
        """The name of the activation that the module is, if it is one."""
        kind = type(self.module).__name__.lower()
        return kind if kind in ACTIVATION_MODULES else None

    @property
    def is_map(self) -> bool:
        """A linear map, also a quantised or adapted one, or GPT-2's Conv1D."""
        return hasattr(self.module, "out_features") or hasattr(self.module, "nf")

    def may_be_gate_of(self, parent: nn.Module) -> bool:
        """Whether a module within `parent` could hold a gate of an attention call to come."""
        around = type(parent).__name__
        if feeds_forward(around) or not (self.is_map or self.activation):
            return False  # the `gate_proj` of a feed-forward part is another thing
        return bool(ATTENTION.search(around) or GATE.search(self.name))
