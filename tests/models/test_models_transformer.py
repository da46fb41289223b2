"""Whole models: what sees what, and where it stands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from attnprobe.errors import CheckpointError, InputError
from attnprobe.models import Decoder, EncoderDecoder, GateConfig, ModelConfig, build

POSITIONS = ("rotary", "sinusoidal", "learned")


def config(**changes) -> ModelConfig:
    values = {"vocab_size": 19, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_length": 32}
    return ModelConfig(**{**values, **changes})


def model(**changes) -> Decoder | EncoderDecoder:
    torch.manual_seed(0)
    return build(config(**changes)).double().eval()


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(19, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # angles of positions are float32


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_decoder_is_causal(positions, norm, activation):
    net = model(positions=positions, norm=norm, activation=activation, n_kv_heads=2, bias=True)
    tokens = ids(2, 9)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 19
    before, after = net(tokens), net(changed)
    assert before.shape == (2, 9, 19)
    assert_same(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters(positions):
    net = model(positions=positions)
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    a, b = net(tokens)[:, -1]
    assert not torch.allclose(a, b)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(positions, side):
    net = model(positions=positions, window=4)
    rows = [ids(n, seed=n) for n in (3, 7, 9)]
    padded, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
        padded[i, at], mask[i, at] = row, 1
    together = net(padded, attention_mask=mask)
    assert together.isfinite().all()
    for i, row in enumerate(rows):
        assert_same(together[i, mask[i].bool()], net(row[None])[0])


@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_documents_are_separate_documents(positions):
    net = model(positions=positions)
    lengths = [4, 1, 6]
    documents = [ids(n, seed=n) for n in lengths]
    packed = torch.cat([torch.tensor([0, 0]), *documents])[None]
    names = torch.tensor([[9, 9] + [7] * 4 + [3] * 1 + [7] * 6])  # a name may come back
    mask = torch.tensor([[0, 0] + [1] * 11])
    out = net(packed, attention_mask=mask, document_ids=names)[0, 2:]
    with pytest.raises(AssertionError):  # 7 came back, so the third sees the first
        assert_same(out[5:], net(documents[2][None])[0])
    names[0, 7:] = 8
    out = net(packed, attention_mask=mask, document_ids=names)[0, 2:]
    for part, document in zip(out.split(lengths), documents, strict=True):
        assert_same(part, net(document[None])[0])


def test_window_hides_what_is_further_back():
    net = model(n_layers=1, window=3)
    tokens = ids(1, 10)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 19
    differs = (net(tokens) - net(changed)).abs().amax(-1)[0] > 1e-9
    assert differs.nonzero().flatten().tolist() == [4, 5, 6]
    assert_same(net(tokens[:, :3]), model(n_layers=1)(tokens[:, :3]))


@pytest.mark.parametrize("positions", POSITIONS)
def test_encoder_decoder(positions):
    net = model(architecture="encoder-decoder", positions=positions, gate=GateConfig("G1"))
    source, target = ids(2, 6), ids(2, 5, seed=2)
    before = net(source, target)
    assert before.shape == (2, 5, 19)
    changed = source.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 19
    after = net(changed, target)
    assert (before - after).abs().amin() > 0  # every target position sees the whole source
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 19
    assert_same(net(source, changed)[:, :3], before[:, :3])


def test_encoder_decoder_padding_changes_nothing():
    net = model(architecture="encoder-decoder", positions="sinusoidal")
    source, target = ids(1, 4), ids(1, 3, seed=2)
    out = net(
        F.pad(source, (2, 0)),
        F.pad(target, (1, 0)),
        attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]),
        decoder_attention_mask=torch.tensor([[0, 1, 1, 1]]),
    )
    assert_same(out[:, 1:], net(source, target))


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor | None, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return func(*args, **kwargs)


def test_no_mask_is_made_where_none_is_needed():
    net, tokens = model(n_kv_heads=2), ids(2, 8)
    same = torch.zeros(2, 8, dtype=torch.long)
    with _Calls() as calls:
        net(tokens)
        net(tokens, attention_mask=torch.ones(2, 8), document_ids=same)
    assert calls.seen == [(None, True)] * 4
    both = model(architecture="encoder-decoder")
    with _Calls() as calls:
        both(tokens, tokens, attention_mask=torch.tensor([[1] * 8, [1] * 7 + [0]]))
    shapes = [None if mask is None else tuple(mask.shape) for mask, _ in calls.seen]
    assert shapes == [(2, 1, 1, 8)] * 2 + [None, (2, 1, 1, 8)] * 2


@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_names_of_the_sites(architecture):
    names = {name for name, _ in build(config(architecture=architecture)).named_modules()}
    if architecture == "decoder":
        expected = {"layers.0.attention", "layers.1.attention.output"}
    else:
        sites = ("encoder.layers.0", "decoder.layers.1")
        expected = {f"{site}.attention" for site in sites} | {"decoder.layers.1.cross_attention"}
    assert expected <= names


def test_tied_embeddings_hold_one_matrix():
    names = build(config(tie_embeddings=True)).state_dict().keys()
    assert [name for name in names if "embedding" in name] == ["embedding.tokens.weight"]
    assert model(tie_embeddings=True)(ids(1, 4)).shape == (1, 4, 19)


def test_learned_positions_end():
    with pytest.raises(InputError, match=r"33 tokens long.*end at 32"):
        model(positions="learned")(ids(1, 33))


@pytest.mark.parametrize("name", ["attention_mask", "document_ids"])
def test_mask_of_another_shape_is_refused(name):
    with pytest.raises(InputError, match=name):
        model()(ids(2, 5), **{name: torch.ones(2, 4, dtype=torch.long)})


def test_config_round_trip_and_defaults():
    made = config(n_kv_heads=2, gate=GateConfig("G2", "head"), activation="swiglu", window=5)
    assert ModelConfig.from_dict(made.to_dict()) == made
    assert (config().n_kv_heads, config().head_dim, config().d_ff) == (4, 4, 64)
    assert made.d_ff == 48  # 8/3 of 16 is 42.7, rounded up to eights
    assert config(d_model=24, activation="swiglu").d_ff == 64
    assert GateConfig("G1", source="input-independent").granularity == "head"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"d_model": "16"}, "d_model"),
        ({"n_layers": 0}, "n_layers"),
        ({"n_heads": True}, "n_heads"),
        ({"n_heads": 3}, "n_heads=3"),
        ({"n_kv_heads": 3}, "n_kv_heads=3"),
        ({"head_dim": 3}, "even head_dim"),
        ({"positions": "alibi"}, "alibi"),
        ({"dropout": 1.0}, "dropout"),
        ({"bias": 1}, "bias"),
        ({"gate": {"position": "G9"}}, "G9"),
        ({"gate": {"where": "G1"}}, "where"),
        ({"gate": "G1"}, "gate"),
        ({"hidden_size": 3, "model_type": "llama"}, "hidden_size, model_type"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_invalid_configs_are_named(changes, named):
    with pytest.raises(CheckpointError, match=named) as caught:
        ModelConfig.from_dict({**config().to_dict(), **changes})
    assert "\n" not in str(caught.value)


def test_missing_keys_are_named():
    values = config().to_dict()
    del values["d_model"], values["n_heads"]
    with pytest.raises(CheckpointError, match="missing d_model, n_heads"):
        ModelConfig.from_dict(values)
