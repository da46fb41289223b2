"""Whose tokens the keys are, where their number alone would tell it wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe import scan
from attnprobe.capture import AttentionCall, Documents, Recorder
from attnprobe.capture.streams import MERGED
from attnprobe.engine import measure

WIDTH, HEADS, VOCABULARY, LENGTH = 24, 4, 19, 12


class Mixing(nn.Module):
    """Attention of one sequence to another under a mask from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor, y: Tensor) -> list[Tensor]:
        made = (self.query(x), self.key(y), self.value(y))
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in made]

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out(
            F.scaled_dot_product_attention(*self.heads(x, y), mask).transpose(1, 2).flatten(2)
        )


class Seeing(nn.Module):
    """A text that attends to itself and to the patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.patches = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(10, WIDTH)
        self.tower, self.text, self.cross_attn = Mixing(), Mixing(), Mixing()

    def forward(self, tokens: Tensor, pixels: Tensor, own: Tensor) -> Tensor:
        y = self.patches(pixels)
        x = self.embedding(tokens)
        return self.cross_attn(self.text(x, x, own), self.tower(y, y))


def padded(side: str) -> Tensor:
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    return real if side == "right" else real.flip(1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_patches_as_many_as_tokens_have_no_padding(side: str) -> None:
    torch.manual_seed(0)
    real = padded(side)
    own = real[:, None, None] & torch.ones(LENGTH, LENGTH).tril().bool()
    model, found = Seeing().eval(), list[AttentionCall]()
    given: dict[str, Tensor] = {}

    def keep(module: Mixing, args: tuple[Tensor, ...]) -> None:
        q, k, _ = (x.double() for x in module.heads(args[0], args[1]))
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if len(args) > 2:
            logits = logits.masked_fill(~args[2], -torch.inf)
        given[names[module]] = logits.softmax(-1)

    names = {module: name for name, module in model.named_children()}
    for name in ("tower", "text", "cross_attn"):
        model.get_submodule(name).register_forward_pre_hook(keep)
    tokens, pixels = torch.randint(0, VOCABULARY, (2, LENGTH)), torch.randn(2, LENGTH, 10)
    with (
        torch.no_grad(),
        Recorder(model, found.append, lambda *_: None).watch({"": Documents.from_mask(real)}),
    ):
        model(tokens, pixels, own)
    every = torch.ones_like(real)
    sides = {"tower": (every, every), "text": (real, real), "cross_attn": (real, every)}
    assert [call.site.path for call in found] == ["text", "tower", "cross_attn"]
    for call in found:
        queries, keys = sides[call.site.path]
        assert torch.equal(call.queries.valid, queries)
        assert torch.equal(call.keys.valid, keys)
        stats, weights = measure(call), given[call.site.path]
        first = keys.int().argmax(1)  # (B,)
        expected = torch.stack([weights[b, :, :, first[b]] for b in range(2)])
        counted = queries[:, None].expand_as(expected)
        torch.testing.assert_close(stats.first.double()[counted], expected[counted])


class Merged(nn.Module):
    """A decoder that sees itself, within a window perhaps, and its source in one softmax."""

    def __init__(self, own_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.ModuleList([Mixing()])
        self.own_first = own_first

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, own: Tensor, source: Tensor) -> None:
        x, y = self.embedding(tokens), self.embedding(decoder_tokens)
        keys, seen = [y, x], [own, source.expand(-1, -1, own.shape[2], -1)]
        order = 1 if self.own_first else -1
        self.decoder[0](y, torch.cat(keys[::order], 1), torch.cat(seen[::order], -1))


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("window", [3, LENGTH])
@pytest.mark.parametrize("source_length", [LENGTH, 9])
def test_two_sequences_in_one_softmax_are_not_told(
    own_first: bool, window: int, source_length: int
) -> None:
    real = padded("left")
    at = torch.arange(LENGTH)
    causal = (at[:, None] >= at) & (at[:, None] - at < window) & real[:, None, None]
    source = torch.ones(2, 1, 1, source_length, dtype=torch.bool)
    streams = {
        "": Documents.whole(2, source_length),
        "encoder": Documents.whole(2, source_length),
        "decoder": Documents.from_mask(real),
    }
    tokens, target = (torch.randint(0, VOCABULARY, (2, n)) for n in (source_length, LENGTH))
    model, found = Merged(own_first).eval(), list[AttentionCall]()
    with torch.no_grad(), Recorder(model, found.append, lambda *_: None).watch(streams):
        model(tokens, target, causal, source)
    assert [call.reasons["all"] for call in found] == [MERGED]


class Listening(nn.Module):
    """An encoder of frames of sound, whose padding its mask tells alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.frames, self.how = nn.Linear(10, WIDTH), how
        self.layers = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, sound: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = self.frames(sound), attention_mask.bool()[:, None, None]
        for layer in self.layers:
            q, k, v = layer.heads(x, x)
            if self.how == "sdpa":
                y = F.scaled_dot_product_attention(q, k, v, real)
            else:
                low = torch.finfo(q.dtype).min
                y = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~real, low).softmax(-1) @ v
            x = x + layer.out(y.transpose(1, 2).flatten(2))
            x = torch.where(real[:, 0, 0, :, None], x, 1000.0)  # what padding holds
        return x


@pytest.mark.parametrize("how", ["sdpa", "written out"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_frames_of_sound_are_not_measured(how: str, side: str) -> None:
    torch.manual_seed(0)
    model, sound, real = Listening(how).eval(), torch.randn(2, LENGTH, 10), padded(side)
    both = scan(model, sound, attention_mask=real.long())
    parts = [
        scan(model, sound[b : b + 1, real[b]], attention_mask=torch.ones(1, int(real[b].sum())))
        for b in range(2)
    ]
    for column in ("f_attr", "f_attr_uniform", "entropy", "alpha_first"):
        ours = both.samples.sort_values(["site", "head", "sample"])[column].to_numpy()
        theirs = [part.samples.sort_values(["site", "head"])[column].to_numpy() for part in parts]
        np.testing.assert_allclose(ours, np.stack(theirs, 1).flatten(), atol=1e-5)
    largest = [part.layers.m_act.to_numpy() for part in parts]
    np.testing.assert_allclose(both.layers.m_act.to_numpy(), np.maximum(*largest), atol=1e-5)
