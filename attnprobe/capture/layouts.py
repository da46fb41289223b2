"""Functions of torch by what they do: the same numbers in another shape or dtype, and so on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _both(*names: str) -> set[Callable[..., Any]]:
    """What these names stand for in torch and as methods."""
    return {getattr(at, n) for n in names for at in (torch, Tensor) if hasattr(at, n)}


LAYOUTS = _both(
    "view",
    "view_as",
    "reshape",
    "reshape_as",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "transpose",
    "permute",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "t",
    "narrow",
    "expand",
    "expand_as",
    "__getitem__",
) | {getattr(Tensor, name).__get__ for name in ("T", "mT")}

CASTS = _both(
    "contiguous",
    "clone",
    "detach",
    "to",
    "type",
    "type_as",
    "half",
    "float",
    "double",
    "bfloat16",
    "cuda",
    "cpu",
)

SCALINGS = _both("mul", "multiply", "div", "divide", "neg", "__mul__", "__rmul__", "__truediv__")
DROPOUTS = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
LOG_SOFTMAXES = {
    F.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    torch.special.log_softmax,
}
