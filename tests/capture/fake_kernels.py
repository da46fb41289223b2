"""Stand-ins for flash-attn and xformers, which need a GPU to build: what their documents say.

Written out in float32 from the documented meaning of every argument; nothing of attnprobe here.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, bias: Tensor, cap: float):
    """(B, T, H, d) each; seen and bias broadcast to (B, H, Tq, Tk)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * scale
    if cap:
        s = cap * torch.tanh(s / cap)
    s = (s + bias).masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1).nan_to_num(0), v.float()).to(q.dtype)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Query i stands at key i + Tk - Tq; a window is how many keys to the left and to the right."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    at = torch.arange(n_queries)[:, None] + n_keys - n_queries
    key = torch.arange(n_keys)
    left, right = window_size
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool)
    if causal:
        seen &= key <= at
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    bias = torch.zeros(())
    if alibi_slopes is not None:
        bias = -alibi_slopes[:, None, None] * (at - key).abs()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    output = _attend(q, k, v, scale, seen, bias, softcap)
    return (output, None, None) if return_attn_probs else output


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, **others):
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, **others)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, **others):
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, **others)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    **others,
):
    """(T, H, d) of all sequences, one behind the other."""
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)
    keys = zip(cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:], strict=False)
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], causal=causal, **others)[0]
        for (a, b), (c, d) in zip(ends, keys, strict=True)
    ]
    return torch.cat(parts)


class LowerTriangularMask:
    """A key is seen by queries at its own position and later."""


class BlockDiagonalCausalMask:
    """Sequences one behind the other, each causal."""

    def __init__(self, lengths):
        start = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.q_seqinfo = self.k_seqinfo = ModuleType("seqinfo")
        self.q_seqinfo.seqstart_py = start


class LowerTriangularMaskWithTensorBias:
    """One of the many masks that are no rule: it can be written out."""

    def __init__(self, bias):
        self.bias = bias

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        hidden = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
        return self.bias.to(dtype).expand(shape).masked_fill(hidden, -torch.inf)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    """(B, T, H, d)."""
    n_batch, n_queries, n_heads, _ = query.shape
    n_keys = key.shape[1]
    seen, bias = torch.ones(n_queries, n_keys, dtype=torch.bool), torch.zeros(())
    if isinstance(attn_bias, Tensor):
        bias = attn_bias
    elif isinstance(attn_bias, LowerTriangularMask):
        seen = seen.tril()
    elif isinstance(attn_bias, BlockDiagonalCausalMask):
        starts = torch.tensor(attn_bias.q_seqinfo.seqstart_py)
        number = torch.bucketize(torch.arange(n_queries), starts[1:], right=True)
        seen = seen.tril() & (number[:, None] == number)
    elif attn_bias is not None:
        bias = attn_bias.materialize((n_batch, n_heads, n_queries, n_keys))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attend(query, key, value, scale, seen, bias, 0.0)


def installed() -> dict[str, ModuleType]:
    """The modules as they would stand in `sys.modules`."""
    flash, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    xformers, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    for name, value in globals().items():
        if name.startswith("flash_attn"):
            setattr(flash, name, value)
            setattr(interface, name, value)
    for thing in (
        memory_efficient_attention,
        LowerTriangularMask,
        BlockDiagonalCausalMask,
        LowerTriangularMaskWithTensorBias,
    ):
        setattr(ops, thing.__name__, thing)
    flash.flash_attn_interface, xformers.ops = interface, ops
    found = (flash, interface, xformers, ops)
    return {module.__name__: module for module in found}
