"""The project's own models: every gate is read as it is, and nothing stays behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from attnprobe import scan
from attnprobe.capture import AttentionCall, Documents, Recorder
from attnprobe.models import Decoder, EncoderDecoder, Gate, GateConfig, ModelConfig

GRID = [
    GateConfig(position, granularity, mode=mode)
    for position, granularity, mode in itertools.product(
        ("G1", "G2", "G3", "G4", "G5"),
        ("element", "head", "head-shared"),
        ("multiplicative", "additive"),
    )
]
ACTIVATIONS = [
    GateConfig("G1", activation=name)
    for name in ("sigmoid", "silu", "relu", "gelu", "identity", "half-sigmoid")
]
FREE = [GateConfig(f"G{n}", source="input-independent") for n in range(1, 6)]


def config(**changes: object) -> ModelConfig:
    values = {"vocab_size": 17, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    return ModelConfig(**{**values, "max_length": 32, **changes})


def text(length: int = 9) -> Tensor:
    return torch.randint(0, 17, (2, length))


def calls_of(model: nn.Module, *args: Tensor) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    recorder = Recorder(model.eval(), found.append, lambda *_: None)
    whole = Documents.whole(*args[0].shape)
    with torch.no_grad(), recorder.watch({"": whole}):
        model(*args)
    return found


@contextmanager
def gates_seen(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What every gate module of a model returned, by the path of its attention."""
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(
            lambda *a, name=name: found.__setitem__(name.removesuffix(".gate"), a[2])
        )
        for name, module in model.named_modules()
        if isinstance(module, Gate)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("gate", [GateConfig(), *GRID, *ACTIVATIONS, *FREE], ids=str)
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_every_gate_is_read_exactly(gate: GateConfig, architecture: str) -> None:
    shape = config(architecture=architecture, gate=gate)
    model = Decoder(shape) if architecture == "decoder" else EncoderDecoder(shape)
    tokens = (text(),) if architecture == "decoder" else (text(), text(6))
    with gates_seen(model) as seen:
        calls = calls_of(model, *tokens)
    modules = dict(model.named_modules())
    assert len(calls) == (2 if architecture == "decoder" else 6)
    for call in calls:
        attention = modules[call.site.path]
        assert torch.equal(call.projection.weight, attention.output.weight)
        assert call.reasons == {}
        after = torch.equal(call.consumed, call.output.transpose(1, 2))
        assert after == (gate.position != "G1")
        if gate.position == "none":
            assert call.gate is None
            continue
        assert torch.equal(call.gate.values, seen[call.site.path])
        for name in ("position", "granularity", "source", "activation", "mode"):
            assert getattr(call.gate, name) == getattr(gate, name)


class Disguised(nn.Module):
    """A gate whose class is nobody's: it can be told only by what it does."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.config, self.combine = gate.config, gate.combine
        self.inner = [gate]  # a list hides it from the module tree

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner[0].forward(hidden)


@pytest.mark.parametrize("granularity", ["element", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gate_read_by_comparison_is_the_gate_read_exactly(
    granularity: str, dtype: torch.dtype
) -> None:
    model = Decoder(config(gate=GateConfig("G1", granularity))).to(dtype).eval()
    tokens = text(20)
    exact, by_class = scan(model, tokens), calls_of(model, tokens)
    for layer in model.layers:
        layer.attention.gate = Disguised(layer.attention.gate)
    compared = calls_of(model, tokens)
    for one, other in zip(by_class, compared, strict=True):
        assert other.gate.granularity == one.gate.granularity == granularity
        assert (other.gate.position, other.gate.activation) == ("G1", "sigmoid")
        found = other.gate.values.to(dtype)
        torch.testing.assert_close(found, one.gate.values, rtol=0, atol=1e-5)
    result = scan(model, tokens)
    for table in ("heads", "layers", "gates"):
        mine, theirs = getattr(result, table), getattr(exact, table)
        assert len(mine) == len(theirs)
        for column in mine.select_dtypes("float64"):
            torch.testing.assert_close(
                torch.tensor(mine[column].tolist()),
                torch.tensor(theirs[column].tolist()),
                rtol=1e-5,
                atol=1e-5,
                equal_nan=True,
                msg=f"{table}.{column}",
            )


def test_a_gate_shared_by_heads_is_seen_as_one_a_channel() -> None:
    """By comparison alone a gate that heads share is an element gate; its values are the same."""
    model = Decoder(config(gate=GateConfig("G1", "head-shared"))).eval()
    tokens = text(20)
    (exact, _), layer = calls_of(model, tokens), model.layers[0]
    layer.attention.gate = Disguised(layer.attention.gate)
    compared = calls_of(model, tokens)[0]
    torch.testing.assert_close(
        compared.gate.values,
        exact.gate.values.expand_as(compared.gate.values),
        rtol=0,
        atol=1e-5,
    )


# nothing is left behind


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def state_of(model: nn.Module) -> tuple[object, ...]:
    """All that a scan could leave changed."""
    return (
        hooks(model),
        len(_get_current_function_mode_stack()),
        [m.training for m in model.modules()],
        [None if p.grad is None else p.grad.clone().tolist() for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        [p.clone().tolist() for p in model.parameters()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.nn.functional.scaled_dot_product_attention,
    )


def half_trained() -> Decoder:
    """In a mixed mode, with gradients of a step, and dropout that would draw."""
    model = Decoder(config(dropout=0.3, gate=GateConfig("G1")))
    model.train()
    model.layers[1].eval()
    model(text()).sum().backward()
    model.layers[0].attention.query.weight.requires_grad_(False)
    return model


def test_a_scan_leaves_everything_as_it_was() -> None:
    model, tokens = half_trained(), text()
    before = state_of(model)
    result = scan(model, tokens, layers=[-1])
    assert result.heads.f_attr.notna().all()
    assert state_of(model) == before
    assert model.layers[1].training is False
    assert model.layers[0].training is True


class Broken(Decoder):
    """Fails in the second layer."""

    def __init__(self) -> None:
        super().__init__(config())
        self.layers[1].feed_forward.register_forward_hook(self.fail)

    def fail(self, *_: object) -> None:
        raise RuntimeError("the model's own mistake")


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model, tokens = Broken(), text()
    model.train()
    before = state_of(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="own mistake"):
            scan(model, tokens)
        assert state_of(model) == before


def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    model, tokens = Decoder(config()).train(), text()
    before = state_of(model)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(model, tokens, progress=interrupt)
    assert state_of(model) == before


def test_a_model_that_draws_does_not_move_the_random_state() -> None:
    class Noisy(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            torch.rand(3)
            return super().forward(tokens)

    model, tokens = Noisy(config()), text()
    before = torch.get_rng_state()
    scan(model, tokens)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_can_be_scanned_under_inference_mode_and_within_grad() -> None:
    model, tokens = Decoder(config()).eval(), text()
    plain = scan(model, tokens)
    with torch.inference_mode():
        inferred = scan(model, tokens)
    with torch.enable_grad():
        scan(model, tokens)
    assert inferred.heads.f_attr.tolist() == plain.heads.f_attr.tolist()
    assert all(p.grad is None for p in model.parameters())


def test_progress_counts_samples() -> None:
    told: list[tuple[int, int]] = []
    model = Decoder(config())
    scan(model, torch.randint(0, 17, (5, 6)), batch_size=2, progress=lambda *a: told.append(a))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_the_hand_example_of_three_tokens() -> None:
    """[1,0], [0,1], [1,1], identity weights, no mask: the first row is 0.401, 0.198, 0.401."""
    shape = config(d_model=2, n_heads=1, n_kv_heads=1, positions="learned")
    attention = Decoder(shape).layers[0].attention
    with torch.no_grad():
        for part in (attention.query, attention.key, attention.value, attention.output):
            part.weight.copy_(torch.eye(2))
    from attnprobe.engine import measure
    from attnprobe.models.layout import bidirectional

    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    layout = bidirectional(torch.zeros(1, 3, dtype=torch.long))
    found: list[AttentionCall] = []
    recorder = Recorder(attention.eval(), found.append, lambda *_: None)
    with torch.no_grad(), recorder.watch({}):
        attention(x, layout)
    stats = measure(found[0])
    assert abs(float(stats.first[0, 0, 0]) - 0.401) < 5e-4
    row = torch.tensor([[1.0, 0.0]]) @ x[0].T / 2**0.5
    weights = row.softmax(-1)[0]
    assert [round(float(w), 3) for w in weights] == [0.401, 0.198, 0.401]
    torch.testing.assert_close(
        stats.entropy[0, 0, 0], -(weights * weights.log()).sum(), rtol=1e-6, atol=1e-6
    )
