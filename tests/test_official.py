"""The released gated checkpoints, from their folder layout, against a float64 forward pass of it.

Nothing of theirs is at hand here: the folders are made small, with their config keys, their names
of weights and their rows of `q_proj` by group of heads that share keys.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnprobe
from attnprobe.adapters.gated_qwen3 import is_official, load
from attnprobe.errors import CheckpointError

pytest.importorskip("transformers")
from safetensors.torch import save_file

WIDTH, HEADS, KEY_HEADS, D, LAYERS, WORDS, FF = 32, 4, 2, 8, 2, 61, 48
GROUP = HEADS // KEY_HEADS
EPS, THETA = 1e-6, 10000.0
VARIANTS = {
    "1B_baseline": {},
    "1B_gate_headwise": {"headwise_attn_output_gate": True},
    "1B_gate_elementwise": {"elementwise_attn_output_gate": True},
}
GATE_WIDTH = {"1B_baseline": 0, "1B_gate_headwise": 1, "1B_gate_elementwise": D}


def config_of(variant: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_qwen3.Qwen3Config",
            "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "elementwise_attn_output_gate": False,
        "headwise_attn_output_gate": False,
        "head_dim": D,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": FF,
        "max_position_embeddings": 4096,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_HEADS,
        "qkv_bias": False,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.46.0",
        "use_cache": True,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "vocab_size": WORDS,
        **VARIANTS[variant],
        **changes,
    }


def weights_of(config: dict[str, Any], gate_width: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    weights = {"model.embed_tokens.weight": 4 * normal(WORDS, WIDTH)}
    weights["model.norm.weight"] = 1 + normal(WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        sizes = {
            "q_proj": (HEADS * (D + gate_width), WIDTH),
            "k_proj": (KEY_HEADS * D, WIDTH),
            "v_proj": (KEY_HEADS * D, WIDTH),
            "o_proj": (WIDTH, HEADS * D),
        }
        for name, size in sizes.items():
            weights[f"{at}self_attn.{name}.weight"] = normal(*size)
            if config["qkv_bias"]:
                weights[f"{at}self_attn.{name}.bias"] = normal(size[0])
        if config["use_qk_norm"]:
            for name in ("q_norm", "k_norm"):
                weights[f"{at}self_attn.{name}.weight"] = 1 + normal(D)
        weights[f"{at}mlp.gate_proj.weight"] = normal(FF, WIDTH)
        weights[f"{at}mlp.up_proj.weight"] = normal(FF, WIDTH)
        weights[f"{at}mlp.down_proj.weight"] = normal(WIDTH, FF)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = 1 + normal(WIDTH)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(WORDS, WIDTH)
    return weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], form: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_qwen3", "configuration_qwen3"):
        (folder / f"{name}.py").write_text("raise RuntimeError('remote code was run')\n")
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif form == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(weights)
        parts = {1: names[::2], 2: names[1::2]}
        index: dict[str, str] = {}
        for number, part in parts.items():
            file = f"model-{number:05}-of-00002.safetensors"
            save_file({n: weights[n] for n in part}, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(part, file)
        size = sum(w.numel() * w.element_size() for w in weights.values())
        whole = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return folder


class Reference:
    """The layout of the release, one head and one token at a time where it matters, in float64."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.gates: list[Tensor] = []  # (B, T, H, 1 | D) by layer
        self.first: list[Tensor] = []  # (B, H, T) attention on the first token by layer

    def logits(self, tokens: Tensor) -> Tensor:
        w = self.weights
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            x = x + self.attention(norm(x, w[at + "input_layernorm.weight"]), at + "self_attn.")
            y = norm(x, w[at + "post_attention_layernorm.weight"])
            up = y @ w[at + "mlp.up_proj.weight"].T
            gate = y @ w[at + "mlp.gate_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return norm(x, w["model.norm.weight"]) @ head.T

    def attention(self, x: Tensor, at: str) -> Tensor:
        length = x.shape[1]
        q_rows, k, v = (self.map(x, at + name) for name in ("q_proj", "k_proj", "v_proj"))
        each = q_rows.shape[-1] // HEADS - D  # features of a head's gate
        heads, gates, first = [], [], []
        for head in range(HEADS):
            group, within = divmod(head, GROUP)
            start = group * GROUP * (D + each)  # the group's queries, then its gates
            query = q_rows[..., start + within * D :][..., :D]
            gate = q_rows[..., start + GROUP * D + within * each :][..., :each]
            key, value = (y[..., group * D : (group + 1) * D] for y in (k, v))
            if self.config["use_qk_norm"]:
                query = norm(query, self.weights[at + "q_norm.weight"])
                key = norm(key, self.weights[at + "k_norm.weight"])
            scores = rotated(query) @ rotated(key).mT / math.sqrt(D)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            first.append(weights[..., 0])
            output = weights @ value
            if each:
                gates.append(torch.sigmoid(gate))
                output = output * gates[-1]
            heads.append(output)
        self.first.append(torch.stack(first, 1))
        if each:
            self.gates.append(torch.stack(gates, 2))
        return self.map(torch.cat(heads, -1), at + "o_proj")

    def map(self, x: Tensor, at: str) -> Tensor:
        return x @ self.weights[at + ".weight"].T + self.weights.get(at + ".bias", torch.zeros(()))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, the first half of the features against the second."""
    half = D // 2
    speed = THETA ** (-torch.arange(half, dtype=torch.double) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.double)[:, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def close(logits: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest, for the model computes in float32."""
    assert (logits.double() - expected).abs().amax() < 1e-5 * expected.abs().amax()


TOKENS = torch.randint(2, WORDS, (2, 21), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_of_the_release_loads_and_computes_what_it_says(
    variant: str, form: str, tmp_path: Path
) -> None:
    config = config_of(variant)
    weights = weights_of(config, GATE_WIDTH[variant])
    model = load(write(tmp_path / variant, config, weights, form))
    assert not model.training
    with torch.no_grad():
        logits = model(TOKENS).logits
    expected = Reference(config, weights).logits(TOKENS)
    close(logits, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": False},
        {"qkv_bias": True},
        {"tie_word_embeddings": False},
        {"headwise_attn_output_gate": False, "elementwise_attn_output_gate": False},
    ],
    ids=["no norm", "bias", "untied", "no gate"],
)
def test_every_flag_of_the_release(
    variant: str, changes: dict[str, Any], implementation: str, tmp_path: Path
) -> None:
    config = config_of(variant, **changes)
    gated = config["headwise_attn_output_gate"] or config["elementwise_attn_output_gate"]
    weights = weights_of(config, GATE_WIDTH[variant] if gated else 0)
    folder = write(tmp_path, config, weights, "safetensors")
    model = load(folder, attn_implementation=implementation)
    with torch.no_grad():
        output = model(TOKENS, output_attentions=implementation == "eager")
    reference = Reference(config, weights)
    close(output.logits, reference.logits(TOKENS))
    if implementation == "eager":
        for weights_of_layer, first in zip(output.attentions, reference.first, strict=True):
            torch.testing.assert_close(weights_of_layer[..., 0].double(), first, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", ["1B_gate_headwise", "1B_gate_elementwise"])
def test_its_gates_are_read_head_by_head(variant: str, tmp_path: Path) -> None:
    config = config_of(variant)
    weights = weights_of(config, GATE_WIDTH[variant])
    model = load(write(tmp_path, config, weights, "safetensors"))
    reference = Reference(config, weights)
    reference.logits(TOKENS)
    result = attnprobe.scan(model, TOKENS, metrics=["gate", "sink"])
    gates = result.gates[result.gates["head"].notna()]
    assert len(gates) == LAYERS * HEADS
    for row in gates.to_dict("records"):
        expected = reference.gates[row["layer"]][:, :, int(row["head"])]
        assert row["mean"] == pytest.approx(expected.mean().item(), abs=1e-6)
        assert row["std"] == pytest.approx(expected.std(correction=0).item(), abs=1e-6)
        below = (expected < 0.1).double().mean().item()
        assert row["below_0.1"] == pytest.approx(below, abs=1e-9)
        assert row["granularity"] == ("head" if "head" in variant else "element")
        assert (row["position"], row["activation"]) == ("G1", "sigmoid")
    means = [row["mean"] for row in gates.to_dict("records")]
    assert max(means) - min(means) > 0.01  # heads that differ, or a wrong order would not be seen
    for row in result.heads.to_dict("records"):
        expected = reference.first[row["layer"]][:, int(row["head"])].mean().item()
        assert row["f_attr"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", ["1B_gate_headwise", "1B_gate_elementwise"])
def test_padding_is_in_no_gate(variant: str, side: str, tmp_path: Path) -> None:
    config = config_of(variant)
    weights = weights_of(config, GATE_WIDTH[variant])
    model = load(write(tmp_path, config, weights, "safetensors"))
    short = TOKENS[1:, :9]
    filler = torch.zeros(1, TOKENS.shape[1] - 9, dtype=torch.long)
    parts = [filler, short] if side == "left" else [short, filler]
    tokens = torch.cat([TOKENS[:1], torch.cat(parts, 1)])
    mask = torch.cat([torch.ones_like(TOKENS[:1]), (torch.cat(parts, 1) > 0).long()])
    reference = Reference(config, weights)
    reference.logits(TOKENS[:1])
    reference.logits(short)
    result = attnprobe.scan(model, tokens, metrics=["gate"], attention_mask=mask)
    for row in result.gates[result.gates["head"].notna()].to_dict("records"):
        head, layer = int(row["head"]), row["layer"]
        both = [reference.gates[n][0, :, head] for n in (layer, LAYERS + layer)]
        assert row["mean"] == pytest.approx(torch.cat(both).mean().item(), abs=1e-6)


def test_the_baseline_is_transformers_own_qwen3(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = config_of("1B_baseline")
    weights = weights_of(config, 0)
    model = load(write(tmp_path, config, weights, "safetensors"))
    known = ("model_type", "auto_map", "architectures", "use_qk_norm", "qkv_bias", "torch_dtype")
    plain = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in config.items() if k not in known}))
    plain.load_state_dict(weights, strict=False)
    plain.tie_weights()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain.eval()(TOKENS).logits)
    assert attnprobe.scan(model, TOKENS, metrics=["gate", "sink"]).gates.empty


def test_its_dtype_is_the_configs_own_or_the_one_asked_for(tmp_path: Path) -> None:
    config = config_of("1B_gate_headwise", torch_dtype="bfloat16")
    weights = weights_of(config, 1)
    folder = write(tmp_path, config, {n: w.bfloat16() for n, w in weights.items()}, "safetensors")
    assert next(load(folder).parameters()).dtype == torch.bfloat16
    asked = load(folder, dtype=torch.float32, device="cpu")
    assert {p.dtype for p in asked.parameters()} == {torch.float32}


def test_decoding_with_a_cache_gives_the_same(tmp_path: Path) -> None:
    config = config_of("1B_gate_elementwise")
    model = load(write(tmp_path, config, weights_of(config, D), "safetensors"))
    with torch.no_grad():
        whole = model(TOKENS).logits
        start = model(TOKENS[:, :15], use_cache=True)
        rest = model(TOKENS[:, 15:], cache=start.cache).logits
    torch.testing.assert_close(rest, whole[:, 15:], rtol=1e-4, atol=1e-5)


def test_a_release_is_known_by_its_config() -> None:
    assert all(is_official(config_of(variant)) for variant in VARIANTS)
    flags = ("use_qk_norm", "elementwise_attn_output_gate", "headwise_attn_output_gate")
    plain = {k: v for k, v in config_of("1B_baseline").items() if k not in flags}
    assert not is_official(plain)
    assert not is_official({"model_type": "qwen3_next", "use_qk_norm": True})
    assert not is_official({})


@pytest.mark.parametrize("what", ["missing", "left over", "another gate"])
def test_weights_that_do_not_fit_are_refused(what: str, tmp_path: Path) -> None:
    config = config_of("1B_gate_headwise")
    weights = weights_of(config, D if what == "another gate" else 1)
    if what == "missing":
        del weights["model.layers.1.self_attn.v_proj.weight"]
    if what == "left over":
        weights["model.layers.0.self_attn.g_proj.weight"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json"):
        load(write(tmp_path, config, weights, "safetensors"))


def test_a_window_is_refused(tmp_path: Path) -> None:
    config = config_of("1B_baseline", use_sliding_window=True, sliding_window=8)
    folder = write(tmp_path, config, weights_of(config, 0), "safetensors")
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        load(folder)
