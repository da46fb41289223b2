"""Logits made a part at a time, against the model's own, all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import attnprobe
from attnprobe import logits as narrowing
from attnprobe.engine import products
from attnprobe.models import ModelConfig, build

VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "plain": transformers.LlamaConfig(**GROUPED),
    "soft-capped": transformers.Gemma2Config(**GROUPED, final_logit_softcapping=3.0),
    "scaled": transformers.CohereConfig(**SMALL, logit_scale=0.3),
    "divided": transformers.GraniteConfig(**GROUPED, logits_scaling=3.0),
    "with a bias": transformers.PhiConfig(**SMALL),
}

ROUNDING = {torch.float64: 2e-9, torch.float32: 1e-6, torch.bfloat16: 1e-3}


def loud(model: Any) -> Any:
    """With logits large enough for a soft-cap to be felt."""
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.mul_(30).add_(0.01)
    return model


@pytest.fixture
def padded() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    mask[2, -5:] = 0
    return tokens, mask


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts of five tokens; how many each time the map to the vocabulary was given."""
    monkeypatch.setattr(narrowing, "FEWEST", 5)
    monkeypatch.setitem(narrowing.PART, "cpu", 5 * VOCABULARY)
    seen: list[int] = []

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(rows))
        return products.linear(rows, weight, bias)

    monkeypatch.setattr(narrowing, "linear", linear)
    return seen


def own_nll(model: Any, tokens: Tensor, mask: Tensor) -> float:
    """By the model's own logits, all of them, in float64."""
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask)
    whole = getattr(logits, "logits", logits)
    losses = F.cross_entropy(
        whole[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    both = (mask[:, :-1] * mask[:, 1:]).flatten().bool()
    return float(losses[both].mean())


def measured(model: nn.Module, tokens: Tensor, mask: Tensor, **options: Any) -> float:
    result = attnprobe.scan(model, tokens, attention_mask=mask, metrics="perplexity", **options)
    return float(result.model["nll"].iloc[0])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_the_models_of_transformers(
    name: str, dtype: torch.dtype, padded: tuple[Tensor, Tensor], parts: list[int]
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name])
    model = loud(model.eval().to(dtype))
    tokens, mask = padded
    mask[1] = 1  # positions of what is padded left are a matter of their own
    found = measured(model, tokens, mask)
    assert found == pytest.approx(own_nll(model, tokens, mask), rel=ROUNDING[dtype])
    assert parts == [5] * 24


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_models_of_our_own(tied: bool, padded: tuple[Tensor, Tensor], parts: list[int]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        architecture="decoder",
        vocab_size=VOCABULARY,
        d_model=32,
        n_layers=2,
        n_heads=4,
        d_ff=64,
        max_length=64,
        tie_embeddings=tied,
    )
    model = loud(build(config).eval())
    found = measured(model, *padded, batch_size=2)
    assert found == pytest.approx(own_nll(model, *padded), rel=1e-6)
    assert parts == [5] * 24


class Shifted(nn.Module):
    """Does to its logits what no number of a config says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = FAMILIES["plain"]
        self.inner = loud(transformers.AutoModelForCausalLM.from_config(config).eval())
        self.config = config
        self.calls = 0

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, logits_to_keep: int = 0
    ) -> Tensor:
        self.calls += 1
        given = self.inner(
            tokens, attention_mask=attention_mask, logits_to_keep=logits_to_keep, use_cache=False
        )
        return given.logits + torch.arange(float(VOCABULARY)) / 10


def test_what_is_done_to_logits_is_not_guessed(
    padded: tuple[Tensor, Tensor], parts: list[int]
) -> None:
    model = Shifted()
    tokens, mask = padded
    mask[1] = 1
    found = measured(model, tokens, mask, batch_size=1)
    calls, model.calls = model.calls, 0
    assert found == pytest.approx(own_nll(model, tokens, mask), rel=1e-6)
    assert calls == 4  # the first batch twice
    assert parts == []


def test_a_map_that_is_not_the_models_own_is_left_alone(
    padded: tuple[Tensor, Tensor], parts: list[int]
) -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + input.sum(-1, keepdim=True).sin() * self.weight[:, 0]

    torch.manual_seed(0)
    model = loud(transformers.AutoModelForCausalLM.from_config(FAMILIES["plain"]).eval())
    model.lm_head.__class__ = Adapted
    tokens, mask = padded
    mask[1] = 1
    assert measured(model, tokens, mask) == pytest.approx(own_nll(model, tokens, mask), rel=1e-6)
    assert parts == []


def patched(module: nn.Module, args: Any, output: Any) -> Any:
    """Changes what is said of one token, as a study of causes does."""
    logits = getattr(output, "logits", output)
    logits[:, 10] = logits[:, 10].sin()
    return output


HOOKS = {"all tokens": lambda module, args, output: output.sin() * 4, "one token": patched}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_the_map_is_felt(hook: str, padded: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = loud(transformers.AutoModelForCausalLM.from_config(FAMILIES["plain"]).eval())
    model.lm_head.register_forward_hook(HOOKS[hook])
    tokens, mask = padded
    mask[1] = 1
    assert measured(model, tokens, mask) == pytest.approx(own_nll(model, tokens, mask), rel=1e-6)


def test_a_hook_on_the_model_is_felt(padded: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = loud(transformers.AutoModelForCausalLM.from_config(FAMILIES["plain"]).eval())
    model.register_forward_hook(patched)
    tokens, mask = padded
    mask[1] = 1
    assert measured(model, tokens, mask) == pytest.approx(own_nll(model, tokens, mask), rel=1e-6)


class Overwriting(transformers.LlamaForCausalLM):
    """Hides some of the vocabulary in its logits where they lie, as Chameleon its images."""

    def forward(self, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        output = super().forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        output.logits[:, :, 3::2] = torch.finfo(output.logits.dtype).min
        return output


def test_logits_that_the_model_writes_over_are_its_own(padded: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = loud(Overwriting(FAMILIES["plain"]).eval())
    tokens, mask = padded
    tokens, mask[1] = tokens - tokens % 2, 1
    assert measured(model, tokens, mask) == pytest.approx(own_nll(model, tokens, mask), rel=1e-6)


def test_logits_that_are_no_numbers_are_no_perplexity(padded: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = loud(transformers.AutoModelForCausalLM.from_config(FAMILIES["plain"]).eval())
    with torch.no_grad():
        model.lm_head.weight[5, 0] = torch.nan
    result = attnprobe.scan(model, padded[0], metrics=["sink", "perplexity"])
    reasons = result.not_measured.set_index("metric")["reason"]
    assert "NaN" in reasons["ppl"]
    assert result.model["ppl"].isna().all()
