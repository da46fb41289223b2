"""A model's own eager attention weights, and every figure from them, dense and in float64.

Nothing here imports attnprobe. A model that goes through transformers' attention interface is
watched there: whatever function it would have called is called, and its weights are kept. One with
attention code of its own hands its weights out when `output_attentions` is asked for; of one that
does not, every softmax is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass
class Figures:
    """Per query (B, H, Tq) and per key (B, H, Tk); rows that do not count hold 0."""

    first: Tensor
    entropy: Tensor
    null: Tensor
    mass: Tensor


def watched(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The (B, H, Tq, Tk) weights of a pass through the interface, by site as attnprobe names it."""
    from transformers.modeling_utils import AttentionInterface

    paths = {module: path for path, module in model.named_modules()}
    kept = _Kept()
    original = AttentionInterface.get_interface

    def get_interface(self: Any, *args: Any) -> Callable[..., Any]:
        function = original(self, *args)

        def spied(module: nn.Module, *given: Any, **kwargs: Any) -> Any:
            output, weights = function(module, *given, **kwargs)
            value = given[2] if len(given) > 2 else kwargs["value"]
            kept.add(paths[module], effective(weights, value, output))
            return output, weights

        return spied

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(AttentionInterface, "get_interface", get_interface)
        model(*args, **kwargs)
    return kept.weights


def handed_out(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The same, from what the innermost modules return when asked for their weights."""
    kept = _Kept()
    seen: list[Tensor] = []

    def hook(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            for part in output if isinstance(output, (tuple, list)) else ():
                if _is_weights(part) and not any(part is one for one in seen):
                    seen.append(part)
                    kept.add(path, part)

        return keep

    def ask(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    asked = {"output_attentions": True} if hasattr(model, "config") else {}
    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_hook(hook(path)).remove)
            if isinstance(module, nn.MultiheadAttention):
                hooks.callback(module.register_forward_pre_hook(ask, with_kwargs=True).remove)
        model(*args, **{**kwargs, **asked})
    return kept.weights


def softmaxed(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The same, from every softmax over three dimensions or more, by the module that takes it."""
    kept = _Kept()
    running: list[str] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in SOFTMAX and result.dim() >= 3:
                kept.add(running[-1], result)
            return result

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():
            if not isinstance(module, nn.Softmax):  # its own owner takes it
                hooks.callback(module.register_forward_pre_hook(enter(path)).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
        with Watching():
            model(*args, **kwargs)
    return kept.weights


SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax)


class _Kept:
    """Weights by module path, with `#n` behind the path for the module's n-th further call."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, path: str, weights: Tensor) -> None:
        count = self._counts[path] = self._counts.get(path, -1) + 1
        self.weights[f"{path}#{count}" if count else path] = weights.double()


def _is_weights(part: Any) -> bool:
    """Whether a tensor is (B, H, Tq, Tk) attention weights."""
    if not isinstance(part, Tensor) or part.dim() != 4 or not part.is_floating_point():
        return False
    return bool((part >= 0).all()) and float((part.sum(-1) - 1).abs().max()) < 1e-4


def effective(weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """(B, H, Tq, Tk) the weights that made the output (B, Tq, H, d_v) of (B, K, Tk, d_v) values.

    A learned sink may scale the output instead of the weights: the row's factor is read from both.

    Raises:
        AssertionError: the output is no multiple of what the weights give.
    """
    value = value.double().repeat_interleave(weights.shape[1] // value.shape[1], 1)
    plain = weights.double() @ value  # (B, H, Tq, d_v)
    output = output.double().transpose(1, 2)
    factor = (plain * output).sum(-1, keepdim=True) / (plain * plain).sum(-1, keepdim=True)
    factor = factor.nan_to_num(1)  # a row that sees nothing
    if float((factor - 1).abs().max()) < 1e-3:
        factor = torch.ones_like(factor)
    error = (factor * plain - output).abs().max()
    assert float(error) < 1e-4 * float(output.abs().max()), "these weights did not make the output"
    return weights.double() * factor


def figures(weights: Tensor, queries: Tensor, keys: Tensor) -> Figures:
    """What the definitions say of (B, H, Tq, Tk) weights.

    Args:
        weights: (B, H, Tq, Tk).
        queries: (B, Tq) True at real tokens.
        keys: (B, Tk) True at real tokens, of which the first is the document's first key.
    """
    counted = queries[:, None] & ~_sees_nothing(weights)  # (B, H, Tq)
    first = keys.long().argmax(-1)  # (B,)
    index = first[:, None, None, None].expand(*weights.shape[:3], 1)
    total = weights.sum(-1)
    share = weights / total[..., None].clamp_min(1e-300)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return Figures(
        first=weights.gather(-1, index)[..., 0] * counted,
        entropy=entropy * counted,
        null=(1 - total) * counted,
        mass=(weights * counted[..., None]).sum(-2),
    )


def _sees_nothing(weights: Tensor) -> Tensor:
    """(B, H, Tq) rows even to the last digit: all their logits were the smallest number."""
    if weights.shape[-1] == 1:
        return torch.zeros(weights.shape[:3], dtype=torch.bool)
    return weights.amax(-1) == weights.amin(-1)
