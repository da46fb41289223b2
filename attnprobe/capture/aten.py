"""Functions of torch that are called as operators, `torch.ops.aten.…`, by their usual names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F


def as_function(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function that an operator stands for; any other function, and an unknown one, itself."""
    packet = _packet(func)
    if packet is None:
        return func
    name = packet.__name__
    for owner in (_OWN, vars(F), vars(torch), vars(Tensor)):
        if callable(found := owner.get(name, getattr(torch, name, None))):
            return found
    return func


def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of `F.scaled_dot_product_attention` where one of its kernels is called."""
    packet = _packet(func)
    if packet is None or not packet.__name__.startswith("_scaled_dot_product_"):
        return None
    overload = func if isinstance(func, OpOverload) else packet.default
    names = [argument.name for argument in overload._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given["attn_mask"] = given.get("attn_mask", given.get("attn_bias"))
    return {name: given[name] for name in _TAKEN if name in given}


def _packet(func: Any) -> OpOverloadPacket[Any, Any] | None:
    packet = func.overloadpacket if isinstance(func, OpOverload) else func
    if not isinstance(packet, OpOverloadPacket):
        return None
    return packet if str(packet).startswith("aten.") else None


_TAKEN = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_OWN: dict[str, Callable[..., Any]] = {"_softmax": F.softmax, "_log_softmax": F.log_softmax}
