"""Attention as people write it, one function a way, and the same in float64 by its definition.

A way takes the module, q, k, v (B, H, T, d) and what is visible (B, 1, T, T), and returns
(B, H, T, d). What deviates from plain softmax attention is said in `DEVIATES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import reference
import torch
import torch.nn.functional as F
from fake_kernels import flash_attn_func as flash_attn_bound_early
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WIDTH, HEADS, VOCABULARY = 24, 4, 19
LOW = torch.finfo(torch.float32).min

Way = Callable[["Attention", Tensor, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """A layer that attends in one of the ways below."""

    def __init__(self, way: Way, project: str = "linear", gated: bool = False) -> None:
        super().__init__()
        self.way, self.project = way, project
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkv")
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.softmax = nn.Softmax(-1)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.gate = nn.Linear(WIDTH, WIDTH) if gated else None
        self.held = flash_attn_bound_early
        for part in (self.query, self.key):
            nn.init.normal_(part.weight, std=0.5)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = self.way(self, q, k, v, visible).transpose(1, 2)  # (B, T, H, d)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x)).unflatten(-1, (HEADS, -1))
        return PROJECTIONS[self.project](y, self.out.weight)


class Model(nn.Module):
    """An embedding, one layer of attention, and logits."""

    def __init__(self, attn: nn.Module, mask: str = "causal") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attn, self.mask = attn, mask
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def visible(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool)
        seen = seen if self.mask == "full" else seen.tril()
        if self.mask == "window":
            seen = seen & ~seen.tril(-5)
        seen = seen[None, None].expand(len(tokens), 1, -1, -1)
        return seen if attention_mask is None else seen & attention_mask.bool()[:, None, None]

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attn(x, self.visible(tokens, attention_mask)))


# the ways


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def flash(m, q, k, v, seen):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def minus_ten_thousand(m, q, k, v, seen):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(seen.float() - 1) * 1e4)


def operator(m, q, k, v, seen):
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def operator_of_kernel(m, q, k, v, seen):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]


def operators(m, q, k, v, seen):
    aten = torch.ops.aten
    s = aten.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:3], -1)
    p = aten._softmax.default(aten.masked_fill(s / q.shape[-1] ** 0.5, ~seen, -math.inf), -1, False)
    return aten.matmul(p, v)


def by_hand(m, q, k, v, seen):
    return m.dropout(F.softmax(scores(q, k).masked_fill(~seen, -math.inf), dim=-1)) @ v


def samples_in_turn(m, q, k, v, seen):
    return torch.stack([by_hand(m, *x) for x in zip(q, k, v, seen, strict=True)])


def heads_in_turn(m, q, k, v, seen):
    heads = [
        by_hand(m, *x, seen[:, 0]) for x in zip(*(y.unbind(1) for y in (q, k, v)), strict=True)
    ]
    return torch.stack(heads, 1)


def lowest_added(m, q, k, v, seen):
    mask = torch.zeros(seen.shape).masked_fill(~seen, LOW)
    return torch.matmul(torch.softmax(scores(q, k) + mask, -1), v)


def old_style(m, q, k, v, seen):
    shown = seen.float()
    return torch.matmul(m.softmax(scores(q, k) * shown - 1e4 * (1 - shown)), v)


def in_place(m, q, k, v, seen):
    s = q.matmul(k.mT).mul_(q.shape[-1] ** -0.5).masked_fill_(~seen, -math.inf)
    p = s.softmax(dim=-1)
    p.masked_fill_(~seen, 0.0)
    return p.matmul(v)


def head_mask(m, q, k, v, seen):
    p = torch.where(seen, scores(q, k), -1e9).softmax(-1) * torch.ones(1, HEADS, 1, 1)
    return m.dropout(p).contiguous() @ v


def merged(m, q, k, v, seen):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.bmm(q, k.mT) / math.sqrt(q.shape[-1])
    low = torch.finfo(q.dtype).min
    s = s.unflatten(0, (-1, HEADS)).masked_fill(~seen, low).flatten(0, 1)
    return torch.bmm(s.softmax(-1), v).unflatten(0, (-1, HEADS))


def baddbmm(m, q, k, v, seen):
    batch, heads, length, width = q.shape
    bias = torch.zeros(batch * heads, length, length)
    s = bias.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=width**-0.5)
    p = F.softmax(s.view(batch, heads, length, length).masked_fill(~seen, LOW), -1)
    return torch.bmm(p.view(batch * heads, length, length), v.flatten(0, 1)).view_as(q)


def einsum(m, q, k, v, seen):
    s = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bhjd->bhid", s.masked_fill(~seen, -math.inf).softmax(-1), v)


def einsum_tokens_first(m, q, k, v, seen):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = torch.einsum("bqhd, bkhd -> bqhk", q, k) / math.sqrt(q.shape[-1])
    p = s.masked_fill(~seen.transpose(1, 2), -math.inf).softmax(-1)
    return torch.einsum("bqhk,bkhd->bqhd", p, v).transpose(1, 2)


def einsum_ellipsis(m, q, k, v, seen):
    s = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("...qk,...kd->...qd", s.masked_fill(~seen, -math.inf).softmax(-1), v)


def keys_first(m, q, k, v, seen):
    s = (k @ q.mT / math.sqrt(q.shape[-1])).masked_fill(~seen.mT, -math.inf)
    return s.softmax(dim=-2).transpose(-2, -1) @ v


def values_first(m, q, k, v, seen):
    p = scores(q, k).masked_fill(~seen, -math.inf).softmax(-1)
    return (v.mT @ p.permute(0, 1, 3, 2)).mT


def grouped(m, q, k, v, seen):
    q = q.unflatten(1, (2, 2))  # two heads share their keys
    k, v = (x[:, ::2, None] for x in (k, v))
    p = scores(q, k).masked_fill(~seen[:, :, None], -math.inf).softmax(-1)
    return (p @ v).flatten(1, 2)


def one_key_head(m, q, k, v, seen):
    return scores(q, k[:, :1]).masked_fill(~seen, -math.inf).softmax(-1) @ v[:, :1]


def sink_column(m, q, k, v, seen):
    own = m.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
    s = torch.cat([scores(q, k).masked_fill(~seen, LOW), own], -1)
    s = s - s.max(dim=-1, keepdim=True).values
    return m.dropout(s.softmax(-1)[..., :-1]) @ v


def sink_column_first(m, q, k, v, seen):
    own = m.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
    p = torch.cat([own, scores(q, k).masked_fill(~seen, LOW)], -1).softmax(-1)
    return torch.bmm(p[..., 1:].flatten(0, 1), v.flatten(0, 1)).view_as(q)


def soft_cap(m, q, k, v, seen):
    return (2 * torch.tanh(scores(q, k) / 2)).masked_fill(~seen, -math.inf).softmax(-1) @ v


@torch.jit.script
def capped(s: Tensor) -> Tensor:
    return 2 * torch.tanh(s / 2)


def scripted_cap(m, q, k, v, seen):
    return capped(scores(q, k)).masked_fill(~seen, -math.inf).softmax(-1) @ v


def alibi_by_hand(m, q, k, v, seen):
    return (scores(q, k) + alibi(m, q)).masked_fill(~seen, -math.inf).softmax(-1) @ v


def alibi(m: Attention, q: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    return -m.slopes[:, None, None] * (at[:, None] - at).abs()


def flex(m, q, k, v, seen, function=flex_attention, **others):
    def mask_mod(b, h, i, j):
        return seen[b, 0, i, j]

    size = q.shape[2]
    block = create_block_mask(mask_mod, len(q), None, size, size, device="cpu")
    return function(q, k, v, block_mask=block, **others)


def flex_causal(m, q, k, v, seen):
    block = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu"
    )
    return flex_attention(q, k[:, ::2], v[:, ::2], block_mask=block, enable_gqa=True)


def flex_by_head(m, q, k, v, seen):
    reach = torch.arange(HEADS) + 1
    size = q.shape[2]
    block = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < reach[h]), None, HEADS, size, size, device="cpu"
    )
    return flex_attention(q, k, v, block_mask=block, return_lse=True)[0]


def flex_score(m, q, k, v, seen):
    def change(score, b, h, i, j):
        return 2 * torch.tanh(score / 2) - m.slopes[h] * (i - j).abs()

    return flex(m, q, k, v, seen, score_mod=change)


def flex_compiled(m, q, k, v, seen):
    return flex(m, q, k, v, seen, function=torch.compile(flex_attention, backend="eager"))


def tokens_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def flash_attn(m, q, k, v, seen, **others):
    import flash_attn as library

    made = library.flash_attn_func(*tokens_first(q, k, v), causal=True, **others)
    return (made[0] if isinstance(made, tuple) else made).transpose(1, 2)


def flash_attn_imported(m, q, k, v, seen):
    q, k, v = tokens_first(q, k[:, ::2], v[:, ::2])
    return flash_attn_bound_early(q, k, v, 0.0, causal=True).transpose(1, 2)


def flash_attn_held(m, q, k, v, seen):
    return m.held(*tokens_first(q, k, v), causal=True).transpose(1, 2)


def flash_attn_window(m, q, k, v, seen):
    return flash_attn(m, q, k, v, seen, window_size=(4, 0), return_attn_probs=True)


def flash_attn_soft_cap(m, q, k, v, seen):
    return flash_attn(m, q, k, v, seen, softcap=2.0)


def flash_attn_alibi(m, q, k, v, seen):
    return flash_attn(m, q, k, v, seen, alibi_slopes=m.slopes)


def flash_attn_packed(m, q, k, v, seen):
    from flash_attn import flash_attn_qkvpacked_func

    qkv = torch.stack(tokens_first(q, k, v), 2)
    return flash_attn_qkvpacked_func(qkv, causal=True).transpose(1, 2)


def flash_attn_kv_packed(m, q, k, v, seen):
    from flash_attn import flash_attn_kvpacked_func

    q, k, v = tokens_first(q, k, v)
    return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True).transpose(1, 2)


def flash_attn_varlen(m, q, k, v, seen):
    """The real tokens of all samples in one row, as unpadded training code has them."""
    from flash_attn import flash_attn_varlen_func

    real = seen[:, 0, -1]  # (B, T) the last row sees all that is to its left
    ends = F.pad(real.sum(1).cumsum(0), (1, 0)).int()
    q, k, v = (x[real] for x in tokens_first(q, k, v))  # (N, H, d)
    longest = int(real.sum(1).max())
    made = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)
    return (
        made.new_zeros(*real.shape, *made.shape[1:])
        .masked_scatter_(real[..., None, None], made)
        .transpose(1, 2)
    )


def xformers_causal(m, q, k, v, seen):
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    q, k, v = tokens_first(q, k, v)
    return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask()).transpose(1, 2)


def xformers_tensor(m, q, k, v, seen):
    import xformers.ops as ops

    bias = torch.zeros(seen.shape).masked_fill(~seen, -math.inf).expand(-1, HEADS, -1, -1)
    return ops.memory_efficient_attention(*tokens_first(q, k, v), bias).transpose(1, 2)


def xformers_other(m, q, k, v, seen):
    import xformers.ops as ops

    bias = ops.LowerTriangularMaskWithTensorBias(alibi(m, q)[None])
    return ops.memory_efficient_attention(*tokens_first(q, k, v), bias).transpose(1, 2)


def xformers_blocks(m, q, k, v, seen):
    import xformers.ops as ops

    blocks = ops.BlockDiagonalCausalMask([q.shape[2]] * len(q))
    q, k, v = (x.flatten(0, 1)[None] for x in tokens_first(q, k, v))
    made = ops.memory_efficient_attention(q, k, v, blocks)[0]
    return made.unflatten(0, (len(seen), -1)).transpose(1, 2)


PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda y, w: F.linear(y.flatten(2), w),
    "linear of rows": lambda y, w: F.linear(y.flatten(2).flatten(0, 1), w).view(*y.shape[:2], -1),
    "W.T": lambda y, w: y.flatten(2) @ w.T,
    "W first": lambda y, w: (w @ y.flatten(2).mT).mT,
    "cast": lambda y, w: torch.matmul(y.flatten(2), w.t().float()),
    "mm": lambda y, w: torch.mm(y.reshape(-1, WIDTH), w.T).view(*y.shape[:2], -1),
    "addmm": lambda y, w: torch.addmm(torch.zeros(WIDTH), y.reshape(-1, WIDTH), w.T).view(
        *y.shape[:2], -1
    ),
    "einsum": lambda y, w: torch.einsum("btf,ef->bte", y.flatten(2), w),
    "einsum of heads": lambda y, w: torch.einsum("bthd,hde->bte", y, w.T.unflatten(0, (HEADS, -1))),
    "einsum of heads first": lambda y, w: torch.einsum(
        "bhtd,ehd->bte", y.transpose(1, 2), w.view(WIDTH, HEADS, -1)
    ),
    "einsum, tokens first": lambda y, w: torch.einsum(
        "ibnd,hnd->ibh", y.transpose(0, 1), w.view(WIDTH, HEADS, -1)
    ).transpose(0, 1),
    "convolution": lambda y, w: F.conv1d(y.flatten(2).mT, w[..., None]).mT,
}


@dataclass(frozen=True)
class Kind:
    """A way, the mask it can be given, and what the softmax is beside plain."""

    way: Way
    mask: str = "causal"
    shares_keys: int = 1  # query heads to a key head
    takes_padding: bool = True
    cap: float | None = None
    adds: bool = False  # ALiBi
    has_sinks: bool = False
    reaches: bool = False  # a window by head
    engine: str = "matrix"
    more: dict[str, object] = field(default_factory=dict)


KINDS = {
    "nanoGPT": Kind(flash, engine="blocks"),
    "-1e4 in a mask": Kind(minus_ten_thousand, engine="blocks"),
    "an operator": Kind(operator, engine="blocks"),
    "the operator of a kernel": Kind(operator_of_kernel, takes_padding=False, engine="blocks"),
    "operators": Kind(operators),
    "nanoGPT by hand": Kind(by_hand),
    "window by hand": Kind(by_hand, mask="window"),
    "both ways by hand": Kind(by_hand, mask="full"),
    "samples in turn": Kind(samples_in_turn),
    "heads in turn": Kind(heads_in_turn),
    "the lowest number added": Kind(lowest_added),
    "-1e4 added": Kind(old_style),
    "in place": Kind(in_place),
    "head mask": Kind(head_mask),
    "bmm with merged heads": Kind(merged),
    "baddbmm": Kind(baddbmm),
    "einsum": Kind(einsum),
    "einsum, tokens first": Kind(einsum_tokens_first),
    "einsum, ellipsis": Kind(einsum_ellipsis),
    "softmax over rows": Kind(keys_first),
    "values first": Kind(values_first),
    "grouped": Kind(grouped, shares_keys=2),
    "one key head": Kind(one_key_head, shares_keys=4),
    "learned sink column": Kind(sink_column, has_sinks=True),
    "learned sink column in front": Kind(sink_column_first, has_sinks=True),
    "soft cap": Kind(soft_cap, cap=2.0),
    "scripted soft cap": Kind(scripted_cap, cap=2.0),
    "ALiBi": Kind(alibi_by_hand, adds=True),
    "flex": Kind(flex, engine="blocks"),
    "flex, window": Kind(flex, mask="window", engine="blocks"),
    "flex, both ways": Kind(flex, mask="full", engine="blocks"),
    "flex, grouped": Kind(flex_causal, shares_keys=2, takes_padding=False, engine="blocks"),
    "flex, by head": Kind(flex_by_head, reaches=True, takes_padding=False, engine="blocks"),
    "flex, score function": Kind(flex_score, cap=2.0, adds=True),
    "flex, compiled": Kind(flex_compiled, engine="blocks"),
    "flash-attn": Kind(flash_attn, takes_padding=False, engine="blocks"),
    "flash-attn, imported": Kind(
        flash_attn_imported, shares_keys=2, takes_padding=False, engine="blocks"
    ),
    "flash-attn, held": Kind(flash_attn_held, takes_padding=False, engine="blocks"),
    "flash-attn, window": Kind(
        flash_attn_window, mask="window", takes_padding=False, engine="blocks"
    ),
    "flash-attn, soft cap": Kind(
        flash_attn_soft_cap, cap=2.0, takes_padding=False, engine="blocks"
    ),
    "flash-attn, ALiBi": Kind(flash_attn_alibi, adds=True, takes_padding=False, engine="blocks"),
    "flash-attn, qkv": Kind(flash_attn_packed, takes_padding=False, engine="blocks"),
    "flash-attn, kv": Kind(flash_attn_kv_packed, takes_padding=False, engine="blocks"),
    "flash-attn, varlen": Kind(flash_attn_varlen, engine="blocks"),
    "xformers": Kind(xformers_causal, takes_padding=False, engine="blocks"),
    "xformers, tensor": Kind(xformers_tensor, engine="blocks"),
    "xformers, written out": Kind(xformers_other, adds=True, takes_padding=False, engine="blocks"),
    "xformers, blocks": Kind(xformers_blocks, takes_padding=False, engine="blocks"),
}


@torch.no_grad()
def expected(model: Model, kind: Kind, tokens: Tensor, mask: Tensor | None) -> reference.Layer:
    """The layer in float64 from the weights alone."""
    m = model.attn
    assert isinstance(m, Attention)
    ids = torch.zeros_like(tokens) if mask is None else mask.long() - 1
    x = model.embedding.weight.double()[tokens]
    q, k, v = (
        (x @ part.weight.double().T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (m.query, m.key, m.value)
    )
    step = kind.shares_keys
    k, v = k[:, ::step], v[:, ::step]
    seen = model.visible(tokens, mask)
    if kind.reaches:
        at = torch.arange(tokens.shape[1])
        seen = seen & (at[:, None] - at < torch.arange(1, HEADS + 1)[:, None, None])
    dense = reference.attend(
        q,
        k,
        v,
        seen,
        bias=alibi(m, q)[None] if kind.adds else None,
        softcap=kind.cap,
        sinks=m.sinks[:, None] if kind.has_sinks else None,
    )
    gate, consumed = None, dense.output.transpose(1, 2)
    if m.gate is not None:
        logits = x @ m.gate.weight.double().T + m.gate.bias.double()
        gate = (1 / (1 + torch.exp(-logits))).unflatten(-1, (HEADS, -1))
        consumed = consumed * gate
    weight = m.out.weight.double()
    return reference.Layer(
        "attn", ids, ids, dense, v, gate, consumed, weight, consumed.flatten(2) @ weight.T
    )
