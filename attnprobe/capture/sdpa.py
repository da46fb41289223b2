"""The tap on torch's own attention functions, so that any torch model is seen as it is.

A `TorchFunctionMode` sees `F.scaled_dot_product_attention` by whatever name it is called.
`F.multi_head_attention_forward` pops the mode before it calls it, so that function is read from
its arguments; having the mode on keeps torch's fused inference path of it off. Attention that a
model writes out is found by `attnprobe.capture.written`, linear maps by `attnprobe.capture.linear`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnprobe.capture.aten import as_function, fused
from attnprobe.capture.flex import flex, is_flex
from attnprobe.capture.layouts import SOFTMAXES
from attnprobe.capture.linear import Weights, read_linear
from attnprobe.capture.masks import Mask
from attnprobe.capture.products import read_product
from attnprobe.capture.raw import RawCall
from attnprobe.capture.written import Softmax, Written

ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
TRANSFORMED = "it runs within a transform of torch.func (vmap, grad), whose calls are not seen"


class SdpaTap(TorchFunctionMode):
    """Reports attention calls and linear maps while it is entered.

    Args:
        on_call: gets every attention call.
        on_linear: gets input (…, d_in) and weight (d_out, d_in) of every linear map.
        place: the path of the module that runs.
        on_unread: gets the reason why attention in that module was not read.
    """

    def __init__(
        self,
        on_call: Callable[[RawCall], None],
        on_linear: Callable[[Tensor, Tensor], None],
        place: Callable[[], str] = str,
        on_unread: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__()
        self.on_unread = on_unread
        self.on_call = on_call
        self.on_linear = on_linear
        self._weights = Weights()
        self._written = Written(self._weights, place)

    @property
    def softmaxes(self) -> list[Softmax]:
        """Those seen since the tap was entered."""
        return self._written.softmaxes

    def __enter__(self) -> SdpaTap:
        self._weights.clear()
        self._written.clear()
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:
            if func in SOFTMAXES or func in ATTENTIONS or is_flex(func):
                self.on_unread(TRANSFORMED)
            return func(*args, **kwargs)
        if is_flex(func):
            result, call = flex(func, *args, **kwargs)
            self.on_call(call)
            return result
        result = func(*args, **kwargs)
        if (given := fused(func, args, kwargs)) is not None:
            self.on_call(read_sdpa(result[0], **given))
            return result
        func = as_function(func)
        if func is F.scaled_dot_product_attention:
            self.on_call(read_sdpa(result, *args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self.on_call(read_multi_head(result[0], *args, **kwargs))
        elif isinstance(result, Tensor) or func is Tensor.__setitem__:
            self._look(func, args, kwargs, result)
        return result

    def _look(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        product = read_product(func, args, kwargs)
        linear = read_linear(func, args, kwargs, product, self._weights)
        if linear is not None:
            self.on_linear(*linear)
        call = self._written.saw(func, args, kwargs, result, product, linear is not None)
        if call is not None:
            self.on_call(call)
        self._weights.follow(func, args, result)


def read_sdpa(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> RawCall:
    """`F.scaled_dot_product_attention`: all dimensions before the last two may be any number."""
    mask = Mask(
        n_queries=query.shape[-2],
        n_keys=key.shape[-2],
        causal=is_causal,  # torch aligns the upper left corners
        dense=None if attn_mask is None else _four(_led(attn_mask, output), query.dim()),
        device=query.device,
    )
    # under autocast the function rounds what it is given, as its output shows
    given = [_led(x, output).to(output.dtype) for x in (query, key, value)]
    output, (query, key, value) = _four(output), (_four(x) for x in given)
    batch, key_heads = len(output), max(key.shape[1], value.shape[1])
    return RawCall(  # torch broadcasts the batch, and one key head to several value heads
        query=query.expand(batch, output.shape[1], -1, -1),
        key=key.expand(batch, key_heads, -1, -1),
        value=value.expand(batch, key_heads, -1, -1),
        output=output,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask,
        problem="dropout is on in this call" if dropout_p else None,
    )


def _led(tensor: Tensor, output: Tensor) -> Tensor:
    """A tensor of more than four dimensions, its first ones as many as the output's."""
    if tensor.dim() < 5 or all(size == 1 for size in tensor.shape[:-3]):
        return tensor
    return tensor.expand(*output.shape[:-3], *tensor.shape[-3:])


def _four(tensor: Tensor, dims: int | None = None) -> Tensor:
    """(…, T, d) as (B, H, T, d): missing dimensions are 1, further ones go into the batch.

    `dims` is how many dimensions the query has, against which a mask is aligned from the right.
    """
    if dims is not None:
        tensor = tensor.reshape((1,) * (dims - tensor.dim()) + tuple(tensor.shape))
    if tensor.dim() == 3:  # (B, T, d): one head
        return tensor[:, None]
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def read_multi_head(output: Tensor, *args: Any, **kwargs: Any) -> RawCall:
    """`F.multi_head_attention_forward`: the heads are projected again from its own arguments."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    heads = a["num_heads"]
    query, key, value = _projected(a)  # (T, B, E) each
    if a["bias_k"] is not None:
        batch = key.shape[1]
        key = torch.cat([key, a["bias_k"].expand(1, batch, -1)])
        value = torch.cat([value, a["bias_v"].expand(1, batch, -1)])
    query, key, value = (_split(x, heads) for x in (query, key, value))  # (B, H, T, d)
    mask = Mask(
        n_queries=query.shape[2],
        n_keys=key.shape[2],
        dense=_multi_head_mask(a, query, key),
        device=query.device,
    )
    # a zero key with a zero value takes weight and gives nothing, as a learned sink logit of 0
    sinks = query.new_zeros(()) if a["add_zero_attn"] else None
    attended = _attend(query, key, value, mask, sinks)
    again = F.linear(_joined(attended), a["out_proj_weight"], a["out_proj_bias"])  # (T, B, E)
    module = output if output.dim() == 3 else output[:, None]
    empty = ~mask.sees_any().mT[..., None]  # (T, B | 1, 1) such rows hold NaN, or 0, or a mean
    error = (again.float() - module.float()).abs().masked_fill(empty, 0)
    close = bool((error <= 1e-3 + 1e-2 * module.float().abs().masked_fill(empty, 0)).all())
    return RawCall(
        query,
        key,
        value,
        attended,
        scale=query.shape[-1] ** -0.5,
        mask=mask,
        sinks=sinks,
        weight=a["out_proj_weight"],
        learned_keys=0 if a["bias_k"] is None else 1,
        problem=None if close else "its own output is not what its arguments give (dropout?)",
    )


def _projected(a: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [x if x.dim() == 3 else x[:, None] for x in (a["query"], a["key"], a["value"])]
    if a["use_separate_proj_weight"]:
        weights = [a["q_proj_weight"], a["k_proj_weight"], a["v_proj_weight"]]
    else:
        weights = list(a["in_proj_weight"].chunk(3))
    bias = a["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    return q, k, v


def _split(x: Tensor, heads: int) -> Tensor:
    """(T, B, E) to (B, H, T, E / H)."""
    length, batch, width = x.shape
    return x.view(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _joined(x: Tensor) -> Tensor:
    """(B, H, T, d) to (T, B, H·d)."""
    return x.permute(2, 0, 1, 3).flatten(2)


def _multi_head_mask(a: dict[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    """(B | 1, H | 1, Tq | 1, Tk) what the function adds to its logits, where True hides."""
    parts = []
    if (mask := a["attn_mask"]) is not None:
        n_batch, n_heads = query.shape[:2]
        parts.append(
            mask[None, None] if mask.dim() == 2 else mask.view(n_batch, n_heads, *mask.shape[1:])
        )
    if (padding := a["key_padding_mask"]) is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        parts.append(padding[:, None, None])
    if not parts:
        return None
    added = sum(
        torch.zeros_like(p, dtype=query.dtype).masked_fill_(p, -torch.inf)
        if p.dtype == torch.bool
        else p.to(query.dtype)
        for p in parts
    )
    assert isinstance(added, Tensor)
    return F.pad(added, (0, key.shape[2] - added.shape[-1]))  # the key of bias_k is seen by all


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, sinks: Tensor | None) -> Tensor:
    """(B, H, Tq, d) the attention output, in memory linear in the length."""
    dense = mask.dense
    if sinks is not None:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        dense = None if dense is None else F.pad(dense, (0, 1))
    return F.scaled_dot_product_attention(query, key, value, dense)
