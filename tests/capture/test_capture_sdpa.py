"""Foreign modules as users write them: what is captured, against what they compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe import InputError, NothingMeasuredError, scan
from attnprobe.capture import AttentionCall, Documents, Recorder
from attnprobe.capture.projection import compare_gate
from attnprobe.engine import measure
from attnprobe.forward import ForwardInputs
from attnprobe.metrics import METRICS
from attnprobe.result import KEY, Result
from attnprobe.scanning import Scan

WIDTH, HEADS, VOCABULARY = 24, 4, 19


def calls_of(
    model: nn.Module, *args: Tensor, mask: Tensor | None = None, **kwargs: object
) -> list[AttentionCall]:
    """Every call of one forward pass, whose first argument is (B, T) or (B, T, …)."""
    found: list[AttentionCall] = []
    recorder = Recorder(model.eval(), found.append, lambda *_: None)
    ones = torch.ones(args[0].shape[:2]) if mask is None else mask
    with torch.no_grad(), recorder.watch({"": Documents.from_mask(ones)}):
        model(*args, **kwargs)
    return found


class Attention(nn.Module):
    """Causal self-attention, written in one of several ways."""

    def __init__(self, style: str = "sdpa", project: str = "linear", gate: str = "none") -> None:
        super().__init__()
        self.style, self.project, self.gate = style, project, gate
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        if project in ("addmm", "addmm keywords", "matmul", "@"):
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)  # (d_in, d_out)
            self.bias = nn.Parameter(torch.randn(WIDTH))
        if gate != "none":
            columns = {"element": WIDTH, "head": HEADS, "shared": WIDTH // HEADS}.get(gate, WIDTH)
            self.gate_proj = nn.Linear(WIDTH, columns)
        if "norm" in gate:
            self.norm = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}[gate](WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = self._mixed(q, k, v).transpose(1, 2)  # (B, T, H, d)
        return self._projected(self._gated(y, x), batch, length)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.style == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.style == "mask":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.style == "scale":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        if self.style == "keywords":
            return F.scaled_dot_product_attention(
                query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=True
            )
        if self.style == "torch._C":
            return torch._C._nn.scaled_dot_product_attention(q, k, v, None, 0.0, True)
        folded = [y.flatten(0, 1) for y in (q, k, v)]  # (B·H, T, d)
        hidden = torch.zeros(length, length).masked_fill(~mask, -torch.inf)
        rows = {
            "folded": None,
            "folded mask": hidden,
            "folded full mask": hidden.expand(len(folded[0]), -1, -1),
        }[self.style]
        out = F.scaled_dot_product_attention(*folded, attn_mask=rows, is_causal=rows is None)
        return out.unflatten(0, (-1, HEADS))

    def _gated(self, y: Tensor, x: Tensor) -> Tensor:
        if self.gate in ("layernorm", "rmsnorm"):
            return self.norm(y.flatten(2)).unflatten(-1, (HEADS, -1))
        if self.gate == "in place":
            return y.mul_(torch.sigmoid(self.gate_proj(x)).unflatten(-1, (HEADS, -1)))
        if self.gate == "none":
            return y
        g = torch.sigmoid(3 * self.gate_proj(x))
        if self.gate == "element":
            return y * g.unflatten(-1, (HEADS, -1))
        return y * g[..., None] if self.gate == "head" else y * g[..., None, :]

    def _projected(self, y: Tensor, batch: int, length: int) -> Tensor:
        y = y.flatten(2)
        if self.project == "linear":
            return self.out(y)
        if self.project == "F.linear":
            return F.linear(input=y, weight=self.out.weight, bias=self.out.bias)
        if self.project == "@":
            return y @ self.weight + self.bias
        if self.project == "matmul":
            return torch.matmul(y, other=self.weight)
        flat = y.reshape(-1, WIDTH)
        if self.project == "addmm":
            flat = torch.addmm(self.bias, flat, self.weight)
        elif self.project == "addmm keywords":
            flat = torch.addmm(input=self.bias, mat1=flat, mat2=self.weight)
        else:
            return y  # none
        return flat.view(batch, length, WIDTH)

    def output_weight(self) -> Tensor:
        """(d_model, H·d)."""
        return self.weight.T if hasattr(self, "weight") else self.out.weight


class Block(nn.Module):
    def __init__(self, **options: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention(**options)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """The usual small language model."""

    def __init__(self, layers: int = 2, **options: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def text(batch: int = 3, length: int = 30) -> Tensor:
    torch.manual_seed(7)
    return torch.randint(0, VOCABULARY, (batch, length))


def by_hand(model: Gpt, tokens: Tensor) -> list[reference.Dense]:
    """The attention of every block, from its weights."""
    model = model.double()
    x, found = model.embedding(tokens), []
    for block in model.blocks:
        attn = block.attn
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in attn.qkv(block.norm(x)).chunk(3, -1)
        )
        n = tokens.shape[1]
        scale = 0.3 if attn.style == "scale" else None
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        found.append(reference.attend(q, k, v, visible, scale=scale))
        x = block(x)
    model.float()
    return found


def assert_close(mine: object, theirs: object, what: object = "") -> None:
    np.testing.assert_allclose(
        np.asarray(mine, dtype=float), np.asarray(theirs), rtol=1e-5, atol=1e-5, err_msg=str(what)
    )


STYLES = ("sdpa", "mask", "scale", "keywords", "torch._C", "folded", "folded mask")
PROJECTIONS = ("linear", "F.linear", "addmm", "addmm keywords", "matmul", "@")


@pytest.mark.parametrize("style", [*STYLES, "folded full mask"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_any_way_to_call_attention(style: str, batch: int) -> None:
    """Heads, first mass, entropy and ranks, whatever shape the call was made in."""
    model, tokens = Gpt(style=style), text(batch)
    result = scan(model, tokens)
    ids = torch.zeros_like(tokens)
    for layer, dense in enumerate(by_hand(model, tokens)):
        rows = result.heads[result.heads.layer == layer]
        assert len(rows) == HEADS, style
        stats = reference.stats(dense, ids, ids)
        assert_close(rows.f_attr, stats.first.mean((0, 2)), "f_attr")
        assert_close(rows.entropy, stats.entropy.mean((0, 2)), "entropy")
        w = model.blocks[layer].attn.out.weight
        for h, head in enumerate(rows.to_dict("records")):
            own = dense.output[:, h].flatten(0, 1) @ w[:, h * 6 : h * 6 + 6].double().T
            assert_close(head["erank"], reference.ranks(own.numpy(), 6)["erank"], "erank")


@pytest.mark.parametrize("project", PROJECTIONS)
@torch.no_grad()
def test_any_way_to_project(project: str) -> None:
    """W_O is found, and the value drain and ranks through it are right."""
    model, tokens = Gpt(project=project), text()
    calls = calls_of(model, tokens)
    assert [call.site.path for call in calls] == ["blocks.0.attn", "blocks.1.attn"]
    for call, block in zip(calls, model.blocks, strict=True):
        assert torch.equal(call.projection.weight, block.attn.output_weight())
        assert call.gate is None
        assert call.reasons == {}
        assert torch.equal(call.consumed, call.output.transpose(1, 2))
    result = scan(model, tokens)
    ids = torch.zeros_like(tokens)
    call = calls[0]
    drain = reference.value_drain(call.value, call.projection.weight, ids, HEADS)
    assert_close(result.heads[result.heads.layer == 0].value_drain, np.mean(drain, 0))


def test_no_projection_is_told_and_the_rest_measured() -> None:
    result = scan(Gpt(project="none"), text())
    assert result.heads.f_attr.notna().all()
    assert result.heads[["value_drain", "erank"]].isna().all(axis=None)
    told = result.not_measured[result.not_measured.reason.str.contains("no linear map")]
    assert {"value_drain", "rank"} <= set(told.metric)


class OutsideProjection(nn.Module):
    """As in BERT: the projection sits beside the attention, not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(project="none")
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dense(self.attn(x))


def test_a_projection_beside_the_module_is_found() -> None:
    model = nn.Sequential(OutsideProjection(), OutsideProjection())
    calls = calls_of(model, torch.randn(2, 9, WIDTH))
    assert len(calls) == 2
    for call, block in zip(calls, model, strict=True):
        assert call.projection.weight.data_ptr() == block.dense.weight.data_ptr()


# gates that are nobody's class


@pytest.mark.parametrize("gate", ["element", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_gate_is_found_by_comparison(gate: str, dtype: torch.dtype) -> None:
    model = Gpt(gate=gate).to(dtype)
    call = calls_of(model, text())[0]
    block = model.blocks[0]
    with torch.no_grad():
        x = block.norm(model.embedding(text()))
        g = torch.sigmoid(3 * block.attn.gate_proj(x)).float()
    assert (call.gate.position, call.gate.granularity) == ("G1", gate)
    g = g.unflatten(-1, (HEADS, -1)) if gate == "element" else g[..., None]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(call.gate.values.float(), g, rtol=0, atol=tolerance)
    assert torch.equal(call.projection.weight, block.attn.out.weight)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("size", [0.05, 1.0, 40.0])
def test_a_norm_is_no_gate(norm: str, size: float) -> None:
    """Also where it makes everything smaller, so that its factors lie in 0..1 as a gate's do."""
    model = Gpt(gate=norm)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[2 * WIDTH :] *= size
    for call in calls_of(model, text()):
        assert call.gate is None
        assert "norm" in call.reasons["gate"]
    result = scan(model, text())
    assert result.gates.empty
    assert result.heads.erank.notna().all()


class NormInside(nn.Module):
    """The hidden state is normed in the module, then gated, and H·d_v is as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate_proj = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(y * torch.sigmoid(self.gate_proj(x)))


def test_the_projection_of_a_gate_is_not_taken_for_the_output() -> None:
    model = nn.Sequential(NormInside())
    (call,) = calls_of(model, torch.randn(2, 9, WIDTH))
    assert torch.equal(call.projection.weight, model[0].out.weight)
    assert call.gate is not None
    assert call.gate.granularity == "element"


# torch's own modules


def mha_by_hand(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[reference.Dense, Tensor]:
    """The attention of batch-first inputs from the weights, and v as (B, H, T, d)."""
    w = {name: p.detach().double() for name, p in module.named_parameters()}
    if "in_proj_weight" in w:
        weights = list(w["in_proj_weight"].chunk(3))
    else:
        weights = [w[f"{x}_proj_weight"] for x in "qkv"]
    biases = list(w["in_proj_bias"].chunk(3)) if "in_proj_bias" in w else [0, 0, 0]
    q, k, v = (
        x.double() @ weight.T + b
        for x, weight, b in zip((query, key, value), weights, biases, strict=True)
    )
    batch = len(q)
    extra = 0
    if "bias_k" in w:
        k = torch.cat([k, w["bias_k"].expand(batch, 1, -1)], 1)
        v = torch.cat([v, w["bias_v"].expand(batch, 1, -1)], 1)
        extra = 1
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    if visible is not None:
        visible = F.pad(visible, (0, extra), value=True)
    if bias is not None:
        bias = F.pad(bias, (0, extra))
    sinks = torch.zeros(()) if module.add_zero_attn else None
    return reference.attend(q, k, v, visible, bias, sinks=sinks), v


class Mha(nn.Module):
    """nn.MultiheadAttention as a user calls it, on batch-first inputs."""

    def __init__(self, need_weights: bool = False, **options: object) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.batch_first = bool(options.get("batch_first", True))
        self.need_weights = need_weights
        self.attn = nn.MultiheadAttention(
            WIDTH, HEADS, **{"batch_first": self.batch_first, **options}
        )
        with torch.no_grad():
            for parameter in self.attn.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.4)

    def forward(self, x: Tensor, other: Tensor | None = None, **kwargs: object) -> Tensor:
        other = x if other is None else other
        if not self.batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        out, _ = self.attn(x, other, other, need_weights=self.need_weights, **kwargs)
        return out if self.batch_first else out.transpose(0, 1)


def assert_call(call: AttentionCall, dense: reference.Dense, v: Tensor, module: nn.Module) -> None:
    """The call measures as the attention does, with W_O at hand."""
    from attnprobe.engine import measure
    from attnprobe.engine.check import problem

    assert call.reasons == {}
    assert problem(call) is None
    got = measure(call)
    want = reference.stats(dense, call.queries.ids, call.keys.ids)
    for name in ("first", "null", "entropy"):
        mine, theirs = getattr(got, name).double(), getattr(want, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(got.mass.double(), want.mass, rtol=1e-5, atol=1e-4)
    assert torch.equal(got.visible.expand_as(want.visible), want.visible)
    torch.testing.assert_close(call.value.double(), v, rtol=1e-5, atol=1e-5)
    assert torch.equal(call.projection.weight, module.out_proj.weight)
    assert call.gate is None
    real = want.valid
    torch.testing.assert_close(call.output.double()[real], dense.output[real], rtol=1e-5, atol=1e-5)


def masks(
    kind: str, batch: int, length: int
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """Arguments of the module, which pairs are visible, and what is added."""
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1:, :4] = True  # on the left
    real = ~padding[:, None, None]
    bias = torch.randn(batch * HEADS, length, length)
    by_head = torch.rand(batch * HEADS, length, length) < 0.3
    by_head[:, range(length), range(length)] = False
    minus = torch.zeros(length, length).masked_fill(later, -torch.inf)
    return {
        "none": ({}, None, None),
        "bool": ({"attn_mask": later}, ~later, None),
        "float": ({"attn_mask": minus}, ~later, None),
        "padding": ({"key_padding_mask": padding}, real, None),
        "float padding": (
            {"key_padding_mask": torch.zeros(batch, length).masked_fill(padding, -torch.inf)},
            real,
            None,
        ),
        "both": ({"attn_mask": later, "key_padding_mask": padding}, real & ~later, None),
        "causal hint": ({"attn_mask": minus, "is_causal": True}, ~later, None),
        "bias": ({"attn_mask": bias}, None, bias.view(batch, HEADS, length, length)),
        "by head": (
            {"attn_mask": by_head},
            ~by_head.view(batch, HEADS, length, length),
            None,
        ),
    }[kind]


MASKS = (
    "none",
    "bool",
    "float",
    "padding",
    "float padding",
    "both",
    "causal hint",
    "bias",
    "by head",
)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(kind: str, need_weights: bool, batch_first: bool) -> None:
    model = Mha(need_weights, batch_first=batch_first).eval()
    x = torch.randn(3, 11, WIDTH)
    kwargs, visible, bias = masks(kind, 3, 11)
    padding = kwargs.get("key_padding_mask")
    mask = torch.ones(3, 11)
    if padding is not None:
        mask = (padding == 0).float()
    (call,) = calls_of(model, x, mask=mask, **kwargs)
    assert call.site.kind == "self"
    assert_call(call, *mha_by_hand(model.attn, x, x, x, visible, bias), model.attn)


@pytest.mark.parametrize("kind", ["none", "bool", "padding", "both", "bias"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"bias": False},
    ],
    ids=str,
)
def test_multihead_attention_with_more_keys(
    kind: str, need_weights: bool, options: dict[str, bool]
) -> None:
    model = Mha(need_weights, **options).eval()
    x = torch.randn(3, 11, WIDTH)
    kwargs, visible, bias = masks(kind, 3, 11)
    padding = kwargs.get("key_padding_mask")
    mask = torch.ones(3, 11) if padding is None else (~padding).float()
    (call,) = calls_of(model, x, mask=mask, **kwargs)
    assert call.site.kind == "self"
    assert_call(call, *mha_by_hand(model.attn, x, x, x, visible, bias), model.attn)


@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 10}], ids=str)
def test_multihead_cross_attention(options: dict[str, int]) -> None:
    model = Mha(**options).eval()
    x, other = torch.randn(2, 7, WIDTH), torch.randn(2, 12, options.get("kdim", WIDTH))
    (call,) = calls_of(model, x, other)
    assert call.site.kind == "cross"
    assert_call(call, *mha_by_hand(model.attn, x, other, other), model.attn)


@pytest.mark.parametrize("masked", [True, False])
def test_multihead_attention_of_one_sample(masked: bool) -> None:
    """Without a batch dimension."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS).eval()
    x = torch.randn(9, WIDTH)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1) if masked else None
    found: list[AttentionCall] = []
    recorder = Recorder(module, found.append, lambda *_: None)
    with torch.no_grad(), recorder.watch({}):
        module(x, x, x, attn_mask=later)
    (call,) = found
    visible = None if later is None else ~later
    assert_call(call, *mha_by_hand(module, x[None], x[None], x[None], visible), module)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("how", ["layer", "stack"])
def test_the_fused_path_of_torch_layers_is_kept_off(
    norm_first: bool, activation: str, padded: bool, how: str
) -> None:
    """In eval mode these layers go round their own modules unless something is watching."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 32, 0.1, activation, batch_first=True, norm_first=norm_first
    )
    model = (
        layer
        if how == "layer"
        else nn.TransformerEncoder(layer, 3, enable_nested_tensor=not norm_first)
    )
    model.eval()
    x = torch.randn(2, 9, WIDTH)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    kwargs = {"src_key_padding_mask": padding} if padded else {}
    mask = (~padding).float() if padded else torch.ones(2, 9)
    calls = calls_of(model, x, mask=mask, **kwargs)
    assert len(calls) == (1 if how == "layer" else 3)
    assert [call.site.layer for call in calls] == list(range(len(calls)))
    assert {call.site.stack for call in calls} == {"encoder"}
    attention = (layer if how == "layer" else model.layers[0]).self_attn
    hidden = (layer if how == "layer" else model.layers[0]).norm1(x) if norm_first else x
    visible = ~padding[:, None, None] if padded else None
    with torch.no_grad():
        dense, v = mha_by_hand(attention, hidden, hidden, hidden, visible)
    assert_call(calls[0], dense, v, attention)


def test_torch_transformer_has_its_three_kinds() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 32, batch_first=True).eval()
    source, target = torch.randn(2, 9, WIDTH), torch.randn(2, 6, WIDTH)
    later = nn.Transformer.generate_square_subsequent_mask(6)
    calls = calls_of(model, source, target, tgt_mask=later)
    assert [(c.site.stack, c.site.kind, c.site.layer) for c in calls] == [
        ("encoder", "self", 0),
        ("encoder", "self", 1),
        ("decoder", "self", 0),
        ("decoder", "cross", 0),
        ("decoder", "self", 1),
        ("decoder", "cross", 1),
    ]
    assert [c.site.causal for c in calls] == [False, False, True, False, True, False]


# what cannot be measured


class Dropping(nn.Module):
    """Dropout that never goes off."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        q = self.embedding(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        return self.out(y.transpose(1, 2).flatten(2))


def test_dropout_in_eval_mode_is_refused() -> None:
    with pytest.raises(NothingMeasuredError, match="dropout is on"):
        scan(Dropping(), text())


def test_dropout_in_multihead_attention_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            self.attn.train()
            x = self.embedding(tokens)
            return self.attn(x, x, x)[0]

    with pytest.raises(NothingMeasuredError, match="dropout"):
        scan(Noisy(), text())


def test_a_gate_in_place_is_a_gate() -> None:
    """The attention output is no longer there when W_O is met: it is attended again."""
    mine, plain = Gpt(gate="in place"), Gpt(gate="element")
    for ours, theirs in zip(mine.blocks, plain.blocks, strict=True):
        for part in (ours.attn.gate_proj.weight, ours.attn.gate_proj.bias):
            part.data *= 3
        theirs.load_state_dict(ours.state_dict())
        for part in (theirs.attn.gate_proj.weight, theirs.attn.gate_proj.bias):
            part.data /= 3  # which its formula multiplies by 3
    theirs, ours = scan(plain, text()), scan(mine, text())
    assert ours.not_measured.equals(theirs.not_measured)
    for column in ("f_attr", "entropy", "erank", "value_drain", "gate_mean"):
        assert_close(ours.heads[column], theirs.heads[column], column)


class Overwriting(nn.Module):
    """A layer that writes over what its figures need, after the call."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in self.qkv(self.embedding(tokens)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.part in ("q", "k", "v"):
            {"q": q, "k": k, "v": v}[self.part][:, :, 4].add_(1)
        y = y.transpose(1, 2).flatten(2)
        made = self.out(y)
        if self.part == "what W_O reads":
            y.zero_()
        return made


@pytest.mark.parametrize("part", ["q", "k", "v", "what W_O reads"])
def test_what_a_call_needs_may_not_be_written_over(part: str) -> None:
    with pytest.raises(NothingMeasuredError, match="changed in place"):
        scan(Overwriting(part), text())


def test_in_place_sums_of_the_residual_stream_do_not_matter() -> None:
    class InPlace(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x += block.attn(block.norm(x))
                x += block.mlp(x)
            return self.head(x)

    mine, plain = scan(InPlace(), text()), scan(Gpt(), text())
    for column in ("f_attr", "entropy", "erank", "value_drain"):
        assert_close(mine.heads[column], plain.heads[column], column)


class EagerAttention(nn.Module):
    """A softmax that is no call of a softmax: nothing to see."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT / WIDTH**0.5).exp()
        return weights / weights.sum(-1, keepdim=True) @ v


def test_attention_that_was_not_seen_is_reported() -> None:
    class Mixed(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].attn = EagerAttention()

    result = scan(Mixed(), text())
    assert result.layers.site.tolist() == ["blocks.0.attn"]
    told = result.not_measured[result.not_measured.site == "blocks.1.attn"]
    assert told.metric.tolist() == ["all"]
    assert "no softmax was seen" in told.reason.iloc[0]


def test_a_model_without_attention_measures_its_perplexity_only() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embedding(tokens)

    result = scan(Bag(), text())
    assert result.figure("ppl") is not None
    assert "no attention call" in " ".join(result.not_measured.reason)
    with pytest.raises(NothingMeasuredError):
        scan(Bag(), text(), metrics=["sink"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_not_seen_and_does_no_harm() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.attention = torch.jit.script(Attend())

        def forward(self, tokens: Tensor) -> Tensor:
            return self.attention(self.embedding(tokens))

    with pytest.raises(NothingMeasuredError):
        scan(Outer(), text())


def test_nan_weights_are_told() -> None:
    model = Gpt()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0, 0] = math.nan
    with pytest.raises(NothingMeasuredError, match="NaN"):
        scan(model, text())


@pytest.mark.parametrize("bad", [0, 2])
def test_a_sample_that_comes_out_as_nan_spoils_no_figure_silently(bad: int) -> None:
    """Whichever sample it is, in whichever batch, alone or merged."""

    class Spoilt(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.blocks[0](self.embedding(tokens))
            x = torch.where(tokens[:, :1, None] == 18, math.nan, x)
            return self.head(self.blocks[1](x))

    model, tokens = Spoilt(), text() % 18
    tokens[bad, 0] = 18
    parts = [Scan(model, list(METRICS)) for _ in tokens]
    for part, row in zip(parts, tokens, strict=True):
        part.add(ForwardInputs(row[None], None, None, {}))
    for part in parts[1:]:
        parts[0].merge(part)
    results = [scan(model, tokens, batch_size=size) for size in (1, 2, 3)]
    for result in (*results, parts[0].result()):
        spoilt = result.heads.site == "blocks.1.attn"
        assert spoilt.any()
        assert result.heads[spoilt].drop(columns=list(KEY)).isna().all(axis=None)
        assert result.heads[~spoilt].f_attr.notna().all()
        assert result.figure("f_attr") is None  # a mean over some of the layers is none
        told = result.not_measured[result.not_measured.site == "blocks.1.attn"]
        assert {"all", "m_act"} <= set(told.metric)
        assert told.reason.str.contains("NaN").all()
        assert result.figure("ppl") is None
        assert "NaN" in result.not_measured.set_index("metric").reason["ppl"]


# shapes that broadcast


@pytest.mark.parametrize("part", ["key", "value", "both", "heads"])
def test_keys_that_broadcast(part: str) -> None:
    """One set of keys or values for a whole batch, or for all heads."""

    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            q = self.embedding(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            k = q[:1] if part in ("key", "both") else q
            v = q[:1] if part in ("value", "both") else q
            if part == "heads":
                k, v = q[:, :1], q[:, :1]
            y = F.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))

    model, tokens = Broadcast(), text(3, 12)
    with torch.no_grad():
        q = model.embedding(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k = q[:1].expand_as(q) if part in ("key", "both") else q
    v = q[:1].expand_as(q) if part in ("value", "both") else q
    if part == "heads":
        k, v = q[:, :1], q[:, :1]
    dense = reference.attend(q, k, v)
    ids = torch.zeros_like(tokens)
    for size in (1, 3):
        if size == 1 and part != "heads":
            continue  # the model itself depends on its batch
        result = scan(model, tokens, batch_size=size)
        stats = reference.stats(dense, ids, ids)
        assert_close(result.heads.f_attr, stats.first.mean((0, 2)))
        assert_close(result.heads.entropy, stats.entropy.mean((0, 2)))
        drain = reference.value_drain(v, model.out.weight.detach(), ids, HEADS)
        assert_close(result.heads.value_drain, np.mean(drain, 0))


def sites(result: Result) -> list[str]:
    return result.layers.site.tolist()


def test_a_module_used_twice_has_two_sites() -> None:
    class Shared(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x)

    result = scan(Shared(), text())
    assert sites(result) == ["blocks.0.attn", "blocks.0.attn#1", "blocks.0.attn#2"]
    assert result.layers.layer.tolist() == [0, 1, 2]
    assert result.layers.f_attr.nunique() == 3
    assert result.layers.erank.notna().all()


class Nest(nn.Module):
    """Blocks in stages, under any names."""

    def __init__(self, container: str, attribute: str = "blocks") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attribute = attribute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [Block() for _ in range(4)]
        if container == "stages":
            blocks = [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])]
        setattr(self, attribute, nn.ModuleList(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * 50
        for block in getattr(self, self.attribute):
            x = block(x)
        return x


def test_a_block_is_the_innermost_numbered_module_around_an_attention() -> None:
    flat, staged = scan(Nest("blocks"), text()), scan(Nest("stages"), text())
    assert sites(staged) == [f"blocks.{i}.{j}.attn" for i in (0, 1) for j in (0, 1)]
    assert_close(staged.layers.m_act, flat.layers.m_act)
    assert staged.layers.m_act.nunique() == 4


def test_massive_activations_in_stages_keep_their_documents() -> None:
    model = Nest("stages")
    with torch.no_grad():
        model.embedding.weight[18, 3] = 1e4
    tokens = text() % 18
    tokens[2, 5] = 18
    result = scan(model, tokens, batch_size=1)
    assert set(result.massive.document) == {2}
    assert set(result.massive.position) == {5}
    assert set(result.massive.site) == set(result.layers.site)


@pytest.mark.parametrize(
    ("attribute", "stack"),
    [
        ("context_layers", "decoder"),
        ("layers", "decoder"),
        ("text_model", "text"),
        ("encoder", "encoder"),
        ("visual", "vision"),
        ("vision_encoder", "vision"),
        ("text_encoder", "encoder"),
        ("audio_decoder", "decoder"),
    ],
)
def test_the_stack_is_read_from_whole_words(attribute: str, stack: str) -> None:
    result = scan(Nest("blocks", attribute), text(), metrics=["sink"])
    assert set(result.layers["stack"]) == {stack}


class Parts(nn.Module):
    """Causal attention in several calls, or over the heads of every token."""

    def __init__(self, way: str, is_masked: bool = False) -> None:
        super().__init__()
        self.is_masked = is_masked
        self.way, self.embedding = way, nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(self.embedding(tokens)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, d)
        length, attend = tokens.shape[1], F.scaled_dot_product_attention
        mask = torch.ones(length, length).tril().bool()
        if self.way == "whole":
            y = attend(q, k, v, is_causal=True)
        elif self.way.startswith(("samples", "heads")):
            unit = ["samples", "heads"].index(self.way.partition(",")[0])
            rows = [x.transpose(0, unit) for x in (q, k, v)]  # what comes one by one stands first
            if "strided" not in self.way:
                rows = [x.contiguous() for x in rows]
            if "4-D" in self.way:
                rows = [x.unsqueeze(1 + unit) for x in rows]
            own = {"attn_mask": mask} if self.is_masked else {"is_causal": True}
            made = [attend(*x, **own) for x in zip(*rows, strict=True)]
            y = torch.stack(made).reshape(rows[0].shape[0], -1, *q.shape[2:]).transpose(0, unit)
        elif self.way == "over heads":
            y = attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        else:
            blocks = [slice(n, n + 8) for n in range(0, length, 8)]
            back = {"growing": length, "sliding": 8}[self.way]
            keys = [slice(max(0, b.start - back), b.stop) for b in blocks]
            y = torch.cat(
                [
                    attend(q[:, :, b], k[:, :, s], v[:, :, s], attn_mask=mask[b, s])
                    for b, s in zip(blocks, keys, strict=True)
                ],
                2,
            )
        return self.out(y.transpose(1, 2).flatten(2))


def parts(way: str, batch: int = 3, is_masked: bool = False) -> Result:
    torch.manual_seed(0)
    return scan(Parts(way, is_masked), text(batch, 24), metrics=["sink", "entropy", "rank"])


@pytest.mark.parametrize("batch", [1, 2, 3, HEADS])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("layout", ["strided", "contiguous", "4-D"])
@pytest.mark.parametrize("way", ["samples", "heads"])
def test_heads_and_samples_one_by_one_are_what_they_are_together(
    way: str, layout: str, is_masked: bool, batch: int
) -> None:
    whole, pieces = parts("whole", batch), parts(f"{way}, {layout}", batch, is_masked)
    for column in ("f_attr", "entropy", "erank"):
        assert_close(pieces.heads[column], whole.heads[column], column)
    assert len(sites(pieces)) == 1


class Turns(nn.Module):
    """Heads, or samples, each projected and attended to in its turn."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embedding = way, nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH // HEADS) for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x, attend = self.embedding(tokens), F.scaled_dot_product_attention
        if self.way == "heads":
            y = [attend(*part(x).chunk(3, -1), is_causal=True) for part in self.qkv]
            return self.out(torch.cat(y, -1))
        y = []
        for sample in x:
            heads = torch.stack([part(sample) for part in self.qkv])  # (H, T, 3 d)
            y.append(attend(*heads.chunk(3, -1), is_causal=True).transpose(0, 1).flatten(1))
        return self.out(torch.stack(y))


@pytest.mark.parametrize("batch", [2, 3, HEADS])
@pytest.mark.parametrize("way", ["samples", "heads"])
def test_turns_that_could_be_of_either_are_not_told(way: str, batch: int) -> None:
    torch.manual_seed(0)
    model = Turns(way)
    if way == "samples" or batch == HEADS:
        with pytest.raises(NothingMeasuredError, match="cannot be told"):
            scan(model, text(batch, 24))
        return
    turns = scan(model, text(batch, 24))
    alone = scan(model, text(batch, 24), batch_size=1)
    for column in ("f_attr", "entropy"):
        assert_close(turns.heads[column], alone.heads[column])


@pytest.mark.parametrize("way", ["growing", "sliding"])
def test_queries_in_blocks_are_not_taken_for_texts(way: str) -> None:
    with pytest.raises(NothingMeasuredError, match="queries come in parts"):
        parts(way)


def test_attention_of_heads_to_heads_is_not_over_tokens() -> None:
    with pytest.raises(NothingMeasuredError, match="not those of the tokens"):
        parts("over heads")


class Mixing(nn.Module):
    """Attention of one sequence to another one, or itself, under a given mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            z.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for z in (self.q(x), *self.kv(y).chunk(2, -1))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def first_and_mass(call: AttentionCall, mask: Tensor, real: Tensor, keys: Tensor) -> list[Tensor]:
    """(B, H, T) attention on the first real key, and (B, H, T) that all real queries give."""
    logits = (call.query @ call.key.mT * call.scale).masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0) * real[:, None, :, None]
    first = keys.long().argmax(-1)[:, None, None, None].expand(*weights.shape[:3], 1)
    return [weights.gather(-1, first)[..., 0], weights.sum(2)]


def assert_first_and_mass(call: AttentionCall, *given: Tensor) -> None:
    stats = measure(call)
    for ours, theirs in zip([stats.first, stats.mass], first_and_mass(call, *given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class Reader(nn.Module):
    """An encoder-decoder whose attention to the source is called nothing that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.enc = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Mixing()])
        names = ("self_attn", "src_attn")
        self.dec = nn.ModuleList(nn.ModuleDict({n: Mixing() for n in names}) for _ in range(2))

    def forward(
        self, tokens: Tensor, decoder_tokens: Tensor, own: Tensor, source: Tensor
    ) -> Tensor:
        x, y = self.embedding(tokens), self.embedding(decoder_tokens)
        x = self.enc[0](x, x, source)
        for block in self.dec:
            y = block["src_attn"](block["self_attn"](y, y, own), x, source)
        return y


def test_a_source_as_long_as_the_target_is_another_sequence() -> None:
    torch.manual_seed(0)
    model, tokens, target = Reader().eval(), text(2, 12), text(2, 12).flip(1)
    real = torch.arange(12) >= torch.tensor([[0], [3]])  # padded on the left
    seen = torch.arange(12) < torch.tensor([[7], [12]])  # padded on the right
    own, source = seen[:, None, None] & torch.ones(12, 12).tril().bool(), real[:, None, None]
    streams = {"": Documents.from_mask(real), "decoder": Documents.from_mask(seen)}
    streams["encoder"] = streams[""]
    found: list[AttentionCall] = []
    with torch.no_grad(), Recorder(model, found.append, lambda *_: None).watch(streams):
        model(tokens, target, own, source)
    cross = ["dec.0.src_attn", "dec.1.src_attn"]
    assert [c.site.path for c in found if c.site.kind == "cross"] == cross
    assert [(c.site.stack, c.site.layer) for c in found if c.site.kind == "cross"] == [
        ("decoder", 0),
        ("decoder", 1),
    ]
    for call in found:
        of_text = call.site.path.startswith("dec")
        queries = seen if of_text else real
        keys = seen if call.site.path.endswith("self_attn") else real
        assert_first_and_mass(call, own if keys is seen else source, queries, keys)


def test_an_image_of_as_many_patches_as_there_are_tokens_is_no_text() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.patches = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(10, WIDTH)
            self.vision_encoder, self.text = Mixing(), Mixing()

        def forward(self, tokens: Tensor, pixels: Tensor, own: Tensor) -> Tensor:
            x, y = self.patches(pixels), self.embedding(tokens)
            x = self.vision_encoder(x, x, torch.ones(1, 1, 1, 1).bool())
            return self.text(y, y, own) + x.mean(1, keepdim=True)

    torch.manual_seed(0)
    model, tokens, pixels = Seeing().eval(), text(2, 12), torch.randn(2, 12, 10)
    real = torch.arange(12) >= torch.tensor([[0], [5]])
    own = real[:, None, None] & torch.ones(12, 12).tril().bool()
    found = calls_of(model, tokens, pixels, own, mask=real)
    image = next(call for call in found if call.site.path == "vision_encoder")
    every = torch.ones_like(real)
    assert_first_and_mass(image, every[:, None, None], every, every)
    text_call = next(call for call in found if call.site.path == "text")
    assert_first_and_mass(text_call, own, real, real)


def test_inputs_that_are_no_tokens() -> None:
    """Images in patches: every sample is a document, sinks have no token, nothing is predicted."""

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(10, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.patches(x)
            for block in self.blocks:
                x = block(x)
            return x.mean(1)

    torch.manual_seed(0)
    model = Vision()
    result = scan(model, torch.randn(3, 40, 10), epsilon=0.05, batch_size=2)
    assert set(result.sinks.documents_total) == {3}
    assert result.sinks.token_id.isna().all()
    assert result.layers.m_act.notna().all()
    assert result.heads.f_attr.notna().all()
    assert "ppl" in set(result.not_measured.metric)


class Pair(nn.Module):
    """Attention outside any numbered module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Attention(), Attention()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.second(x + self.first(x))


def test_no_block_is_told() -> None:
    result = scan(Pair(), text())
    assert result.layers.m_act.isna().all()
    told = result.not_measured[result.not_measured.metric == "m_act"]
    assert told.site.tolist() == ["first", "second"]
    assert result.layers.erank.notna().all()


def test_where_attention_gives_zero_no_gate_is_read() -> None:
    """A ratio to 0 says nothing of the gate: it is null with a reason, not 0."""
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(2, 3, 5, 4, generator=generator)  # (B, H, T, d)
    output[:, 1] = 0
    gate = torch.rand(2, 5, 3, 4, generator=generator)
    real = torch.ones(2, 5, dtype=torch.bool)
    found = compare_gate(output.transpose(1, 2) * gate, output, real)
    assert isinstance(found, str)
    assert "0 somewhere" in found


def test_padding_may_give_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(2, 3, 5, 4, generator=generator)
    output[:, :, 4] = 0
    gate = torch.rand(2, 5, 3, 1, generator=generator)
    real = torch.ones(2, 5, dtype=torch.bool)
    real[:, 4] = False
    found = compare_gate(output.transpose(1, 2) * gate, output, real)
    assert not isinstance(found, str)
    assert found is not None
    assert found.granularity == "head"
    torch.testing.assert_close(found.values[real], gate[real])


def test_a_compiled_model_is_measured_as_it_was_written() -> None:
    model, tokens = Gpt(), text()
    plain = scan(model, tokens)
    compiled = scan(torch.compile(model), tokens)
    assert compiled.layers.site.tolist() == plain.layers.site.tolist()
    assert compiled.layers.f_attr.tolist() == plain.layers.f_attr.tolist()
    assert compiled.architecture["class"] == "Gpt"


def test_two_maps_that_read_the_output_leave_w_o_unknown() -> None:
    """A probe's linear map before W_O must not be taken for it."""

    class Both(nn.Module):
        def __init__(self, out: nn.Linear) -> None:
            super().__init__()
            self.aux, self.out = nn.Linear(WIDTH, 3), out

        def forward(self, x: Tensor) -> Tensor:
            self.aux(x)
            return self.out(x)

    model = Gpt()
    model.blocks[0].attn.out = Both(model.blocks[0].attn.out)
    result = scan(model, text(), metrics=["rank", "sink"])
    first, second = result.layers.erank
    assert math.isnan(first)
    assert second > 1
    told = result.not_measured.set_index("site").reason["blocks.0.attn"]
    assert told.str.contains("which is W_O cannot be told").any()
    assert result.samples.value_drain.isna().sum() == result.samples.value_drain.notna().sum()


def test_probabilities_are_no_logits() -> None:
    class Certain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Gpt()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).softmax(-1)

    result = scan(Certain(), text())
    assert result.figure("ppl") is None
    assert "ppl" in set(result.not_measured.metric)


def test_no_layers_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="layers is empty"):
        scan(Gpt(), text(), layers=[])


def test_a_result_is_one_line() -> None:
    shown = repr(scan(Gpt(), text(), metrics=["sink"]))
    assert shown.startswith("<Result Gpt: 2 layers, 8 heads in all, ")
    assert "; f_attr 0." in shown
    assert "\n" not in shown


def test_heads_merged_interleaved_give_no_ranks_of_heads() -> None:
    class Interleaved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            q, k, v = (
                y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
            )
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, d)
            return self.out(o.permute(0, 2, 3, 1).flatten(2))

    result = scan(Interleaved(), text(), metrics=["sink", "rank"])
    assert result.heads.f_attr.notna().all()
    assert result.heads.erank.isna().all()
    assert result.heads.value_drain.isna().all()
    assert result.not_measured.reason.str.contains("order of its own").any()


@pytest.mark.parametrize("version", [1, 2])
def test_weights_that_are_freed_behind_their_module_are_read_before(version: int) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if version == 2 and not hasattr(fsdp, "fully_shard"):
        pytest.skip("before torch 2.6")
    dist = torch.distributed
    plain, model = Gpt(), Gpt()
    expected = scan(plain, text())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if version == 1:
            model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for part in (*(block.attn for block in model.blocks), model):
                fsdp.fully_shard(part, mesh=mesh)
        result = scan(model, text(), batch_size=2)
    finally:
        dist.destroy_process_group()
    for column in ("f_attr", "entropy", "value_drain", "erank"):
        assert_close(result.heads[column], expected.heads[column], column)
