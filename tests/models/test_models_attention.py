"""The attention module against its formula, computed by hand in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from attnprobe.models import GateConfig, ModelConfig
from attnprobe.models.attention import Attention
from attnprobe.models.layout import bidirectional, causal
from attnprobe.models.positions import rotate, sinusoids

ACTIVATIONS = {
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "identity": lambda x: x,
    "half-sigmoid": lambda x: 0.5 + 0.5 / (1 + torch.exp(-x)),
}


def config(**changes) -> ModelConfig:
    values = {"vocab_size": 11, "d_model": 24, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2}
    return ModelConfig(**{**values, "max_length": 32, **changes})


def gates() -> list[GateConfig]:
    grid = itertools.product(
        ("G1", "G2", "G3", "G4", "G5"),
        ("element", "head", "head-shared"),
        ("multiplicative", "additive"),
    )
    by_place = [GateConfig(place, grain, mode=mode) for place, grain, mode in grid]
    by_activation = [GateConfig("G1", "element", activation=name) for name in ACTIVATIONS]
    free = [GateConfig(f"G{i}", source="input-independent") for i in range(1, 6)]
    return [GateConfig(), *by_place, *by_activation, *free]


def gate_id(gate: GateConfig) -> str:
    return f"{gate.position}-{gate.granularity}-{gate.source}-{gate.activation}-{gate.mode}"


def by_hand(module: Attention, x: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """The module's output, one sample, head and query at a time."""
    c, gate = module.config, module.config.gate
    source = x if memory is None else memory

    def gated(position, value, hidden, heads, width):
        if gate.position != position:
            return value
        if gate.source == "input-independent":
            logits = module.gate.scalar[None, None, :, None]
        else:
            shape = {"element": (heads, width), "head": (heads, 1), "head-shared": (1, width)}
            logits = F.linear(hidden, module.gate.projection.weight)
            logits = logits.reshape(*hidden.shape[:2], *shape[gate.granularity])
        g = ACTIVATIONS[gate.activation](logits)
        return value * g if gate.mode == "multiplicative" else value + g

    def project(linear, tokens, heads):
        return (tokens @ linear.weight.T).reshape(*tokens.shape[:2], heads, c.head_dim)

    q = gated("G4", project(module.query, x, c.n_heads), x, c.n_heads, c.head_dim)
    k = gated("G3", project(module.key, source, c.n_kv_heads), source, c.n_kv_heads, c.head_dim)
    v = gated("G2", project(module.value, source, c.n_kv_heads), source, c.n_kv_heads, c.head_dim)
    out = torch.zeros_like(q)
    group = c.n_heads // c.n_kv_heads
    for b, h, i in itertools.product(range(x.shape[0]), range(c.n_heads), range(x.shape[1])):
        seen = source.shape[1] if memory is not None else i + 1
        scores = k[b, :seen, h // group] @ q[b, i, h] / c.head_dim**0.5
        weights = scores.exp() / scores.exp().sum()
        out[b, i, h] = weights @ v[b, :seen, h // group]
    out = gated("G1", out, x, c.n_heads, c.head_dim)
    out = out.reshape(*x.shape[:2], -1) @ module.output.weight.T
    return gated("G5", out[:, :, None], x, 1, c.d_model)[:, :, 0]


@pytest.mark.parametrize("gate", gates(), ids=gate_id)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_attention_does_what_its_formula_says(gate, cross):
    torch.manual_seed(0)
    module = Attention(config(gate=gate, positions="learned")).double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    memory = torch.randn(2, 7, 24, dtype=torch.float64) if cross else None
    layout = bidirectional(torch.zeros(2, 7)) if cross else causal(torch.zeros(2, 5))
    if gate.source == "input-independent" and gate.position != "none":
        assert torch.equal(module.gate(x).unique(), torch.tensor([0.5], dtype=torch.float64))
        torch.nn.init.normal_(module.gate.scalar)
    out = module(x, layout, memory)
    torch.testing.assert_close(out, by_hand(module, x, memory), rtol=1e-10, atol=1e-10)
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("position", "granularity", "source", "shape"),
    [
        ("G1", "element", "query", (2, 5, 4, 6)),
        ("G1", "head", "query", (2, 5, 4, 1)),
        ("G1", "head-shared", "query", (2, 5, 1, 6)),
        ("G1", "element", "input-independent", (1, 1, 4, 1)),
        ("G2", "element", "query", (2, 5, 2, 6)),
        ("G3", "head", "query", (2, 5, 2, 1)),
        ("G4", "element", "query", (2, 5, 4, 6)),
        ("G5", "element", "query", (2, 5, 24)),
        ("G5", "head", "query", (2, 5, 1)),
    ],
)
def test_gate_returns_what_multiplies(position, granularity, source, shape):
    module = Attention(config(gate=GateConfig(position, granularity, source)))
    assert module.gate(torch.randn(2, 5, 24)).shape == shape


def test_ungated_attention_has_no_gate_parameters():
    assert not [n for n, _ in Attention(config()).named_parameters() if "gate" in n]


def test_three_token_example_by_hand():
    """[1,0], [0,1], [1,1] with identity weights: the first row is 0.401, 0.198, 0.401."""
    module = Attention(config(d_model=2, n_heads=1, n_kv_heads=1, positions="learned")).double()
    for linear in (module.query, module.key, module.value, module.output):
        linear.weight.data = torch.eye(2, dtype=torch.float64)
    tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    out = module(tokens, bidirectional(torch.zeros(1, 3)))[0]  # (3, 2)
    # the rows sum to 1, so their three weights follow from the two channels of the output
    last = out.sum(1) - 1
    weights = torch.stack((out[:, 0] - last, out[:, 1] - last, last), dim=1)
    assert weights[0].tolist() == pytest.approx([0.401, 0.198, 0.401], abs=5e-4)
    expected = (tokens[0] @ tokens[0].T / 2**0.5).softmax(-1)
    torch.testing.assert_close(weights, expected)


def test_rotation_depends_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        turned_q, turned_k = rotate(q, torch.tensor([[i]])), rotate(k, torch.tensor([[j]]))
        return (turned_q * turned_k).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)  # angles are float32
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
    assert torch.equal(rotate(q, torch.tensor([[0]])), q)


def test_sinusoids_are_those_of_the_original():
    code = sinusoids(torch.arange(50)[None], 16)[0]
    for position, i in itertools.product((0, 1, 7, 49), range(8)):
        angle = torch.tensor(position / 10_000 ** (2 * i / 16), dtype=torch.float64)
        assert code[position, 2 * i].item() == pytest.approx(angle.sin().item(), abs=1e-5)
        assert code[position, 2 * i + 1].item() == pytest.approx(angle.cos().item(), abs=1e-5)
