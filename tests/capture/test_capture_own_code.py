"""A user's own attention, however it is written, against the same in float64 by its definition."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress

import fake_kernels
import numpy as np
import own_code
import pytest
import reference
import torch
from own_code import HEADS, KINDS, PROJECTIONS, VOCABULARY, WIDTH, Attention, Model
from torch import Tensor, nn

from attnprobe import NothingMeasuredError, scan
from attnprobe.result import Result

PLAIN = {"gate": {"position": "none"}}
COLUMNS = (
    "f_attr",
    "f_attr_uniform",
    "alpha_first",
    "first4",
    "null_mass",
    "value_drain",
    "entropy",
    "entropy_norm",
    "entropy_nosink",
    "erank",
    "stable_rank",
    "mean_share",
)


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_kernels.installed().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 12))


def padding(side: str) -> Tensor | None:
    lengths = torch.tensor([12, 7, 10])[:, None]
    right = (torch.arange(12) < lengths).long()
    return {"none": None, "right": right, "left": right.flip(1)}[side]


def compare(result: Result, layer: reference.Layer, exact: float = 1e-5) -> None:
    found = reference.tables([layer], PLAIN)
    rows = result.heads[result.heads.site == layer.site]
    assert len(rows) == HEADS
    for column in COLUMNS:
        own = [found["heads"][layer.site, h][column] for h in range(HEADS)]
        np.testing.assert_allclose(
            rows[column].to_numpy(float),
            np.array(own, dtype=float),
            rtol=exact,
            atol=exact,
            err_msg=column,
        )
    (erank,) = result.layers[result.layers.site == layer.site].erank
    assert erank == pytest.approx(found["layers"][layer.site]["erank"], rel=max(exact, 1e-5))


CASES = [
    (name, side)
    for name, kind in KINDS.items()
    for side in (("none", "right", "left") if kind.takes_padding else ("none",))
    if (name, side) != ("flash-attn, varlen", "left")  # its last row stands for all
]


@pytest.mark.parametrize(("name", "side"), CASES, ids=lambda x: x)
def test_each_kind(name: str, side: str, tokens: Tensor) -> None:
    kind, mask = KINDS[name], padding(side)
    model = Model(Attention(kind.way), kind.mask).eval()
    with torch.no_grad():
        before = model(tokens, mask)
    result = scan(model, tokens, attention_mask=mask)
    compare(result, own_code.expected(model, kind, tokens, mask))
    assert result.run["engine"] == kind.engine
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, mask), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("flex")])
def test_large_flex_attention_is_run_in_linear_memory(
    name: str, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnprobe.capture.flex.WRITTEN_OUT", 0)
    kind = KINDS[name]
    model = Model(Attention(kind.way), kind.mask).eval()
    with torch.no_grad():
        before = model(tokens)
    handed: list[Tensor] = []
    handle = model.register_forward_hook(lambda *a: handed.append(a[2]))
    result = scan(model, tokens)
    handle.remove()
    compare(result, own_code.expected(model, kind, tokens, None))
    torch.testing.assert_close(handed[-1], before)


@pytest.mark.parametrize("project", PROJECTIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_each_way_to_project(project: str, gated: bool, tokens: Tensor) -> None:
    """Ranks and the gate need W_O, and what it is given."""
    kind = KINDS["nanoGPT by hand"]
    model = Model(Attention(kind.way, project, gated)).eval()
    result = scan(model, tokens)
    layer = own_code.expected(model, kind, tokens, None)
    compare(result, layer)
    assert len(result.gates) == (1 + HEADS if gated else 0)
    if gated:
        (gate,) = result.gates[result.gates["head"].isna()].to_dict("records")
        assert (gate["position"], gate["granularity"]) == ("G1", "element")
        assert gate["mean"] == pytest.approx(float(layer.gate.mean()), abs=1e-5)


@pytest.mark.parametrize("name", ["nanoGPT by hand", "flex", "flash-attn, imported"])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_compiled(name: str, part: str, tokens: Tensor) -> None:
    kind = KINDS[name]
    model = Model(Attention(kind.way)).eval()
    layer = own_code.expected(model, kind, tokens, None)
    if part == "layer":
        model.attn.compile(backend="eager")
        compare(scan(model, tokens), layer)
    else:
        compare(scan(torch.compile(model, backend="eager"), tokens), layer)


# half precision


def upcast(m, q, k, v, seen):
    s = own_code.scores(q, k).masked_fill(~seen, torch.finfo(q.dtype).min)
    return torch.softmax(s.float(), -1).to(q.dtype) @ v


def by_argument(m, q, k, v, seen):
    s = own_code.scores(q, k) + torch.zeros(seen.shape).masked_fill(~seen, -1e9).to(q.dtype)
    return torch.nn.functional.softmax(s, -1, dtype=torch.float32).type_as(v) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", [upcast, by_argument, own_code.by_hand, own_code.merged])
def test_half_precision(way: own_code.Way, dtype: torch.dtype, tokens: Tensor) -> None:
    model = Model(Attention(way)).to(dtype).eval()
    layer = own_code.expected(model, KINDS["nanoGPT by hand"], tokens, None)
    found = reference.tables([layer], PLAIN)["heads"]
    rows = scan(model, tokens).heads
    for h in range(HEADS):
        assert rows.f_attr[h] == pytest.approx(found["attn", h]["f_attr"], abs=2e-3)
        assert rows.entropy[h] == pytest.approx(found["attn", h]["entropy"], abs=2e-2)
        assert rows.f_attr_uniform[h] == pytest.approx(found["attn", h]["f_attr_uniform"], abs=1e-6)


# torch's own modules


class OfTorch(Model):
    """An embedding, a module of torch's, and logits."""

    def __init__(self, kind: str, **options: object) -> None:
        shape = {"batch_first": True, "bias": False, "dropout": 0.1}
        made = {
            "mha": nn.MultiheadAttention,
            "encoder": nn.TransformerEncoderLayer,
            "decoder": nn.TransformerDecoderLayer,
        }[kind]
        if kind != "mha":
            shape["dim_feedforward"] = 32
        super().__init__(made(WIDTH, HEADS, **shape))
        self.kind, self.options = kind, options

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        padding = None if attention_mask is None else attention_mask == 0
        if self.kind == "mha":
            x = self.attn(x, x, x, padding, attn_mask=hidden, **self.options)[0]
        elif self.kind == "encoder":
            x = self.attn(x, hidden, padding)
        else:
            x = self.attn(x, x, hidden, None, padding, padding)
        return self.head(x)


def of_torch(part: nn.MultiheadAttention) -> Attention:
    """The weights of torch's module in ours."""
    own = Attention(own_code.by_hand)
    with torch.no_grad():
        parts = (own.query, own.key, own.value)
        for mine, theirs in zip(parts, part.in_proj_weight.chunk(3), strict=True):
            mine.weight.copy_(theirs)
        own.out.weight.copy_(part.out_proj.weight)
    return own


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mha", {"need_weights": True}),
        ("mha", {"need_weights": False}),
        ("mha", {"need_weights": True, "average_attn_weights": False}),
        ("encoder", {}),
        ("decoder", {}),
    ],
    ids=str,
)
def test_modules_of_torch(kind: str, options: dict, side: str, tokens: Tensor) -> None:
    """Also in eval mode without gradients, where torch would take its fused path."""
    model = OfTorch(kind, **options).eval()
    part = model.attn if kind == "mha" else model.attn.self_attn
    written = Model(of_torch(part))
    written.embedding = model.embedding
    layer = own_code.expected(written, KINDS["nanoGPT by hand"], tokens, padding(side))
    layer.site = "attn" if kind == "mha" else "attn.self_attn"
    result = scan(model, tokens, attention_mask=padding(side))
    compare(result, layer)
    sites = [layer.site] if kind != "decoder" else [layer.site, "attn.multihead_attn"]
    assert result.layers.site.tolist() == sites


# what is no attention, or none that can be read


def talking_heads(m, q, k, v, seen):
    p = own_code.scores(q, k).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,hg->bgqk", p, m.out.weight[:HEADS, :HEADS]) @ v


def difference(m, q, k, v, seen):
    one, two = (own_code.scores(a, b).masked_fill(~seen, -torch.inf) for a, b in ((q, k), (k, q)))
    return (one.softmax(-1) - 0.1 * two.softmax(-1)) @ v


def masked_after(m, q, k, v, seen):
    return (own_code.scores(q, k).softmax(-1) * seen) @ v


def renormalised(m, q, k, v, seen):
    p = own_code.scores(q, k).softmax(-1) * seen
    return (p / p.sum(-1, keepdim=True)) @ v


def in_blocks(m, q, k, v, seen):
    q, k, v = (x.unflatten(2, (3, 4)) for x in (q, k, v))
    return (own_code.scores(q, k).softmax(-1) @ v).flatten(2, 3)


def linear(m, q, k, v, seen):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def low_rank(m, q, k, v, seen):
    """As in Nyström attention: matrices of landmarks, one behind the other."""
    few, their = q[:, :, ::3], k[:, :, ::3]
    first, last = own_code.scores(q, their).softmax(-1), own_code.scores(few, k).softmax(-1)
    return first @ own_code.scores(few, their).softmax(-1) @ (last @ v)


def drops(m, q, k, v, seen):
    p = own_code.scores(q, k).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.nn.functional.dropout(p, 0.5) @ v


def reuses(m, q, k, v, seen):
    s = own_code.scores(q, k).masked_fill(~seen, -torch.inf)
    p = s.softmax(-1)
    s.zero_()
    return p @ v


def by_exponent(m, q, k, v, seen):
    e = own_code.scores(q, k).exp() * seen
    return (e / e.sum(-1, keepdim=True)) @ v


def by_logarithm(m, q, k, v, seen):
    s = own_code.scores(q, k).masked_fill(~seen, -torch.inf)
    return torch.log_softmax(s, -1).exp() @ v


def in_chunks(m, q, k, v, seen):
    parts = zip(q.split(4, 2), seen.split(4, 2), strict=True)
    return torch.cat([own_code.by_hand(m, part, k, v, of) for part, of in parts], 2)


def null_key(m, q, k, v, seen):
    s = own_code.scores(q, k).masked_fill(~seen, -torch.inf)
    pad = torch.nn.functional.pad
    return pad(s, (1, 0)).softmax(-1) @ pad(v, (0, 0, 1, 0))


def mapped(m, q, k, v, seen):
    return torch.func.vmap(lambda *x: own_code.by_hand(m, *x))(q, k, v, seen)


def mapped_flash(m, q, k, v, seen):
    return torch.func.vmap(lambda *x: own_code.flash(m, *x))(q, k, v, seen)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (mapped, "torch.func"),
        (mapped_flash, "torch.func"),
        (talking_heads, "multiplied with values"),
        (difference, "multiplied with values"),
        (masked_after, "multiplied with values"),
        (renormalised, "multiplied with values"),
        (in_blocks, "more dimensions than samples and heads"),
        (linear, "was seen in it"),
        (low_rank, "multiplied with values"),
        (drops, "dropout is on"),
        (reuses, "overwritten"),
        (by_exponent, "no softmax was seen"),
        (by_logarithm, "no softmax was seen"),
        (in_chunks, "come in parts"),
        (null_key, "more keys than tokens"),
    ],
)
def test_what_cannot_be_read_is_said(way: own_code.Way, reason: str, tokens: Tensor) -> None:
    """Beside a layer that can: it has its figures, and the other its reason."""
    model = Model(nn.ModuleList([Attention(own_code.by_hand), Attention(way)]))

    def forward(tokens: Tensor) -> Tensor:
        x, seen = model.embedding(tokens), model.visible(tokens, None)
        for layer in model.attn:
            x = x + layer(x, seen)
        return model.head(x)

    model.forward = forward
    result = scan(model, tokens)
    measured = result.layers.dropna(subset="f_attr")
    assert measured.site.tolist() == ["attn.0"]
    told = result.not_measured[result.not_measured.site.str.startswith("attn.1")]
    assert told.reason.str.contains(reason).any()


class Router(nn.Module):
    """Softmaxes that are no attention: over experts, over a codebook, for pooling, of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Model(Attention(own_code.by_hand))
        self.experts = nn.Parameter(torch.randn(12, WIDTH, WIDTH))
        self.choose = nn.Parameter(torch.randn(WIDTH, 12))
        self.codes = nn.Parameter(torch.randn(12, WIDTH))
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        m = self.attn
        x = m.embedding(tokens)
        x = x + m.attn(x, m.visible(tokens, None))
        share = (x @ self.choose).softmax(-1)  # (B, T, 12): as square as attention
        x = x + torch.einsum("bte,btd,edf->btf", share, x, self.experts)
        x = x + torch.matmul(x @ self.codes.T.float(), 1.0 * self.codes)
        x = x + (x @ self.codes.T.float()).softmax(-1) @ self.codes
        pool = self.head(x)[..., :1].softmax(1)  # (B, T, 1)
        x = x + (pool.mT @ x)
        return self.head(x).softmax(-1)


def test_other_softmaxes_are_not_taken_for_attention(tokens: Tensor) -> None:
    result = scan(Router(), tokens)
    assert result.layers.site.tolist() == ["attn.attn"]
    told = result.not_measured[result.not_measured.metric == "all"]
    assert told.empty


# what is left behind


class Watched(nn.Module):
    """Two layers; when the second begins, is anything of the first's matrix still held?"""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(nn.ModuleList([Attention(self.way) for _ in range(3)]))
        self.alive: list[list[bool]] = []
        self.kept: list[Tensor] = []  # attention weights that a model may give back
        self.held: list[weakref.ref[Tensor]] = []

    def way(self, m, q, k, v, seen):
        self.alive.append([ref() is not None for ref in self.held])
        s = own_code.scores(q, k).masked_fill(~seen, -torch.inf)
        p = s.softmax(-1)
        self.kept.append(p)
        half = p.to(torch.float64)
        self.held += [weakref.ref(s), weakref.ref(half)]
        return (half @ v.double()).float()

    def forward(self, tokens: Tensor) -> Tensor:
        x, seen = self.model.embedding(tokens), self.model.visible(tokens, None)
        for layer in self.model.attn:
            x = x + layer(x, seen)
        return self.model.head(x)


def test_a_matrix_is_held_no_longer_than_its_layer(tokens: Tensor) -> None:
    model = Watched()
    scan(model, tokens)
    assert model.alive == [[], [False] * 2, [False] * 4]
    assert all(ref() is None for ref in model.held)


class OwnMistakeError(Exception):
    """The model's."""


class Fails(Model):
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        super().forward(tokens, attention_mask)
        raise OwnMistakeError


def functions(model: nn.Module) -> Iterator[object]:
    """Wherever a function of the libraries can be held."""
    flex = sys.modules["torch.nn.attention.flex_attention"]
    yield flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    for holder in (own_code, fake_kernels, sys.modules["flash_attn"], sys.modules["xformers.ops"]):
        yield from (v for k, v in vars(holder).items() if "attn" in k or "attention" in k)
    yield sys.modules["flash_attn.flash_attn_interface"].flash_attn_func
    yield from (vars(m).get("held") for m in model.modules())


@pytest.mark.parametrize("name", ["flash-attn, imported", "flash-attn, held", "xformers", "flex"])
def test_nothing_stays_exchanged(name: str, tokens: Tensor) -> None:
    for model in (Model(Attention(KINDS[name].way)), Fails(Attention(KINDS[name].way))):
        before = list(map(id, functions(model)))
        with suppress(OwnMistakeError):
            scan(model, tokens)
        assert list(map(id, functions(model))) == before


def test_padding_that_cannot_be_told_is_refused(tokens: Tensor) -> None:
    """Rows of blocks that are no sample: which of them are padding is nowhere said."""

    def halves(m, q, k, v, seen):
        q, k, v = (x.unflatten(2, (2, 6)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        y = own_code.scores(q, k).softmax(-1) @ v  # (2B, H, T / 2, d)
        return y.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)

    with pytest.raises(NothingMeasuredError, match="cannot be told"):
        scan(Model(Attention(halves)), tokens, attention_mask=padding("right"))


class Tower(nn.Module):
    """Attention over patches, whose samples are known by no stream of tokens."""

    def __init__(self, window: int, heads: int, is_merged: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.window, self.heads, self.is_merged = window, heads, is_merged

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT  # (B, T, C)
        x = x.unflatten(1, (-1, self.window)).flatten(0, 1)
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        if self.is_merged:
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        y = own_code.scores(q, k).softmax(-1) @ v
        if self.is_merged:
            y = y.unflatten(0, (-1, self.heads))
        return self.out(y.transpose(1, 2).flatten(2)).view(len(images), -1)


@pytest.mark.parametrize(("window", "heads"), [(16, 4), (16, 1), (4, 1)])
def test_rows_of_images(window: int, heads: int) -> None:
    """Merged rows are taken apart into heads, windows of one head are left as they are."""
    images = torch.randn(3, 3, 16, 16)
    plain, merged = Tower(window, heads, False), Tower(window, heads, True)
    merged.load_state_dict(plain.state_dict())
    ours, theirs = (scan(m, images, metrics=["sink", "entropy", "rank"]) for m in (merged, plain))
    assert len(theirs.heads) == heads
    for column in ("f_attr", "entropy", "erank"):
        np.testing.assert_allclose(ours.heads[column], theirs.heads[column], atol=1e-5)


def test_windows_and_heads_in_the_same_rows_are_refused() -> None:
    with pytest.raises(NothingMeasuredError, match="cannot be told"):
        scan(Tower(4, 4, True), torch.randn(3, 3, 16, 16))
