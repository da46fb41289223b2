"""Gates of every gated family of transformers against the same computed by hand.

By hand: from the attention module's weights and what a plain forward hook says it was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnprobe
from attnprobe.capture import AttentionCall, Documents, Recorder, gates

transformers = pytest.importorskip("transformers")
BATCH, LENGTH = 2, 20
TOKENS = torch.randint(5, 90, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
Hand = Callable[[Any, Tensor], Tensor]  # (attention module, hidden states) -> (B, T, H, d | 1)


def by_head(logits: Tensor, width: int) -> Tensor:
    return logits.unflatten(-1, (-1, width))


def packed(module: Any, x: Tensor) -> Tensor:
    """`q_proj` holds every head's query and behind it that head's gate."""
    return by_head(module.q_proj(x), 2 * module.head_dim)[..., module.head_dim :].sigmoid()


def of_gate_proj(module: Any, x: Tensor) -> Tensor:
    width = getattr(module, "v_head_dim", None) or module.head_dim
    return by_head(module.gate_proj(x), width).sigmoid()


def of_g_proj(module: Any, x: Tensor) -> Tensor:
    return module.g_proj(x)[..., None].sigmoid()


def of_inner(name: str) -> Hand:
    """A map of its own in the module that holds W_O."""
    return lambda module, x: by_head(getattr(module, name).gate_proj(x), 8).sigmoid()


def dory(module: Any, x: Tensor) -> Tensor:
    stretched = module.gate_proj(x) * (module.s_gate * module.s_gate_scale) ** 2
    return by_head(stretched, module.head_dim).sigmoid()


def beam(module: Any, x: Tensor) -> Tensor:
    logits = by_head(module.gate_proj(x), module.head_dim)
    return torch.sigmoid(logits + module.gate_bias[:, None])


def axk2(module: Any, x: Tensor) -> Tensor:
    """Made of the latent queries, not of the hidden state."""
    latent = module.q_a_proj(x)
    made = module.q_gate_proj(torch.cat([module.q_a_layernorm(latent), latent], -1))
    each = module.qk_head_dim + module.v_head_dim
    return by_head(made, each)[..., module.qk_head_dim :].sigmoid()


def laguna(module: Any, x: Tensor) -> Tensor:
    made = module.g_proj(x)
    return F.softplus(made[..., None] if module.gate_per_head else by_head(made, module.head_dim))


# fields of every config that has them; key and query heads differ, and hidden size and H·d do not,
# so that a gate's map could be taken for W_O
SMALL = {
    "vocab_size": 100,
    "unpadded_vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "embedding_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mlp_layer_types": ["dense", "sparse"],
}
INDEXED = {
    **LATENT,
    "layer_types": ["indexed_attention"] * 2,
    "index_topk": 8,
    "index_head_dim": 8,
    "index_n_heads": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
TURNED = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "rel_extent": 16,
}
LAGUNA = {**WINDOWED, "num_attention_heads_per_layer": [4, 8]}


@dataclass
class Family:
    """A model type, how its gate is made, and what its small config needs besides.

    Attributes:
        gates: how many attention modules have one.
        granularity, activation: what must be said of it.
        eager: it has no sdpa path.
    """

    type: str
    hand: Hand
    gates: int = 2
    granularity: str = "element"
    activation: str = "sigmoid"
    changes: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    eager: bool = False
    name: str = ""


FAMILIES = [
    Family("qwen3_next", packed, 1, changes=LINEAR),
    Family("qwen3_5_text", packed, 1, changes=LINEAR),
    Family("qwen3_5_moe_text", packed, 1, changes=LINEAR),
    Family(
        "qwen4_exp_text",
        packed,
        1,
        changes={
            **LINEAR,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
    ),
    Family("afmoe", of_gate_proj, changes=WINDOWED),
    Family("dory", dory, changes=WINDOWED, forward={"use_cache": False}),
    Family(
        "muse_glimmer_text", of_gate_proj, changes={**WINDOWED, "layer_rope_theta": [10000.0, 0]}
    ),
    Family("muse_spark_text", of_gate_proj, changes={**WINDOWED, "layer_rope_theta": [10000.0, 0]}),
    Family("beam", beam, changes={**WINDOWED, "mlp_layer_types": ["dense", "sparse"]}),
    Family("hrm_text", of_gate_proj, 4),
    Family("hrm_text", of_gate_proj, 4, changes={"attention_bias": True}, name="hrm_text bias"),
    Family("neomme", of_inner("output_projection"), changes={**WINDOWED, **TURNED}),
    Family("inkling2_text", of_inner("o_proj"), changes=INKLING, eager=True),
    Family("inkling2_loop_text", of_inner("o_proj"), changes=INKLING, eager=True),
    Family("hy_v4", of_gate_proj, changes=INDEXED, eager=True),
    Family(
        "hy_v4_vl_text",
        of_gate_proj,
        changes={**INDEXED, "rope_parameters": {**ROPE, "mrope_section": [2, 0, 0]}},
        eager=True,
    ),
    Family("axk2", axk2, changes=INDEXED),
    Family(
        "bailing_hybrid",
        of_g_proj,
        1,
        "head",
        changes={
            **LATENT,
            "q_lora_rank": None,
            "num_expert_group": 1,
            "num_experts_per_token": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    Family(
        "dots3_note_text",
        of_g_proj,
        2,
        "head",
        changes={
            **INDEXED,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "head_dim": 12,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 12,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        },
    ),
    Family("lfm3", of_g_proj, 1, "head", changes={"layer_types": ["conv", "full_attention"]}),
    Family("step3p7", of_g_proj, 2, "head", changes=WINDOWED),
    Family("laguna", laguna, 2, "head", "softplus", LAGUNA),
    Family(
        "laguna",
        laguna,
        2,
        "element",
        "softplus",
        {**LAGUNA, "gating": "per-element"},
        name="laguna elements",
    ),
]


def config_of(kind: Any, changes: dict[str, Any]) -> Any:
    known = {name: size for name, size in SMALL.items() if name in vars(kind())}
    return kind(**known | changes)


def made(family: Family, dtype: torch.dtype = torch.float32) -> nn.Module:
    how = "eager" if family.eager else "sdpa"
    if family.type == "step3p7":  # its text model is in no mapping
        from transformers.models.step3p7 import modeling_step3p7 as step

        config = config_of(step.Step3p7TextConfig, family.changes)
        model = step.Step3p7TextModel._from_config(config, attn_implementation=how, dtype=dtype)
    else:
        config = config_of(transformers.CONFIG_MAPPING[family.type], family.changes)
        model = transformers.AutoModel.from_config(config, attn_implementation=how, dtype=dtype)
    return redrawn(model)


def redrawn(model: nn.Module) -> nn.Module:
    """Weights that make gates differ, also where a model starts with all of them the same."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2:
                weight.add_(0.3 * noise)
            elif "embed" in name:
                weight.copy_(noise)
            else:
                weight.copy_(1.4 * noise * weight[0].numel() ** -0.5)
    return model.eval()


@contextmanager
def given(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The hidden states that every module was given, by its path, call by call."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    handles = []
    for path, module in model.named_modules():

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            first = args[0] if args else kwargs.get("hidden_states")
            if isinstance(first, Tensor):
                seen[path].append(first)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def watched(model: nn.Module, *args: Any, **kwargs: Any) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    batch, length = args[0].shape[:2]
    documents = {"": Documents.whole(batch, length, torch.device("cpu"))}
    with torch.no_grad(), Recorder(model, calls.append, lambda *_: None).watch(documents):
        model(*args, **kwargs)
    return calls


def expected_of(
    model: nn.Module, call: AttentionCall, seen: dict[str, list[Tensor]], hand: Hand
) -> Tensor:
    path, _, number = call.site.path.partition("#")
    with torch.no_grad():
        return hand(model.get_submodule(path), seen[path][int(number or 0)])


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are read, not taken from the ratio of W_O's input to the attention output."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the gate was compared")

    monkeypatch.setattr(gates, "compare_gate", refuse)


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name or family.type)
def test_gates_are_those_computed_by_hand(family: Family) -> None:
    model = made(family)
    with given(model) as seen:
        calls = watched(model, TOKENS, **family.forward)
    gated = {call.site.path.partition("#")[0] for call in calls if call.gate is not None}
    assert len(gated) == family.gates
    for call in calls:
        assert call.gate is not None, call.reasons
        expected = expected_of(model, call, seen, family.hand)
        assert call.gate.values.shape == expected.shape
        torch.testing.assert_close(call.gate.values, expected, rtol=1e-5, atol=1e-7)
        assert call.gate.position == "G1"
        assert call.gate.granularity == family.granularity
        assert call.gate.activation == family.activation
        assert call.gate.source == "query"
        assert call.projection is not None  # and not the gate's own, which is as wide
        owner = model.get_submodule(call.site.path.partition("#")[0])
        assert call.projection.weight.data_ptr() in {
            p.data_ptr() for name, p in owner.named_parameters() if "o_proj" in name
        }


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name or family.type)
def test_tables_hold_what_the_hand_says(family: Family) -> None:
    model = made(family)
    with given(model) as seen:
        result = attnprobe.scan(model, TOKENS, metrics=["gate"], **family.forward)
    rows = result.gates.to_dict("records")
    assert len({row["site"].partition("#")[0] for row in rows}) == family.gates
    for row in rows:
        path, _, number = row["site"].partition("#")
        with torch.no_grad():
            expected = family.hand(model.get_submodule(path), seen[path][int(number or 0)])
        if not pd.isna(row["head"]):
            expected = expected[:, :, int(row["head"])]
        assert row["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
        assert row["below_0.1"] == pytest.approx((expected < 0.1).double().mean().item(), abs=1e-9)
    layers = result.layers.to_dict("records")
    assert len(layers) == len({row["site"] for row in rows})
    for layer in layers:
        whole = [r for r in rows if r["site"] == layer["site"] and pd.isna(r["head"])]
        assert [layer["gate_mean"]] == [row["mean"] for row in whole]


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name or family.type)
def test_gates_of_half_precision_are_the_same_reading(family: Family) -> None:
    model = made(family, torch.bfloat16)
    with given(model) as seen:
        calls = watched(model, TOKENS, **family.forward)
    assert calls
    for call in calls:
        assert call.gate is not None, call.reasons
        assert call.gate.activation == family.activation
        expected = expected_of(model, call, seen, family.hand)
        torch.testing.assert_close(
            call.gate.values.float(), expected.float(), rtol=2**-7, atol=2**-9
        )


# attention modules outside of a text model


class Alone(nn.Module):
    """One attention module of transformers over (B, T, 32), called in its own style."""

    def __init__(self, attention: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.attention, self.call = attention, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.attention, x)


SDPA = SimpleNamespace(_attn_implementation="sdpa")
PART = SimpleNamespace(hidden_size=32, head_dim=8)
HIDDEN = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(BATCH, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4))


def atoms() -> tuple[nn.Module, Hand]:
    from transformers.models.esmfold2 import modeling_esmfold2 as library

    turn = (torch.ones(1, LENGTH, 8), torch.zeros(1, LENGTH, 8))
    kind: Any = library.EsmFold2AtomAttention
    return Alone(kind(SDPA, PART), lambda module, x: module(x, BIAS, turn)), of_gate_proj


def diffusion() -> tuple[nn.Module, Hand]:
    from transformers.models.esmfold2 import modeling_esmfold2 as library

    kind: Any = library.EsmFold2DiffusionAttention
    return Alone(kind(SDPA, PART), lambda module, x: module(x, BIAS)), of_gate_proj


def folding() -> tuple[nn.Module, Hand]:
    from transformers.models.esm.modeling_esmfold import EsmFoldAttention

    attention = EsmFoldAttention(32, 32, 32, 8, 4)
    return Alone(attention, lambda module, x: module(x, x, [BIAS])), lambda module, x: by_head(
        module.linear_g(x), 8
    ).sigmoid()


def folding_self() -> tuple[nn.Module, Hand]:
    from transformers.models.esm.modeling_esmfold import EsmFoldSelfAttention

    attention = EsmFoldSelfAttention(32, 4, 8, gated=True)
    return Alone(attention, lambda module, x: module(x)), lambda module, x: by_head(
        module.g_proj(x), 8
    ).sigmoid()


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("make", [atoms, diffusion, folding, folding_self])
def test_gates_over_proteins(make: Callable[[], tuple[nn.Module, Hand]]) -> None:
    model, hand = make()
    redrawn(model)
    calls = watched(model, HIDDEN)
    assert len(calls) == 1
    assert calls[0].gate is not None, calls[0].reasons
    with torch.no_grad():
        expected = hand(model.attention, HIDDEN)
    torch.testing.assert_close(calls[0].gate.values, expected, rtol=1e-5, atol=1e-7)
    assert (calls[0].gate.position, calls[0].gate.granularity) == ("G1", "element")
    assert calls[0].gate.activation == "sigmoid"


# gates that are nobody's class, in ways that a copy of a family or one's own code has


class Own(nn.Module):
    """Attention with a gate made in one of many ways; `self.expected` is what it multiplied."""

    heads, key_heads, width = 4, 2, 8

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        size, groups = self.heads * self.width, self.heads // self.key_heads
        rows = {
            "halves": 2 * size,
            "per head": 2 * size,
            "per group": 2 * size,
            "per group, heads": size + self.heads,
            "head in q": size + self.heads,
        }
        self.fused = way == "fused qkvg"
        self.q_proj = nn.Linear(32, rows.get(way, size), bias=False)
        self.kv = nn.Linear(32, 2 * self.key_heads * self.width, bias=False)
        self.wqkvg = nn.Linear(32, 2 * size + 2 * self.key_heads * self.width)
        self.g = nn.Linear(32, {"head": self.heads, "shared": self.width}.get(way, size))
        self.inner_norm = nn.RMSNorm(size)
        self.sigmoid = nn.Sigmoid()
        self.gate_logit = nn.Parameter(torch.linspace(-2, 2, self.heads))
        self.out = nn.Linear(size, 32)
        self.groups = groups
        self.expected = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        H, K, D = self.heads, self.key_heads, self.width
        batch, length, _ = x.shape
        q, kv, gate = self.q_proj(x), self.kv(x), None
        if self.way == "halves":
            q, gate = q.chunk(2, -1)
            gate = by_head(gate, D).sigmoid()
        elif self.way == "per head":
            q, gate = by_head(q, 2 * D).chunk(2, -1)
            gate = gate.sigmoid()
        elif self.way == "per group":
            q, gate = q.view(batch, length, K, -1).split([self.groups * D, self.groups * D], -1)
            gate = gate.reshape(batch, length, H, D).sigmoid()
        elif self.way == "per group, heads":
            q, gate = q.view(batch, length, K, -1).split([self.groups * D, self.groups], -1)
            gate = gate.reshape(batch, length, H, 1).sigmoid()
        elif self.way == "head in q":
            q, gate = q.split([H * D, H], -1)
            gate = gate[..., None].sigmoid()
        elif self.fused:
            q, kv, gate = self.wqkvg(x).split([H * D, 2 * K * D, H * D], -1)
            gate = by_head(gate, D).sigmoid()
        q = q.reshape(batch, length, H, D).transpose(1, 2)
        k, v = kv.view(batch, length, 2 * K, D).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)  # (B, T, H, D)
        if self.way == "parameter":
            gate = self.gate_logit.sigmoid()[:, None].expand(batch, length, H, 1)
        elif self.way == "module":
            gate = by_head(self.sigmoid(self.g(x)), D)
        elif self.way == "behind a norm":
            y = by_head(self.inner_norm(y.flatten(2)), D)
            gate = by_head(self.g(x), D).sigmoid()
        elif self.way == "head":
            gate = F.silu(self.g(x))[..., None]
        elif self.way == "shared":
            gate = self.g(x)[:, :, None].sigmoid()
        elif self.way in ("tanh", "softplus", "relu"):
            gate = by_head(getattr(torch, self.way, F.softplus)(self.g(x)), D)
        elif self.way == "doubled":
            gate = 2 * by_head(self.g(x), D).sigmoid()
        assert gate is not None
        self.expected = gate.detach()
        return self.out((y * gate).flatten(2))


WAYS = {
    "halves": ("element", "sigmoid"),
    "per head": ("element", "sigmoid"),
    "per group": ("element", "sigmoid"),
    "per group, heads": ("head", "sigmoid"),
    "head in q": ("head", "sigmoid"),
    "fused qkvg": ("element", "sigmoid"),
    "module": ("element", "sigmoid"),
    "behind a norm": ("element", "sigmoid"),
    "parameter": ("head", "sigmoid"),
    "head": ("head", "silu"),
    "shared": ("head-shared", "sigmoid"),
    "tanh": ("element", "tanh"),
    "softplus": ("element", "softplus"),
    "relu": ("element", "relu"),
    "doubled": ("element", "double-sigmoid"),
}


class OwnAttention(Own):
    """By its name a module that attends, so that its maps are kept."""


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_gates_of_code_that_nobody_knows(way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = OwnAttention(way).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    call = watched(model, HIDDEN.to(dtype))[0]
    assert call.gate is not None, call.reasons
    assert (call.gate.granularity, call.gate.activation) == WAYS[way]
    assert call.gate.source == ("input-independent" if way == "parameter" else "query")
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    values = call.gate.values.expand(BATCH, LENGTH, -1, -1)
    torch.testing.assert_close(
        values.float(), model.expected.float(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.usefixtures("uncompared")
def test_a_gate_is_read_where_attention_gives_zero() -> None:
    """By comparison it could not be: a ratio to 0 says nothing."""
    model = OwnAttention("per group").eval()
    x = HIDDEN.clone()
    x[:, 0] = 0  # no bias in the values: the first token attends to itself alone
    call = watched(model, x)[0]
    assert not call.output[:, :, 0].any()
    assert call.gate is not None
    torch.testing.assert_close(call.gate.values, model.expected)


def test_a_known_gate_is_read_where_attention_gives_nothing_else() -> None:
    model = OwnAttention("softplus").eval()
    with torch.no_grad():
        model.kv.weight[16:] = 0  # the values
    nothing = watched(model, HIDDEN)[0]
    assert nothing.gate is None
    assert "tells nothing" in nothing.reasons["gate"]


class Adapted(nn.Module):
    """A map with a low-rank addition, as adapters put it around: its own output is not the gate."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, 32, base.out_features
        self.down, self.up = nn.Linear(32, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize(("way", "name"), [("per head", "q_proj"), ("softplus", "g")])
def test_a_gate_with_an_adapter(way: str, name: str) -> None:
    model = OwnAttention(way).eval()
    setattr(model, name, Adapted(getattr(model, name)))
    call = watched(model, HIDDEN)[0]
    assert call.gate is not None, call.reasons
    torch.testing.assert_close(call.gate.values, model.expected)


class Scaled(OwnAttention):
    """Its gate is none of the readings: the map's output is cubed before the sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = by_head(self.q_proj(x), 8).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 4, 8).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = self.normed(y.transpose(1, 2).flatten(2))
        return self.out(y * (self.g(x) ** 3).sigmoid())

    def normed(self, y: Tensor) -> Tensor:
        return self.inner_norm(y) if self.way == "norm" else y


def test_a_gate_that_no_reading_fits_is_compared() -> None:
    torch.manual_seed(0)
    model = Scaled("plain").eval()
    call = watched(model, HIDDEN)[0]
    assert call.gate is not None
    with torch.no_grad():
        expected = by_head((model.g(HIDDEN) ** 3).sigmoid(), 8)
    torch.testing.assert_close(call.gate.values, expected, rtol=0, atol=1e-4)


def test_behind_a_norm_nothing_is_compared() -> None:
    """The ratio would be gate · weight / rms, and in 0..1 where the norm makes smaller."""
    torch.manual_seed(0)
    model = Scaled("norm").eval()
    with torch.no_grad():
        model.inner_norm.weight.fill_(1e-3)
    call = watched(model, HIDDEN)[0]
    assert call.gate is None
    assert "norm" in call.reasons["gate"]


def test_bitnets_norm_is_no_gate() -> None:
    config = config_of(transformers.BitNetConfig, {})
    model = redrawn(transformers.AutoModel.from_config(config, attn_implementation="sdpa"))
    calls = watched(model, TOKENS)
    assert len(calls) == 2
    for call in calls:
        assert call.gate is None
        assert call.reasons["gate"] == gates.ONLY_A_NORM
        assert call.projection is not None


# gates behind W_O


Seeing = tuple[nn.Module, dict[str, Any], str]  # model, further arguments, the gate's parameter
SEEN = torch.randn(BATCH, 6, 32, generator=torch.Generator().manual_seed(5))


def mllama() -> Seeing:
    from transformers.models.mllama import modeling_mllama as library

    config = config_of(library.MllamaTextConfig, {"cross_attention_layers": [1]})
    model: Any = library.MllamaTextModel._from_config(config, attn_implementation="sdpa")
    return model, {"cross_attention_states": SEEN}, "layers.1.cross_attn_attn_gate"


def idefics(alpha: str) -> Seeing:
    from transformers.models.idefics import modeling_idefics as library

    vision = {"embed_dim": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    changes = {"vision_config": vision, "alpha_type": alpha, "cross_layer_interval": 2}
    config = config_of(library.IdeficsConfig, changes)
    model: Any = library.IdeficsModel._from_config(config, attn_implementation="sdpa")
    given = {
        "image_encoder_embeddings": SEEN[:, None],
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
        "use_cache": False,
    }
    return model, given, "gated_cross_attn_layers.0.alpha_cross_attn"


def evolla() -> Seeing:
    from transformers.models.evolla import modeling_evolla as library

    config = SimpleNamespace(
        hidden_size=32,
        num_attention_heads=4,
        aligner_attention_probs_dropout_prob=0.0,
        aligner_enable_bias=True,
        aligner_ffn_mult=2,
        rms_norm_eps=1e-6,
    )
    kind: Any = library.EvollaSequenceAlignerCrossAttention
    embedded = nn.Embedding(100, 32)

    def call(module: nn.Module, tokens: Tensor) -> Any:
        return module(embedded(tokens), SEEN, None, None, None, torch.ones(BATCH, 6))

    return Alone(kind(config, 32), call), {}, "attention.gate_attention"


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (mllama, 1),
        (lambda: idefics("float"), 1),
        (lambda: idefics("vector"), 32),
        (evolla, 1),
    ],
    ids=["mllama", "idefics", "idefics vector", "evolla"],
)
def test_a_tanh_behind_the_projection_of_cross_attention(
    make: Callable[[], Seeing], width: int
) -> None:
    model, more, name = make()
    redrawn(model)
    calls = watched(model, TOKENS, **more)
    gated = [call for call in calls if call.gate is not None]
    assert [call.site.kind for call in gated] == ["cross"]
    gate = gated[0].gate
    assert gate is not None
    assert (gate.position, gate.source, gate.activation) == ("G5", "input-independent", "tanh")
    assert gate.granularity == ("head" if width == 1 else "element")
    expected = model.get_parameter(name).detach().tanh().view(1, 1, -1)
    assert expected.shape[-1] == width
    torch.testing.assert_close(gate.values, expected)
    result = attnprobe.scan(model, TOKENS, metrics=["gate", "rank"], **more)
    assert result.gates["mean"].tolist() == pytest.approx([expected.mean().item()])


def test_a_gate_that_was_offloaded_is_unknown() -> None:
    layer: Any = mllama()[0].get_submodule("layers.1")
    found = gates.gate_behind(layer.to("meta"))
    assert isinstance(found, str)
    assert "offloaded" in found
