"""Batches that hand-written attention lays out in its own way: the right figures, or none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe import NothingMeasuredError, scan

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 20, 5
COLUMNS = ["f_attr", "entropy"]


class Model(nn.Module):
    """One layer of causal attention with padding, its call made as `style` says."""

    style = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.style == "autocast"):
            return self._attend(self.embedding(tokens), attention_mask)

    def _attend(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.style == "start token":
            x = F.pad(x, (0, 0, 1, 0), value=1.0)
            if attention_mask is not None:
                attention_mask = F.pad(attention_mask, (1, 0), value=1)
        batch, length, _ = x.shape
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = torch.ones(batch, HEADS, length, length, dtype=torch.bool).tril()
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None]

        def call(lay: object, back: object) -> Tensor:
            made = F.scaled_dot_product_attention(*(lay(y) for y in (q, k, v)), lay(mask))  # type: ignore[operator]
            return back(made)  # type: ignore[operator, no-any-return]

        if self.style == "heads first":
            y = call(
                lambda y: y.transpose(0, 1).flatten(0, 1),
                lambda y: y.unflatten(0, (HEADS, batch)).transpose(0, 1),
            )
        elif self.style == "one row":
            y = call(lambda y: y.flatten(0, 1)[None], lambda y: y[0].unflatten(0, (batch, HEADS)))
        elif self.style == "loop":
            y = torch.cat(
                [
                    F.scaled_dot_product_attention(*(y[b : b + 1] for y in (q, k, v, mask)))
                    for b in range(batch)
                ]
            )
        elif self.style.startswith("windows"):
            at = torch.arange(length) // 5
            if self.style == "windows by mask":
                mask = mask & (at[:, None] == at)
                y = F.scaled_dot_product_attention(q, k, v, mask)
            elif self.style == "windows in turn":
                rows = zip(*(x.split(5, 2) for x in (q, k, v)), strict=True)
                y = torch.cat([F.scaled_dot_product_attention(*x, is_causal=True) for x in rows], 2)
            else:
                rows = (x.unflatten(2, (-1, 5)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
                y = F.scaled_dot_product_attention(*rows, is_causal=True)
                y = y.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        elif self.style == "five":
            y = call(lambda y: y.unflatten(1, (2, -1)), lambda y: y.flatten(1, 2))
        elif self.style == "swapped":
            y = call(lambda y: y.transpose(0, 1), lambda y: y.transpose(0, 1))
        else:
            y = call(lambda y: y, lambda y: y)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    nn.init.normal_(made.qkv.weight, std=0.5)
    return made


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 30, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def padded() -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor([20, 7, 13, 20, 10])[:, None]).long()


@pytest.mark.parametrize("batch_size", [2, HEADS, 5])
@pytest.mark.parametrize("style", ["heads first", "one row", "swapped", "loop"])
def test_folded_rows_are_told_apart(
    model: Model, tokens: Tensor, padded: Tensor, style: str, batch_size: int
) -> None:
    expected = scan(model, tokens, attention_mask=padded)
    model.style = style
    found = scan(model, tokens, attention_mask=padded, batch_size=batch_size)
    for table in ("layers", "heads"):
        columns = [*COLUMNS, "erank"]
        ours, theirs = (getattr(r, table)[columns].to_numpy() for r in (found, expected))
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("style", ["start token", "five"])
def test_rows_of_no_stream_are_refused_where_there_is_padding(
    model: Model, tokens: Tensor, padded: Tensor, style: str
) -> None:
    model.style = style
    assert scan(model, tokens, metrics="sink").layers["f_attr"].notna().all()
    with pytest.raises(NothingMeasuredError, match="cannot be told"):
        scan(model, tokens, metrics="sink", attention_mask=padded)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_windows_of_a_text_are_no_documents(model: Model, tokens: Tensor, batch_size: int) -> None:
    model.style = "windows by mask"
    expected = scan(model, tokens)
    model.style = "windows in turn"
    found = scan(model, tokens, batch_size=batch_size)
    for table in ("layers", "heads"):
        columns = [*COLUMNS, "f_attr_uniform", "erank"]
        ours, theirs = (
            torch.tensor(getattr(r, table)[columns].to_numpy(float)) for r in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    model.style = "windows in rows"
    with pytest.raises(NothingMeasuredError, match="cannot be told"):
        scan(model, tokens, metrics="sink", batch_size=batch_size)


def test_masks_spread_over_further_dimensions(model: Model, tokens: Tensor) -> None:
    class Grouped(Model):
        def _attend(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
            q, k, v = (
                y.unflatten(-1, (2, 2, -1)).permute(0, 2, 3, 1, 4) for y in self.qkv(x).chunk(3, -1)
            )
            mask = torch.ones(len(x), 1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, mask)
            return self.out(y.permute(0, 3, 1, 2, 4).flatten(2))

    grouped = Grouped()
    grouped.load_state_dict(model.state_dict())
    ours, theirs = (scan(m, tokens, metrics=["sink", "entropy"]).layers for m in (grouped, model))
    for column in COLUMNS:
        assert ours[column][0] == pytest.approx(theirs[column][0], abs=1e-5)


def test_figures_are_not_taken_in_the_autocast_of_the_model(model: Model, tokens: Tensor) -> None:
    model.style = "autocast"
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        seen.append(output.detach())

    handle = model.qkv.register_forward_hook(keep)
    found = scan(model, tokens, metrics=["sink", "entropy"], batch_size=BATCH)
    handle.remove()
    q, k, _ = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2).double() for y in seen[-1].chunk(3, -1))
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).mean()
    assert found.layers["f_attr"][0] == pytest.approx(float(weights[..., 0].mean()), abs=1e-5)
    assert found.layers["entropy"][0] == pytest.approx(float(entropy), abs=1e-5)
