"""Linear maps by whatever name they are called, as input (…, d_in) and weight (d_out, d_in)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.layouts import CASTS, LAYOUTS, SCALINGS
from attnprobe.capture.marks import Marks
from attnprobe.capture.products import Product


class Weights:
    """Knows the parameters of a model, and what is a view, another dtype or a multiple of one."""

    def __init__(self) -> None:
        self._derived: Marks[bool] = Marks()

    def has(self, tensor: Any) -> bool:
        """Whether a tensor is a parameter or made of one."""
        return isinstance(tensor, Tensor) and (
            isinstance(tensor, torch.nn.Parameter) or tensor in self._derived
        )

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> None:
        """Takes note of what a function of torch made of a parameter."""
        if not args or not self.has(args[0]):
            return
        others = (x for x in args[1:] if isinstance(x, Tensor))
        if func in LAYOUTS or func in CASTS or (func in SCALINGS and all(map(self.has, others))):
            self._derived.set(result, True)

    def clear(self) -> None:
        """Forgets what was made of parameters."""
        self._derived.clear()


def read_linear(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    product: Product | None,
    weights: Weights,
) -> tuple[Tensor, Tensor] | None:
    """Input and weight of a linear map; None where a function of torch is none.

    Args:
        product: what `read_product` makes of the call.
    """
    if func is F.linear:
        input, weight = _named(args, kwargs, "input", "weight")
        return (input, weight) if isinstance(weight, Tensor) and weight.dim() == 2 else None
    if func in _CONVOLUTIONS:
        return _pointwise(*args, **kwargs)
    if product is None:
        return None
    if func in (torch.addmm, Tensor.addmm):
        return product.left, product.right.mT  # GPT-2's Conv1D keeps its weight as (d_in, d_out)
    if weights.has(product.right):
        letters = product.left_letters, product.right_letters
        return _map(product.left, product.right, *letters, product.out_letters)
    if weights.has(product.left):
        letters = product.right_letters, product.left_letters
        return _map(product.right, product.left, *letters, product.out_letters)
    return None


def _map(
    input: Tensor, weight: Tensor, from_input: str, from_weight: str, out: str
) -> tuple[Tensor, Tensor] | None:
    """A product with a weight of 2 dimensions, or of 3 where one of them is the heads."""
    if weight.dim() == 3 and weight.stride(0) == 0 and from_weight[0] in from_input:
        weight, from_weight = weight[0], from_weight[1:]  # a bmm with the weight of every sample
    contracted = [c for c in from_input if c in from_weight and c not in out]
    made = [c for c in out if c in from_weight and c not in from_input]
    batch = [c for c in out if c in from_input]
    if not contracted or not made or sorted([*contracted, *made]) != sorted(from_weight):
        return None
    if sorted([*batch, *contracted]) != sorted(from_input):
        return None
    given = input.permute([from_input.index(c) for c in (*batch, *contracted)])
    spread = weight.permute([from_weight.index(c) for c in (*made, *contracted)])
    width = prod(given.shape[len(batch) :])
    return given.reshape(*given.shape[: len(batch)], width), spread.reshape(-1, width)


def _pointwise(
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor] | None:
    """A convolution of width 1 over (B, C, T) or (B, C, h, w) is a linear map of the channels."""
    plain = groups == 1 and set(_each(stride)) == {1} and set(_each(padding)) <= {0, "valid"}
    if not plain or set(weight.shape[2:]) != {1} or input.dim() != weight.dim():
        return None
    return input.flatten(2).mT, weight.flatten(1)


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Leading arguments, by position or by name."""
    return [args[n] if n < len(args) else kwargs.get(name) for n, name in enumerate(names)]


_CONVOLUTIONS = (F.conv1d, F.conv2d)
