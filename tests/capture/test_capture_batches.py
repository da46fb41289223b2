"""What later batches say of a site, and what layers share: masks that are looked at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe import NothingMeasuredError, scan
from attnprobe.capture import AttentionCall, Documents, Recorder, rules
from attnprobe.engine import measure
from attnprobe.engine.coverage import cover
from attnprobe.forward import ForwardInputs
from attnprobe.scanning import Scan

WIDTH, HEADS, VOCABULARY, LENGTH = 24, 4, 19, 12
LOW = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Under a mask from outside, by torch's function or written out."""

    def __init__(self, is_written: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_written = is_written

    def heads(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if self.is_written:
            y = (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Three layers under one mask: causal but for a prefix that is read both ways, with ALiBi."""

    def __init__(self, is_written: bool = False, slopes: Tensor | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention(is_written) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.slopes = slopes

    def mask(self, tokens: Tensor, prefix: Tensor, attention_mask: Tensor | None) -> Tensor:
        at = torch.arange(tokens.shape[1])
        seen = (at[:, None] >= at) | (at < prefix[:, None, None, None])
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None]
        bias = torch.zeros(1, 1, 1, 1)
        if self.slopes is not None:
            bias = -self.slopes[:, None, None] * (at[:, None] - at).abs()
        return bias.expand(len(tokens), -1, len(at), len(at)).masked_fill(~seen, LOW)

    def forward(
        self, tokens: Tensor, prefix: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        x, mask = self.embedding(tokens), self.mask(tokens, prefix, attention_mask)
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.head(x)


def scanned(model: nn.Module, *batches: tuple[Tensor, Tensor]) -> Scan:
    scan = Scan(model.eval(), ["sink", "perplexity"])
    for tokens, prefix in batches:
        scan.add(ForwardInputs(tokens, None, None, {"prefix": prefix}))
    return scan


def batch(prefix: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (2, length)), torch.full((2,), prefix)


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("order", [(0, 5), (5, 0)])
def test_a_mask_that_looks_ahead_in_some_batches_gives_no_perplexity(
    order: tuple[int, int], is_written: bool
) -> None:
    result = scanned(Model(is_written), *map(batch, order)).result()
    assert "ppl" not in result.model or result.model.ppl.isna().all()
    assert set(result.not_measured[result.not_measured.metric == "ppl"].reason) == {
        "attention is not causal: every token sees the one it would be asked to predict"
    }
    assert set(result.layers["stack"]) == {"decoder"}  # no encoder is causal without a prefix
    assert list(result.layers.layer) == [0, 1, 2]


@pytest.mark.parametrize("is_written", [True, False])
def test_a_single_token_tells_no_decoder(is_written: bool) -> None:
    whole = VOCABULARY + LENGTH
    result = scanned(Model(is_written), batch(1, length=1), batch(whole)).result()
    assert set(result.layers["stack"]) == {"encoder"}
    assert list(result.layers.layer) == [0, 1, 2]
    assert set(scanned(Model(is_written), batch(0, length=1)).result().layers["stack"]) == {
        "decoder"
    }


def calls_of(model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    recorder = Recorder(model.eval(), found.append, lambda *_: None)
    with torch.no_grad(), recorder.watch({"": Documents.from_mask(attention_mask)}):
        model(tokens, torch.zeros(len(tokens)), attention_mask)
    return found


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("is_written", [True, False])
def test_a_bias_of_the_heads_leaves_the_mask_a_rule(
    side: str, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALiBi: what the mask lets through is looked at once a pass, and never pair by pair."""
    looks: list[object] = []
    once = rules.as_rule
    monkeypatch.setattr(rules, "as_rule", lambda *a: looks.append(a) or once(*a))
    mask = torch.ones(2, LENGTH)
    mask[1, 8:] = 0
    mask = {"none": torch.ones_like(mask), "right": mask, "left": mask.flip(1)}[side]
    model = Model(is_written, slopes=torch.rand(HEADS))
    calls = calls_of(model, torch.randint(0, VOCABULARY, (2, LENGTH)), mask)
    assert len(calls) == 3
    assert len(looks) == 1
    for call in calls:
        assert call.mask.causal
        assert call.mask.adds_only
        assert cover(call).is_run


def test_figures_under_a_shared_bias() -> None:
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    mask = torch.ones(2, LENGTH)
    mask[1, 8:] = 0
    model = Model(slopes=torch.rand(HEADS))
    found: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Tensor, Tensor]) -> None:
        q, k, _ = layer.heads(args[0])
        logits = (q.double() @ k.double().mT) / q.shape[-1] ** 0.5 + args[1].double()
        found.append(logits.softmax(-1))

    for layer in model.layers:
        layer.register_forward_pre_hook(keep)
    calls = calls_of(model, tokens, mask)
    valid = mask.bool()[:, None].expand(-1, HEADS, -1)
    for call, weights in zip(calls, found, strict=True):
        stats = measure(call)
        entropy = -torch.special.xlogy(weights, weights).sum(-1)
        for ours, theirs in ((stats.first, weights[..., 0]), (stats.entropy, entropy)):
            np.testing.assert_allclose(ours[valid], theirs[valid], atol=1e-5)
        np.testing.assert_allclose(stats.mass, (weights * valid[..., None]).sum(-2), atol=1e-5)
        assert torch.equal(stats.visible[:, 0], (torch.arange(LENGTH) + 1) * mask.long())


class Caching(Attention):
    """Over the keys of the calls before too, without a mask where one token comes alone."""

    def forward(self, x: Tensor, kept: list[Tensor], seen: Tensor | None) -> Tensor:
        q, k, v = self.heads(x)
        if kept:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        kept[:] = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None and x.shape[1] > 1)
        return self.out(y.transpose(1, 2).flatten(2))


class Decoding(nn.Module):
    """A prompt at once, and then token by token."""

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Caching()])
        self.prompt = prompt

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kept, made = list[Tensor](), []
        for start in (0, *range(self.prompt, tokens.shape[1])):
            stop = start + 1 if start else self.prompt
            seen = None
            if attention_mask is not None:
                seen = torch.ones(stop, stop).tril().bool()[start:]
                seen = seen & attention_mask[:, None, None, :stop].bool()
            made.append(self.layers[0](self.embedding(tokens[:, start:stop]), kept, seen))
        return torch.cat(made, 1)


def test_tokens_behind_a_cache_of_the_models_own_attend_to_themselves() -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 6))
    model = Decoding(4).eval()
    layer, x = model.layers[0], model.embedding(tokens)
    q, k, _ = (part.double() for part in layer.heads(x))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    weights = logits.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)
    result = scan(model, tokens, metrics=["sink", "entropy"])
    assert set(zip(result.layers["stack"], result.layers["kind"], strict=True)) == {
        ("decoder", "self")
    }
    rows = (slice(0, 4), slice(4, 5), slice(5, 6))
    for site, own in zip(result.layers.site, rows, strict=True):
        expected = weights[..., own, 0].mean((0, 2))
        heads = result.heads[result.heads.site == site]
        np.testing.assert_allclose(heads.f_attr.to_numpy(float), expected.detach(), atol=1e-5)


def test_a_padded_prompt_behind_a_cache_of_the_models_own_is_not_told() -> None:
    mask = torch.ones(2, 6)
    mask[1, :2] = 0
    tokens = torch.randint(0, VOCABULARY, (2, 6))
    with pytest.raises(NothingMeasuredError, match="padding and documents cannot be told"):
        scan(Decoding(4).eval(), tokens, metrics=["sink"], attention_mask=mask)
