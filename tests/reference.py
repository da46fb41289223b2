"""Every definition once more, dense and in float64, written from the definitions alone.

Nothing here imports attnprobe. Shapes: q (B, H, Tq, d), k (B, K, Tk, d), v (B, K, Tk, d_v); a
document is `(row, columns)`, its tokens in order; ids are (B, T), negative at padding.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

EPS32 = float(np.finfo(np.float32).eps)


# documents


def documents(ids: Tensor) -> list[tuple[int, list[int]]]:
    """Row and columns of every document of (B, T) ids, row by row, by id; padding left out."""
    found = []
    for row, line in enumerate(ids.tolist()):
        for name in sorted({i for i in line if i >= 0}):
            found.append((row, [t for t, i in enumerate(line) if i == name]))
    return found


def first_columns(query_ids: Tensor, key_ids: Tensor, count: int) -> list[list[list[int]]]:
    """[row][query] the columns of the first `count` keys of the query's own document."""
    table = []
    for row, line in enumerate(query_ids.tolist()):
        leading: dict[int, list[int]] = {}
        for c, name in enumerate(key_ids[row].tolist()):
            if len(leading.setdefault(name, [])) < count:
                leading[name].append(c)
        table.append([leading.get(i, []) if i >= 0 else [] for i in line])
    return table


# attention


@dataclass
class Dense:
    """One attention call with its whole matrix."""

    weights: Tensor  # (B, H, Tq, Tk) A
    logits: Tensor  # (B, H, Tq, Tk) s, -inf where hidden
    visible: Tensor  # (B, H, Tq, Tk)
    output: Tensor  # (B, H, Tq, d_v)
    null: Tensor  # (B, H, Tq)


def repeated(x: Tensor, heads: int) -> Tensor:
    """(B, K, T, d) as (B, H, T, d), every head with the keys of its group."""
    return torch.stack([x[:, h // (heads // x.shape[1])] for h in range(heads)], 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Dense:
    """Softmax attention; visible and bias broadcast to (B, H, Tq, Tk), sinks to (B, H, Tq)."""
    heads = q.shape[1]
    q, k, v = q.double(), repeated(k.double(), heads), repeated(v.double(), heads)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.double()
    shown = torch.ones(s.shape, dtype=torch.bool)
    if visible is not None:
        shown = shown & visible
    s = torch.where(shown, s, torch.tensor(-math.inf, dtype=torch.double))
    top = s.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.double().expand(s.shape[:3])[..., None]
        top = torch.maximum(top, sinks)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    extra = torch.zeros_like(total) if sinks is None else torch.exp(sinks - top)
    denominator = total + extra
    safe = torch.where(denominator > 0, denominator, torch.ones_like(denominator))
    a = e / safe
    null = (extra / safe)[..., 0] * shown.any(-1)
    a = a * shown.any(-1, keepdim=True)
    return Dense(a, s, shown, a @ v, null)


def row_entropy(weights: Tensor) -> Tensor:
    """(…, Tk) weights, renormalised, to (…,) nats; 0 · ln 0 is 0 and an empty row has 0."""
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total > 0, total, torch.ones_like(total))
    return -(p * torch.where(p > 0, p, torch.ones_like(p)).log()).sum(-1)


def without(logits: Tensor, columns: list[list[list[int]]]) -> Tensor:
    """The softmax (B, H, Tq, Tk) of rows with the first of `columns` left out."""
    s = logits.clone()
    for row, queries in enumerate(columns):
        for i, leading in enumerate(queries):
            if leading:
                s[row, :, i, leading[0]] = -math.inf
    top = s.amax(-1, keepdim=True)
    return torch.exp(s - torch.where(top.isinf(), torch.zeros_like(top), top))


@dataclass
class Stats:
    """Everything per query and per key, dense; h is always H here."""

    valid: Tensor  # (B, H, Tq)
    visible: Tensor  # (B, H, Tq)
    sees_first: Tensor
    first: Tensor
    first4: Tensor
    null: Tensor
    lse: Tensor
    entropy: Tensor
    entropy_nosink: Tensor
    sees_other: Tensor
    mass: Tensor  # (B, H, Tk)
    seen: Tensor  # (B, H, Tk)
    max_logit: Tensor  # (B, H)


def stats(call: Dense, query_ids: Tensor, key_ids: Tensor) -> Stats:
    """What the definitions say of one call."""
    a, shown = call.weights, call.visible
    n_batch, n_heads, n_queries, _ = a.shape
    is_token = (query_ids >= 0)[:, None]
    visible = shown.sum(-1)
    valid = is_token & (visible > 0)
    leading = first_columns(query_ids, key_ids, 4)
    first, first4 = (torch.zeros(n_batch, n_heads, n_queries, dtype=torch.double) for _ in "12")
    sees_first = torch.zeros(n_batch, n_heads, n_queries, dtype=torch.bool)
    for b in range(n_batch):
        for i in range(n_queries):
            columns = leading[b][i]
            if columns:
                first[b, :, i] = a[b, :, i, columns[0]]
                first4[b, :, i] = a[b, :, i, columns].sum(-1)
                sees_first[b, :, i] = shown[b, :, i, columns[0]]
    counted = shown & valid[..., None]
    s = torch.where(counted, call.logits, torch.full_like(call.logits, -math.inf))
    others = visible - sees_first.long() > 0
    return Stats(
        valid=valid,
        visible=visible * is_token,
        sees_first=sees_first & valid,
        first=first * valid,
        first4=first4 * valid,
        null=call.null * valid,
        lse=torch.where(valid, torch.logsumexp(call.logits, -1), torch.zeros_like(first)),
        entropy=row_entropy(a) * valid,
        entropy_nosink=row_entropy(without(call.logits, leading)),
        sees_other=valid & others,
        mass=(a * valid[..., None]).sum(-2),
        seen=counted.sum(-2),
        max_logit=s.flatten(2).amax(-1),
    )


# sink


def mean(values: list[float] | Tensor) -> float:
    """The mean, NaN of nothing."""
    values = torch.as_tensor(values, dtype=torch.double)
    return float(values.mean()) if values.numel() else math.nan


def sink_figures(call: Dense, query_ids: Tensor, key_ids: Tensor) -> list[list[dict[str, float]]]:
    """[document][head] the sink figures of one document, with how many queries they average."""
    own = stats(call, query_ids, key_ids)
    rows = []
    for row, columns in documents(query_ids):
        heads = []
        for h in range(call.weights.shape[1]):
            valid = [i for i in columns if own.valid[row, h, i]]
            seeing = [i for i in valid if own.sees_first[row, h, i]]
            floor = [float(own.sees_first[row, h, i]) / int(own.visible[row, h, i]) for i in valid]
            heads.append(
                {
                    "queries": len(valid),
                    "seeing": len(seeing),
                    "f_attr": mean(own.first[row, h, valid]),
                    "f_attr_uniform": mean(floor),
                    "alpha_first": mean(own.first[row, h, seeing]),
                    "alpha_uniform": mean([1 / int(own.visible[row, h, i]) for i in seeing]),
                    "first4": mean(own.first4[row, h, valid]),
                    "null_mass": mean(own.null[row, h, valid]),
                }
            )
        rows.append(heads)
    return rows


def pooled(rows: list[dict[str, float]], column: str, weight: str) -> float:
    """The mean over queries from means over documents."""
    rows = [r for r in rows if r[weight] > 0]
    count = sum(r[weight] for r in rows)
    return sum(r[column] * r[weight] for r in rows) / count if count else math.nan


def alpha(call: Dense, query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """(B, H, Tk) mean attention over the valid queries that see the key, NaN where none does."""
    own = stats(call, query_ids, key_ids)
    return own.mass / own.seen


def sinks(
    call: Dense, query_ids: Tensor, key_ids: Tensor, epsilon: float
) -> list[tuple[int, int, int, float]]:
    """(document, head, position, alpha) of every key above epsilon seen by at least 16 queries."""
    own, share = stats(call, query_ids, key_ids), alpha(call, query_ids, key_ids)
    found = []
    for d, (row, columns) in enumerate(documents(key_ids)):
        for position, c in enumerate(columns):
            for h in range(call.weights.shape[1]):
                if own.seen[row, h, c] >= 16 and share[row, h, c] > epsilon:
                    found.append((d, h, position, float(share[row, h, c])))
    return found


def value_drain(v: Tensor, w_o: Tensor, key_ids: Tensor, heads: int) -> list[list[float]]:
    """[document][head] ‖v[first]·W_Oʰ‖ over the median of ‖v[t]·W_Oʰ‖; w_o is (d_model, H·d_v)."""
    v = repeated(v.double(), heads)
    width = v.shape[-1]
    rows = []
    for row, columns in documents(key_ids):
        line = []
        for h in range(heads):
            w = w_o.double()[:, h * width : (h + 1) * width]
            norms = np.linalg.norm((v[row, h, columns] @ w.T).numpy(), axis=-1)
            line.append(float(norms[0] / np.median(norms)))
        rows.append(line)
    return rows


# entropy


def entropy_figures(call: Dense, query_ids: Tensor, key_ids: Tensor) -> list[list[dict]]:
    """[document][head] the entropies of every query and the means over them."""
    own = stats(call, query_ids, key_ids)
    rows = []
    for row, columns in documents(query_ids):
        heads = []
        for h in range(call.weights.shape[1]):
            valid = [i for i in columns if own.valid[row, h, i]]
            several = [i for i in valid if own.visible[row, h, i] >= 2]
            other = [i for i in valid if own.sees_other[row, h, i]]
            norm = [
                float(own.entropy[row, h, i]) / math.log(int(own.visible[row, h, i]))
                for i in several
            ]
            heads.append(
                {
                    "queries": len(valid),
                    "several": len(several),
                    "other": len(other),
                    "all": own.entropy[row, h, valid].tolist(),
                    "entropy": mean(own.entropy[row, h, valid]),
                    "entropy_norm": mean(norm),
                    "entropy_nosink": mean(own.entropy_nosink[row, h, other]),
                }
            )
        rows.append(heads)
    return rows


# rank


def ranks(matrix: np.ndarray, bound: int) -> dict[str, float | None]:
    """Every rank figure of stacked tokens × d_model, from numpy's SVD."""
    m = np.asarray(matrix, dtype=np.float64)
    sigma = np.linalg.svd(m, compute_uv=False)
    square = float((sigma**2).sum())
    row = m.mean(0)
    share = len(m) * float(row @ row) / square if square > 0 else None
    centered = None
    if share is not None:
        rest = np.linalg.svd(m - row, compute_uv=False)
        centered = None if float((rest**2).sum()) / square < 1e-12 else _erank(rest)
    erank = _erank(sigma) if square > 0 else None
    return {
        "erank": erank,
        "erank_centered": centered,
        "stable_rank": square / float(sigma[0] ** 2) if square > 0 else None,
        "participation": square**2 / float((sigma**4).sum()) if square > 0 else None,
        "num_rank": int((sigma > sigma[0] * min(m.shape) * EPS32).sum()),
        "mean_share": share,
        "rank_bound": min(len(m), bound),
        "utilisation": None if erank is None else erank / min(len(m), bound),
        "sigma": sigma,
    }


def _erank(sigma: np.ndarray) -> float:
    p = sigma / sigma.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


# the gate


def gate_figures(values: Tensor) -> dict[str, float]:
    """Figures of (N, …) gate values over valid tokens."""
    g = values.double().flatten().numpy()
    return {
        "mean": float(g.mean()),
        "std": float(g.std()),
        "median": float(np.median(g)),
        "below_0.1": float((g < 0.1).mean()),
        "from_0.1_to_0.3": float(((g >= 0.1) & (g < 0.3)).mean()),
        "from_0.4_to_0.6": float(((g >= 0.4) & (g < 0.6)).mean()),
        "from_0.7_to_0.9": float(((g >= 0.7) & (g < 0.9)).mean()),
        "above_0.9": float((g > 0.9).mean()),
    }


def skipping(
    gate: Tensor, consumed: Tensor, w_o: Tensor, threshold: float
) -> tuple[list[float], list[float], float, float]:
    """What skipping closed heads saves and costs.

    Args:
        gate: (N, H, d) over valid tokens. consumed: (N, H, d_v), already gated.

    Returns:
        share of tokens and error by head, then both for the layer.
    """
    closed = gate.double().abs().amax(-1) < threshold  # (N, H)
    heads, width = consumed.shape[1:]
    parts = [
        consumed[:, h].double() @ w_o.double()[:, h * width : (h + 1) * width].T
        for h in range(heads)
    ]
    skipped = [p * closed[:, h, None] for h, p in enumerate(parts)]
    errors = [float(s.norm() / p.norm()) for s, p in zip(skipped, parts, strict=True)]
    layer = float(sum(skipped).norm() / sum(parts).norm())
    return closed.double().mean(0).tolist(), errors, float(closed.double().mean()), layer


# around them


def massive(hidden: Tensor, ids: Tensor) -> list[tuple[int, int, int, float]]:
    """(document, position, dimension, value) of massive activations in (B, T, d_model)."""
    found = []
    for d, (row, columns) in enumerate(documents(ids)):
        own = hidden[row, columns].double().numpy()
        middle = np.median(np.abs(own))
        for t, c in np.argwhere((np.abs(own) > 100) & (np.abs(own) >= 1000 * middle)):
            found.append((d, int(t), int(c), float(own[t, c])))
    return found


def next_token_nll(logits: Tensor, tokens: Tensor, ids: Tensor) -> list[list[float]]:
    """[document] the -ln p of every token after the first of its document."""
    logp = logits.double() - torch.logsumexp(logits.double(), -1, keepdim=True)
    return [
        [-float(logp[row, a, tokens[row, b]]) for a, b in itertools.pairwise(columns)]
        for row, columns in documents(ids)
    ]


# a decoder of this project from its weights, by hand


@dataclass
class Layer:
    """One attention layer of a forward pass, all in float64."""

    site: str
    query_ids: Tensor  # (B, Tq)
    key_ids: Tensor
    dense: Dense
    value: Tensor  # (B, K, T, d_v) as attention was given it
    gate: Tensor | None  # after its activation, as the gate module shapes it
    consumed: Tensor  # (B, T, H, d_v) what W_O is given
    w_o: Tensor  # (d_model, H·d_v)
    added: Tensor  # (B, T, d_model) what the layer adds, W_O's bias left out
    block: Tensor | None = None  # (B, T, d_model) the residual stream behind the block


GATE_ACTIVATIONS = {
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "identity": lambda x: x,
    "half-sigmoid": lambda x: 0.5 + 0.5 / (1 + torch.exp(-x)),
}


def real_positions(ids: Tensor) -> Tensor:
    """(B, T) tokens since the document's first; padding holds 0."""
    position = torch.zeros_like(ids)
    for row, columns in documents(ids):
        for n, c in enumerate(columns):
            position[row, c] = n
    return position


def decoder(
    state: dict[str, Tensor], config: dict, tokens: Tensor, ids: Tensor
) -> tuple[list[Layer], Tensor]:
    """Every layer and the logits (B, T, V) of a decoder with those weights on those documents."""
    w = {name: tensor.double() for name, tensor in state.items()}
    x, position = _embedded(w, config, tokens, ids)
    layers, x = _stack(w, config, "", x, position, ids, _causal(config, ids))
    return layers, _logits(w, config, x)


def encoder_decoder(
    state: dict[str, Tensor],
    config: dict,
    tokens: Tensor,
    ids: Tensor,
    target: Tensor,
    target_ids: Tensor,
) -> tuple[list[Layer], Tensor]:
    """Every layer, those of the encoder first, and the logits (B, Td, V) of the decoder."""
    w = {name: tensor.double() for name, tensor in state.items()}
    seen = (ids >= 0)[:, None, None]
    x, position = _embedded(w, config, tokens, ids)
    encoder, memory = _stack(w, config, "encoder.", x, position, ids, seen)
    x, position = _embedded(w, config, target, target_ids)
    decoder_layers, x = _stack(
        w,
        config,
        "decoder.",
        x,
        position,
        target_ids,
        _causal(config, target_ids),
        (memory, seen, ids),
    )
    return encoder + decoder_layers, _logits(w, config, x)


Memory = tuple[Tensor, Tensor, Tensor]  # hidden states, which keys are seen, their ids


def _causal(config: dict, ids: Tensor) -> Tensor:
    n = ids.shape[1]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    visible = (j <= i) & (ids[:, :, None] == ids[:, None, :])
    if config["window"]:
        visible = visible & (i - j < config["window"])
    return visible[:, None]


def _embedded(
    w: dict[str, Tensor], config: dict, tokens: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    position, width = real_positions(ids), config["d_model"]
    x = w["embedding.tokens.weight"][tokens]
    if config["positions"] == "learned":
        x = x + w["embedding.positions.weight"][position]
    if config["positions"] == "sinusoidal":
        angle = position[..., None] / 10000 ** (torch.arange(0, width, 2).double() / width)
        code = torch.zeros(*tokens.shape, width, dtype=torch.double)
        code[..., 0::2], code[..., 1::2] = angle.sin(), angle.cos()
        x = x * math.sqrt(width) + code
    return x, position


def _logits(w: dict[str, Tensor], config: dict, x: Tensor) -> Tensor:
    tied = config["tie_embeddings"]
    return x @ w["embedding.tokens.weight" if tied else "embedding.unembedding.weight"].T


def _under(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}


def _stack(
    w: dict[str, Tensor],
    config: dict,
    prefix: str,
    x: Tensor,
    position: Tensor,
    ids: Tensor,
    visible: Tensor,
    memory: Memory | None = None,
) -> tuple[list[Layer], Tensor]:
    layers = []
    for number in range(config["n_layers"]):
        path = f"{prefix}layers.{number}."
        part = _under(w, path)
        inner = _under(part, "attention.")
        hidden = _read(part, config, x, "attention_norm")
        own = _attention(inner, config, hidden, ids, position, visible)
        own.site = path + "attention"
        x = _after_branch(x, own, inner, config, part, "attention_norm")
        layers.append(own)
        if memory is not None:
            inner = _under(part, "cross_attention.")
            hidden = _read(part, config, x, "cross_attention_norm")
            cross = _attention(inner, config, hidden, ids, None, memory[1], memory)
            cross.site = path + "cross_attention"
            x = _after_branch(x, cross, inner, config, part, "cross_attention_norm")
            layers.append(cross)
        x = own.block = _feed_forward(part, config, x)
    return layers, _norm(x, w, f"{prefix}norm") if config["norm"] == "pre" else x


def _read(w: dict[str, Tensor], config: dict, x: Tensor, name: str) -> Tensor:
    """What a branch reads."""
    return _norm(x, w, name) if config["norm"] == "pre" else x


def _after_branch(
    x: Tensor,
    layer: Layer,
    inner: dict[str, Tensor],
    config: dict,
    outer: dict[str, Tensor],
    norm: str,
) -> Tensor:
    x = x + layer.added + inner.get("output.bias", 0) * _after(layer, config)
    return x if config["norm"] == "pre" else _norm(x, outer, norm)


def _feed_forward(w: dict[str, Tensor], config: dict, x: Tensor) -> Tensor:
    h = _read(w, config, x, "feed_forward_norm")
    up = _linear(h, w, "feed_forward.up")
    if config["activation"] == "swiglu":
        gate = _linear(h, w, "feed_forward.swish")
        up = up * gate / (1 + torch.exp(-gate))
    else:
        up = GATE_ACTIVATIONS[config["activation"]](up)
    x = x + _linear(up, w, "feed_forward.down")
    return x if config["norm"] == "pre" else _norm(x, w, "feed_forward_norm")


def _norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    center = x.mean(-1, keepdim=True)
    spread = ((x - center) ** 2).mean(-1, keepdim=True)
    return (x - center) / torch.sqrt(spread + 1e-5) * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def _after(layer: Layer, config: dict) -> Tensor | float:
    """What W_O's bias is multiplied by: a gate behind W_O takes it too."""
    gate = config["gate"]
    behind = gate["position"] == "G5" and gate["mode"] == "multiplicative"
    return layer.gate if behind else 1.0


def _attention(
    w: dict[str, Tensor],
    config: dict,
    x: Tensor,
    ids: Tensor,
    position: Tensor | None,
    visible: Tensor,
    memory: Memory | None = None,
) -> Layer:
    n_heads, n_groups, width = config["n_heads"], config["n_kv_heads"], config["head_dim"]
    source, _, key_ids = (x, visible, ids) if memory is None else memory
    q = _linear(x, w, "query").unflatten(-1, (n_heads, width))
    k = _linear(source, w, "key").unflatten(-1, (n_groups, width))
    v = _linear(source, w, "value").unflatten(-1, (n_groups, width))
    place, g = config["gate"]["position"], None
    if place != "none":
        heads = {"G2": n_groups, "G3": n_groups, "G5": 1}.get(place, n_heads)
        g = _gate(w, config, source if place in ("G2", "G3") else x, heads)
    multiply = config["gate"]["mode"] == "multiplicative"

    def gated(name: str, value: Tensor) -> Tensor:
        if name != place:
            return value
        return value * g if multiply else value + g

    q, k, v = gated("G4", q), gated("G3", k), gated("G2", v)
    if config["positions"] == "rotary" and position is not None:
        q, k = _rotate(q, position), _rotate(k, position)
    v = v.transpose(1, 2)
    dense = attend(q.transpose(1, 2), k.transpose(1, 2), v, visible)
    consumed = gated("G1", dense.output.transpose(1, 2))
    added = gated("G5", consumed.flatten(2) @ w["output.weight"].T)
    return Layer("", ids, key_ids, dense, v, g, consumed, w["output.weight"], added)


def _rotate(x: Tensor, position: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = position[..., None].double() / 10000 ** (torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([z.real, z.imag], -1)


def _gate(w: dict[str, Tensor], config: dict, x: Tensor, heads: int) -> Tensor:
    gate = config["gate"]
    width = config["d_model"] if gate["position"] == "G5" else config["head_dim"]
    act = GATE_ACTIVATIONS[gate["activation"]]
    if gate["source"] == "input-independent":
        g = act(w["gate.scalar"])[None, None, :, None]
        return g[:, :, 0] if gate["position"] == "G5" else g
    logits = _linear(x, w, "gate.projection")
    shape = {"element": (heads, width), "head": (heads, 1), "head-shared": (1, width)}
    g = act(logits.view(*logits.shape[:2], *shape[gate["granularity"]]))
    return g[:, :, 0] if gate["position"] == "G5" else g


# all tables of a scan, from the layers


SHARED = ("f_attr", "f_attr_uniform", "alpha_first", "first4", "null_mass", "value_drain")
SHARED += ("entropy", "entropy_norm", "entropy_nosink")


def tables(
    layers: list[Layer], config: dict, epsilon: float = 0.3, pre_gate: bool = False
) -> dict[str, dict]:
    """Figures by table and key: heads (site, head), layers site, samples (site, head, document).

    A figure that does not exist is NaN.
    """
    found: dict[str, dict] = {name: {} for name in ("heads", "layers", "samples", "sinks")}
    rates_of_all: list[float] = []
    for layer in layers:
        ids = layer.query_ids, layer.key_ids
        n_heads = layer.dense.weights.shape[1]
        sink = sink_figures(layer.dense, *ids)
        spread = entropy_figures(layer.dense, *ids)
        drain = value_drain(layer.value, layer.w_o, layer.key_ids, n_heads)
        rank_heads, rank_layer = layer_ranks(layer, config, pre_gate)
        heads = []
        rates_of_layer: list[float] = []
        for h in range(n_heads):
            own = [row[h] for row in sink]
            nats = [row[h] for row in spread]
            rates = [
                float(r["alpha_first"] > epsilon)
                for r in own
                if r["seeing"] and r["alpha_uniform"] <= epsilon / 2
            ]
            rates_of_layer += rates
            logits = layer.dense.logits[:, h][layer.query_ids >= 0]
            head = {
                "f_attr": pooled(own, "f_attr", "queries"),
                "f_attr_uniform": pooled(own, "f_attr_uniform", "queries"),
                "alpha_first": pooled(own, "alpha_first", "seeing"),
                "first4": pooled(own, "first4", "queries"),
                "null_mass": pooled(own, "null_mass", "queries"),
                "sink_rate": mean(rates),
                "value_drain": mean([row[h] for row in drain]),
                "entropy": pooled(nats, "entropy", "queries"),
                "entropy_norm": pooled(nats, "entropy_norm", "several"),
                "entropy_nosink": pooled(nats, "entropy_nosink", "other"),
                "all": [x for r in nats for x in r["all"]],
                "max_logit": float(logits.max()),
                **rank_heads[h],
            }
            collapsed = float(head["entropy_norm"] < 0.03)
            head["collapsed"] = math.nan if math.isnan(head["entropy_norm"]) else collapsed
            heads.append(head)
            found["heads"][layer.site, h] = head
            for d in range(len(own)):
                found["samples"][layer.site, h, d] = {
                    **{c: own[d][c] for c in ("f_attr", "f_attr_uniform", "alpha_first")},
                    **{c: own[d][c] for c in ("queries", "first4", "null_mass")},
                    **{c: nats[d][c] for c in ("entropy", "entropy_norm", "entropy_nosink")},
                    "value_drain": drain[d][h],
                }
        rates_of_all += rates_of_layer
        found["layers"][layer.site] = {
            **{c: mean([head[c] for head in heads]) for c in SHARED},
            "sink_rate": mean(rates_of_layer),
            "collapsed": sum(head["collapsed"] for head in heads),
            "max_logit": max(head["max_logit"] for head in heads),
            "all": [x for head in heads for x in head["all"]],
            **rank_layer,
            "erank_head": mean([head["erank"] for head in heads if head["erank"] is not None]),
        }
        if layer.block is not None:
            largest = float(layer.block[layer.query_ids >= 0].abs().max())
            found["layers"][layer.site]["m_act"] = largest
        found["sinks"][layer.site] = sinks(layer.dense, *ids, epsilon)
    rows = list(found["layers"].values())
    means = [c for c, v in rows[0].items() if isinstance(v, (int, float))]
    found["model"] = {c: mean([row[c] for row in rows if c in row]) for c in means}
    found["model"]["sink_rate"] = mean(rates_of_all)
    found["model"]["collapsed"] = sum(row["collapsed"] for row in rows)
    found["model"]["max_logit"] = max(row["max_logit"] for row in rows)
    return found


def layer_ranks(layer: Layer, config: dict, pre_gate: bool) -> tuple[list[dict], dict]:
    """Ranks by head, of the stacked M_h, and of the layer's M."""
    valid = layer.query_ids >= 0
    given = layer.dense.output.transpose(1, 2) if pre_gate else layer.consumed  # (B, T, H, d_v)
    rows = given[valid]  # (N, H, d_v)
    n_heads, width = rows.shape[1:]
    d_model = len(layer.w_o)
    parts = [
        (rows[:, h] @ layer.w_o[:, h * width : (h + 1) * width].T).numpy() for h in range(n_heads)
    ]
    bound = min(n_heads * width, d_model)
    if config["gate"]["position"] == "G5" and not pre_gate:
        empty = dict.fromkeys(RANK_COLUMNS, math.nan)
        return [{**empty, "sigma": []} for _ in parts], ranks(layer.added[valid].numpy(), bound)
    return [ranks(part, width) for part in parts], ranks(sum(parts), bound)


RANK_COLUMNS = ("erank", "erank_centered", "stable_rank", "participation")
RANK_COLUMNS += ("num_rank", "mean_share", "rank_bound", "utilisation")
