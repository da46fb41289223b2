"""Softmax statistics as log-sum-exps of torch's own fused attention, wherever the softmax is plain.

Two calls beside the model's own give everything, in memory linear in the length:

1. attention over all keys but the first, with the keys as values, gives the log-sum-exp L' and the
   mean logit of every row without its sink, so H' = L' - E'[s]; the first key is put back in
   closed form;
2. queries and keys in each other's place, each old query carrying the bias -L: the log-sum-exp of
   key j is then ln sum_i A[i, j], the attention it gets in all. Both are reversed, so that a
   causal mask stays causal.

Exact to 1e-5 + 5e-7·max|s| nats in float32; `attnprobe.engine.blocks` is the other engine.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.call import AttentionCall
from attnprobe.engine import blocks
from attnprobe.engine.aligned import in_pieces, one_a_row, rolled, starts_left, unpacked
from attnprobe.engine.stats import NEVER, AttentionStats, close_row

MIN_KEYS = 8  # below, there is nothing to save
EXTRA = 8  # features added for the bias; the kernel likes multiples of 8


@cache
def available() -> bool:
    """Whether this torch has the private CPU operator with the log-sum-exp, as we know it."""
    try:
        rows = torch.arange(64.0).sin().view(1, 1, 8, 8)
        query = torch.cat([rows, rows.flip(2)], 1)  # two heads that share their keys
        output, lse = _attention(query, rows, rows, causal=True)
    except (AttributeError, RuntimeError, TypeError):
        return False
    hidden = ~torch.ones(8, 8, dtype=torch.bool).tril()
    logits = (query @ rows.mT * 8**-0.5).masked_fill(hidden, -torch.inf)
    right = torch.allclose(lse, logits.logsumexp(-1), atol=1e-5)
    return right and torch.allclose(output, logits.softmax(-1) @ rows, atol=1e-5)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, H, Tq, d) output and (B, H, Tq) log-sum-exp; the one place that names the operator."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output, lse = operator(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    return output, lse


def supports(call: AttentionCall) -> bool:
    """Whether the softmax of this call is plain enough, and on a device with the operator."""
    mask = call.mask
    plain = (call.softcap, mask.dense, mask.rule, mask.window, mask.ahead) == (None,) * 5
    square = mask.n_queries == mask.n_keys and mask.offset == 0
    return (
        plain
        and (square or not mask.causal)
        and mask.n_keys >= MIN_KEYS
        and call.query.device.type == "cpu"
        and call.query.shape[-1] == call.key.shape[-1]
        and (mask.documents is None or _packs(call))
        and (mask.documents is not None or starts_left(call) or _rolls(call))
        and available()
    )


def _packs(call: AttentionCall) -> bool:
    """Whether the mask keeps the documents of this very call apart, each in one piece."""
    if call.queries is not call.keys or len(call.keys) == 0 or call.mask.documents is None:
        return False
    same = all(torch.equal(ids, call.keys.ids) for ids in call.mask.documents)
    return same and _hides_padding_only(call) and in_pieces(call.keys)


def _rolls(call: AttentionCall) -> bool:
    """Whether every row is one document between padding that its mask hides."""
    hides = call.mask.key_padding is not None and _hides_padding_only(call)
    return call.queries is call.keys and hides and one_a_row(call.keys)


def _hides_padding_only(call: AttentionCall) -> bool:
    padding = call.mask.key_padding
    return padding is None or torch.equal(padding.bool(), call.keys.valid)


def measure(call: AttentionCall) -> AttentionStats:
    """Reduces one call that `supports` accepts."""
    if call.mask.documents is not None:
        return unpacked(call, lambda part: _measure(part) if _worth(part) else blocks.measure(part))
    return _measure(call) if starts_left(call) else rolled(call, _measure)


def _worth(call: AttentionCall) -> bool:
    return call.mask.n_keys >= MIN_KEYS


def _measure(call: AttentionCall) -> AttentionStats:
    """Reduces one call whose documents begin with the leftmost key."""
    mask = call.mask
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key = call.query.to(dtype), call.key.to(dtype)  # (B, H, Tq, d), (B, K, Tk, d)
    hidden = _hidden(mask.key_padding, dtype)  # (B, 1, 1, Tk) or None
    visible, seen_first = _visible(call)  # (B, 1, Tq) each
    is_token = call.queries.valid[:, None]
    valid = is_token & (visible > 0)
    others = visible > seen_first.long()

    first_logits = _leading_logits(query, key, call)  # (B, H, Tq, 4), NEVER where not seen
    other_lse, other_entropy = _without_first(query, key, hidden, call)
    other_lse = other_lse.masked_fill(~others, NEVER)
    other_entropy = other_entropy.clamp_min(0).masked_fill(~others, 0)
    lse, entropy = close_row(first_logits[..., 0], other_lse, other_entropy)
    full, null = lse, torch.zeros_like(lse)
    if call.sinks is not None:
        sinks = call.sinks.to(lse).expand_as(lse)
        full = torch.logaddexp(lse, sinks)
        null = (sinks - full).exp()
    leading = (first_logits - full[..., None]).exp().masked_fill(first_logits == NEVER, 0)

    def kept(values: Tensor) -> Tensor:
        return values.masked_fill(~valid, 0)

    return AttentionStats(
        valid=valid,
        visible=visible * is_token,
        sees_first=seen_first & valid,
        first=kept(leading[..., 0]),
        first4=kept(leading.sum(-1)),
        null=kept(null),
        lse=kept(lse),
        entropy=kept(entropy),
        entropy_nosink=kept(other_entropy),
        mass=_key_mass(query, key, full, valid, call),
        seen=_seen(call, valid),
        max_logit=None,
        engine="fused",
    )


def _hidden(key_padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if key_padding is None:
        return None
    hidden = torch.zeros(key_padding.shape, dtype=dtype, device=key_padding.device)
    return hidden.masked_fill_(~key_padding.bool(), NEVER)[:, None, None]


def _visible(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(B, 1, Tq) how many keys each query sees, and whether the first is one of them."""
    mask, batch = call.mask, call.query.shape[0]
    real = mask.key_padding
    if real is None:
        real = torch.ones(batch, mask.n_keys, dtype=torch.bool, device=call.query.device)
    if mask.causal:
        visible = real.long().cumsum(-1)  # (B, Tq), Tq = Tk
    else:
        visible = real.long().sum(-1, keepdim=True).expand(-1, mask.n_queries)
    first = real[:, :1].bool().expand(-1, mask.n_queries)
    return visible[:, None], first[:, None]


def _leading_logits(query: Tensor, key: Tensor, call: AttentionCall) -> Tensor:
    """(B, H, Tq, 4) the logits of the document's first four keys, which stand leftmost."""
    group = query.shape[1] // key.shape[1]
    leading = key[:, :, :4].repeat_interleave(group, 1)
    logits = query @ leading.mT * call.scale
    rows = slice(0, call.mask.n_queries)
    visible = call.mask.visible(rows, slice(0, 4), slice(None), slice(None))
    own = call.keys.leading_for(call.queries)[:, None] >= 0  # (B, 1, Tq, 4) a shorter document
    return logits.masked_fill(~(own if visible is None else own & visible), NEVER)


def _without_first(
    query: Tensor, key: Tensor, hidden: Tensor | None, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """(B, H, Tq) log-sum-exp and entropy of the rows without the first key.

    Under a causal mask the first query has no other key; its row holds zeros.
    """
    causal = call.mask.causal
    rows = query[:, :, 1:] if causal else query
    rest = key[:, :, 1:]
    bias = None if hidden is None else hidden[..., 1:]
    mean_key, lse = _attention(rows, rest, rest, causal=causal, bias=bias, scale=call.scale)
    mean_logit = (rows * mean_key).sum(-1) * call.scale
    entropy = lse - mean_logit
    if causal:
        lse, entropy = F.pad(lse, (1, 0)), F.pad(entropy, (1, 0))
    return lse, entropy


def _key_mass(
    query: Tensor, key: Tensor, full: Tensor, valid: Tensor, call: AttentionCall
) -> Tensor:
    """(B, H, Tk) attention that every key gets from the valid queries."""
    causal = call.mask.causal
    group = query.shape[1] // key.shape[1]
    bias = (-full).masked_fill(~valid, NEVER)
    as_keys = torch.cat([query, bias[..., None]], -1)
    as_queries = F.pad(key.repeat_interleave(group, 1) * call.scale, (0, EXTRA))
    as_queries[..., key.shape[-1]] = 1
    as_keys = F.pad(as_keys, (0, EXTRA - 1))
    if causal:
        as_keys, as_queries = as_keys.flip(2), as_queries.flip(2)
    _, log_mass = _attention(as_queries, as_keys, as_keys, causal=causal, scale=1.0)
    mass = (log_mass.flip(2) if causal else log_mass).exp()
    if call.mask.key_padding is None:
        return mass
    # a hidden key is in no row's log-sum-exp: its own sum may be anything, infinity included
    return mass.masked_fill(~call.mask.key_padding[:, None].bool(), 0)


def _seen(call: AttentionCall, valid: Tensor) -> Tensor:
    """(B, 1, Tk) how many valid queries see each key."""
    counts = valid.long()  # (B, 1, Tq)
    if call.mask.causal:
        seen = counts.flip(-1).cumsum(-1).flip(-1)
    else:
        seen = counts.sum(-1, keepdim=True).expand(-1, -1, call.mask.n_keys)
    padding = call.mask.key_padding
    return seen if padding is None else seen * padding[:, None]
