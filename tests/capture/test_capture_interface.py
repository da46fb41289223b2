"""The interface tap: transformers' models are seen as they are, in linear memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnprobe import scan
from attnprobe.capture import AttentionCall, Documents, Mask, Recorder
from attnprobe.capture.attend import attend
from attnprobe.capture.lazymask import LazyMask, MaskSource
from attnprobe.capture.maskrules import lazily
from attnprobe.engine import measure

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

LENGTH = 21
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "soft-cap": lambda: transformers.Gemma2Config(
        **SHAPE, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "sinks": lambda: transformers.GptOssConfig(
        **SHAPE, sliding_window=6, num_local_experts=2, num_experts_per_tok=2
    ),
    "sigmoid of the sink": lambda: transformers.GraniteSWAConfig(
        **SHAPE, sliding_window=6, attention_multiplier=0.35
    ),
    "encoder": lambda: transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
}
NEVER_DENSE = [name for name in CONFIGS if name != "sigmoid of the sink"]


def build(name: str, implementation: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    kind = transformers.AutoModelForCausalLM
    if name == "encoder":
        kind = transformers.AutoModelForMaskedLM
    model = kind.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
            if name.startswith("sig") or parameter.shape == (4,):  # learned sink logits begin at 0
                parameter.add_(0.1)
    return model


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def calls(model: nn.Module, *args: Any, streams: Any = None, **kwargs: Any) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    with torch.no_grad(), Recorder(model, found.append, lambda *_: None).watch(streams or {}):
        model(*args, **kwargs)
    return found


# against the model's own eager weights


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_figures_are_those_of_the_models_own_weights(name: str, padding: str) -> None:
    model, ids = build(name), tokens()
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, :8] = 0
        mask = mask if padding == "left" else mask.flip(1)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, output_attentions=True)
    documents = Documents.from_mask(mask)
    found: list[AttentionCall] = []
    with torch.no_grad(), Recorder(model, found.append, lambda *_: None).watch({"": documents}):
        probed = model(ids, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(probed.logits, plain.logits, atol=1e-5, rtol=1e-5)  # all rows
    assert len(found) == len(plain.attentions) == 2
    for call, weights in zip(found, plain.attentions, strict=True):
        stats = measure(call)
        weights = weights.double() * real[:, None, :, None]
        if name == "sigmoid of the sink":  # its weights are those before the sink takes its share
            weights = weights * (1 - stats.null[..., None].double())
        first = torch.stack(
            [row[:, :, int(m.long().argmax())] for row, m in zip(weights, real, strict=True)]
        )
        rest = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
        entropy = -(rest * rest.clamp_min(1e-300).log()).sum(-1)
        torch.testing.assert_close(stats.first.double(), first, atol=1e-5, rtol=0)
        torch.testing.assert_close(stats.entropy.double(), entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(stats.mass.double(), weights.sum(2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["llama", "window", "encoder"])
def test_masks_of_flex_attention_are_read(name: str, is_padded: bool) -> None:
    mask = torch.ones_like(tokens())
    mask[0, LENGTH - 5 :] = 1 - int(is_padded)
    eager, flex = (
        scan(build(name, kind), tokens(), attention_mask=mask, metrics=["sink", "entropy"])
        for kind in ("eager", "flex_attention")
    )
    for column in ("f_attr", "f_attr_uniform", "entropy"):
        ours, theirs = flex.heads[column].tolist(), eager.heads[column].tolist()
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "window", "encoder"])
def test_sdpa_and_eager_are_measured_alike(name: str) -> None:
    ids, mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :5] = 0
    eager, fused = (
        scan(build(name, how), ids, attention_mask=mask).heads for how in ("eager", "sdpa")
    )
    for column in ("f_attr", "entropy", "value_drain", "erank"):
        torch.testing.assert_close(
            torch.tensor(eager[column].astype(float)),
            torch.tensor(fused[column].astype(float)),
            atol=1e-5,
            rtol=1e-5,
            equal_nan=True,
        )


# masks as rules


def library_mask(**kwargs: Any) -> Tensor:
    """(B, 1, Tq, Tk) dense, as the library makes it."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking.sdpa_mask(**{**kwargs, **skips})


def left(n: int) -> Tensor:
    return torch.tensor([0, n])


PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1]] * 2)
KNOWN = {
    "causal": lambda: masking.causal_mask_function,
    "full": lambda: masking.bidirectional_mask_function,
    "window": lambda: masking.sliding_window_causal_mask_function(4),
    "wide window": lambda: masking.sliding_window_causal_mask_function(40),
    "both ways": lambda: masking.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda: masking.chunked_causal_mask_function(4, left(0)),
    "chunks behind padding": lambda: masking.chunked_causal_mask_function(4, left(3)),
    "packed": lambda: masking.and_masks(
        masking.remap_positions_for_packed_sequence(masking.causal_mask_function, POSITIONS),
        masking.packed_sequence_mask_function(PACKED),
    ),
    "packed window": lambda: masking.and_masks(
        masking.remap_positions_for_packed_sequence(
            masking.sliding_window_causal_mask_function(3), POSITIONS
        ),
        masking.packed_sequence_mask_function(PACKED),
    ),
}
UNKNOWN = {
    "images look around": lambda: masking.or_masks(
        masking.causal_mask_function, masking.blockwise_overlay(IMAGES)
    ),
    "two windows": lambda: masking.and_masks(
        masking.sliding_window_overlay(5), masking.sliding_window_causal_mask_function(4)
    ),
    "positions without documents": lambda: masking.remap_positions_for_packed_sequence(
        masking.causal_mask_function, POSITIONS
    ),
    "anyone's": lambda: lambda b, h, q, k: (k <= q) & ((q + k + b) % 3 > 0),
}
PADDINGS = {
    "none": None,
    "ones": torch.ones(2, 10, dtype=torch.bool),
    "left": torch.arange(10).expand(2, -1) >= torch.tensor([[0], [3]]),
    "right": torch.arange(10).expand(2, -1) < torch.tensor([[10], [7]]),
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
@pytest.mark.parametrize("original", ["sdpa_mask", "eager_mask"])
def test_a_mask_of_the_library_is_the_rule_it_spells_out(
    original: str, name: str, padding: str
) -> None:
    asked = {
        "batch_size": 2,
        "q_length": 10,
        "kv_length": 10,
        "mask_function": {**KNOWN, **UNKNOWN}[name](),
        "attention_mask": PADDINGS[padding],
        "device": "cpu",
        "dtype": torch.float32,
    }
    made = lazily(getattr(masking, original), masking)(**asked)
    if original == "sdpa_mask" and made is None:
        assert name in ("causal", "wide window")
        assert padding in ("none", "ones")
        return
    assert isinstance(made, LazyMask)
    rule = made.source.rule
    assert rule is not None
    assert (rule.rule is None) == (name in KNOWN)
    every = slice(None)
    expected = library_mask(**asked)
    seen = rule.visible(slice(0, 10), slice(0, 10), every, every)
    seen = torch.ones(1, dtype=torch.bool) if seen is None else seen
    assert torch.equal(seen.expand(2, 1, 10, 10), expected)
    for rows in (slice(0, 4), slice(3, 10)):  # blocks, and only the keys they can see
        keys = rule.span(rows)
        assert not bool(
            expected[:, :, rows, : keys.start].any() | expected[:, :, rows, keys.stop :].any()
        )
        part = rule.visible(rows, keys, every, every)
        if part is not None:
            assert torch.equal(part.expand(2, 1, -1, -1), expected[:, :, rows, keys])
    dense = getattr(masking, original)(**{**asked, "allow_is_causal_skip": False})
    assert torch.equal(made + 0, dense + 0)  # what touches it gets the library's own


@pytest.mark.parametrize("name", ["causal", "window", "both ways", "chunks"])
def test_a_mask_behind_a_cache_counts_from_its_offsets(name: str) -> None:
    asked = {
        "batch_size": 2,
        "q_length": 4,
        "kv_length": 9,
        "q_offset": 7,
        "kv_offset": 2,
        "mask_function": KNOWN[name](),
        "attention_mask": torch.ones(2, 11, dtype=torch.bool).index_fill(1, torch.tensor(3), False),
    }
    made = lazily(masking.sdpa_mask, masking)(**asked)
    rule = made.source.rule
    seen = rule.visible(slice(0, 4), slice(0, 9), slice(None), slice(None))
    assert torch.equal(seen.expand(2, 1, -1, -1), library_mask(**asked))


@pytest.mark.parametrize("name", NEVER_DENSE)
@pytest.mark.parametrize("padding", ["none", "left"])
def test_no_mask_is_ever_made_dense(
    name: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: MaskSource) -> Tensor:
        raise AssertionError("a dense mask was made")

    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : 5 if padding == "left" else 0] = 0
    monkeypatch.setattr(MaskSource, "dense", forbidden)
    assert scan(build(name), tokens(), attention_mask=mask).figure("f_attr") is not None


def test_a_touched_mask_is_what_it_became() -> None:
    """A bias written into the mask by the model is in the figures."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("llama").model

        def forward(self, input_ids: Tensor) -> Tensor:
            embeds = self.model.embed_tokens(input_ids)
            mask = masking.create_causal_mask(self.model.config, embeds, None, None)
            view = mask[:, :, 5:]
            view[..., 0] -= 3.0
            return self.model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state

    model, ids = Biased(), tokens()
    kept: list[Tensor] = []
    with spied(kept), torch.no_grad():
        model(ids)
    found = calls(model, ids)
    for call, weights in zip(found, kept, strict=True):
        torch.testing.assert_close(measure(call).first, weights[..., 0], atol=1e-5, rtol=0)


@contextmanager
def spied(kept: list[Tensor]) -> Iterator[None]:
    """Keeps the weights of the library's eager function."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.eager_attention_forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        output, weights = original(*args, **kwargs)
        kept.append(weights)
        return output, weights

    modeling_llama.eager_attention_forward = spy
    try:
        yield
    finally:
        modeling_llama.eager_attention_forward = original


# attention itself


@pytest.mark.parametrize("extra", ["plain", "soft-cap", "sinks", "bias"])
@pytest.mark.parametrize("width", [8, 5, 12], ids=["d", "narrow values", "wide values"])
@pytest.mark.parametrize(
    "mask",
    [
        Mask(9, 9, causal=True),
        Mask(9, 9),
        Mask(9, 9, causal=True, window=3),
        Mask(9, 9, window=3, ahead=2),
        Mask(4, 9, causal=True, offset=5),
        Mask(9, 9, causal=True, key_padding=torch.arange(9).expand(2, -1) >= 2),
        Mask(9, 9, documents=(torch.tensor([[0] * 4 + [1] * 5] * 2),) * 2),
    ],
    ids=["causal", "full", "window", "both ways", "cached", "left padding", "packed"],
)
def test_attention_is_that_of_the_matrix(
    mask: Mask, width: int, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnprobe.capture.attend.BLOCK_ELEMENTS", 60)  # a few rows a block
    torch.manual_seed(2)
    query, key = torch.randn(2, 4, mask.n_queries, 8), torch.randn(2, 2, 9, 8)
    value = torch.randn(2, 2, 9, width)
    bias = torch.randn(1, 4, mask.n_queries, 9) if extra == "bias" else None
    softcap = 1.5 if extra == "soft-cap" else None
    sinks = torch.randn(1, 4, 1) if extra == "sinks" else None
    mask = Mask(**{**vars(mask), "dense": bias})
    output = attend(query, key, value, mask, scale=0.4, softcap=softcap, sinks=sinks)
    logits = query.double() @ key.double().repeat_interleave(2, 1).mT * 0.4
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits if bias is None else logits + bias
    every = slice(None)
    seen = mask.visible(slice(0, mask.n_queries), slice(0, 9), every, every)
    logits = logits if seen is None else logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.expand(2, 4, mask.n_queries)[..., None].double()], -1)
    weights = logits.softmax(-1).nan_to_num(0)[..., :9]
    expected = weights @ value.double().repeat_interleave(2, 1)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


# what goes another way


def doubled(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Someone's own attention, with logits twice as large as its arguments say."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.mT * kwargs["scaling"] * 2
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = torch.softmax(logits, -1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.fixture
def own_function() -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", masking.eager_mask)
    yield
    del AttentionInterface._global_mapping["doubled"]
    del AttentionMaskInterface._global_mapping["doubled"]


@pytest.mark.usefixtures("own_function")
def test_a_function_that_does_something_else_is_measured_as_it_does() -> None:
    model, ids = build("llama"), tokens()
    model.set_attn_implementation("doubled")
    with torch.no_grad():
        plain = model(ids)
    result = scan(model, ids)
    model.model.layers[0].self_attn.scaling *= 2
    model.model.layers[1].self_attn.scaling *= 2
    model.set_attn_implementation("eager")
    twice = scan(model, ids)
    for column in ("f_attr", "entropy"):
        ours, theirs = (torch.tensor(r.heads[column].astype(float)) for r in (result, twice))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(plain.logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def unmasked(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Someone's own attention that is told of no mask, for none was registered with it."""
    assert attention_mask is None
    output = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return output.transpose(1, 2), None


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    from transformers import AttentionInterface, AttentionMaskInterface

    def add(function: Callable[..., Any], mask: Callable[..., Any] | None = None) -> None:
        AttentionInterface.register("own", function)
        if mask is not None:
            AttentionMaskInterface.register("own", mask)

    yield add
    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop("own", None)


@pytest.mark.parametrize("padding", [0, 5])
def test_a_function_without_a_mask_is_no_causal_one(
    padding: int, register: Callable[..., None]
) -> None:
    """Registered without a mask, it gets none, and what the module calls itself says nothing."""
    register(unmasked)
    model, ids = build("llama", "own"), tokens()
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
    kept: list[Tensor] = []
    model.register_forward_hook(lambda *args: kept.append(args[-1].logits))
    documents = Documents.from_mask(mask)
    for call in calls(model, ids, streams={"": documents}, attention_mask=mask):
        assert not call.site.causal
        key = call.key.repeat_interleave(2, 1)
        weights = torch.softmax(call.query @ key.mT * call.scale, -1)
        expected = (weights * documents.valid[:, None, :, None]).sum(2)
        torch.testing.assert_close(measure(call).mass, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept[0], plain, atol=1e-5, rtol=1e-5)


def test_a_function_that_differs_for_one_query_is_found_out(register: Callable[..., None]) -> None:
    kept: list[Tensor] = []

    def once_doubled(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        query = query / 2
        if query.shape[2] == LENGTH:
            query[:, :, 6] *= 2  # far from the beginning, the middle and the end
        output, weights = doubled(module, query, key, value, mask, **kwargs)
        kept.append(weights)
        return output, weights

    register(once_doubled, masking.eager_mask)
    found = calls(build("llama", "own"), tokens())
    assert len(found) == 2
    for call, weights in zip(found, kept[1::2], strict=True):  # asked, and then run
        torch.testing.assert_close(measure(call).first, weights[..., 0], atol=1e-5, rtol=0)


def test_whoever_asks_for_weights_gets_them() -> None:
    class Weighing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama")

        def forward(self, input_ids: Tensor) -> Tensor:
            given = self.inner(input_ids, output_attentions=True)
            return given.logits * torch.stack(given.attentions).amax()

    model, ids = Weighing(), tokens()
    own = scan(model, ids).heads.drop(columns="site")
    assert own.equals(scan(model.inner, ids).heads.drop(columns="site"))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_autocast_is_measured(implementation: str, padding: int) -> None:
    model, ids = build("llama", implementation), tokens()
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with torch.autocast("cpu", torch.bfloat16):
        half = scan(model, ids, attention_mask=mask).heads
    whole = scan(model, ids, attention_mask=mask).heads
    for column in ("f_attr", "entropy"):
        ours, theirs = (torch.tensor(heads[column].astype(float)) for heads in (half, whole))
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


class Channels(nn.Module):
    """Attention over channels, through the interface."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIGS["llama"]()
        self.config._attn_implementation = "sdpa"

    def forward(self, x: Tensor) -> Tensor:
        function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return function(self, x, x, x, None, scaling=1.0, is_causal=False)[0]


class VisionChannelAttention(Channels):
    pass


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.channels = build("llama"), VisionChannelAttention()

    def forward(self, input_ids: Tensor) -> Tensor:
        self.channels(torch.randn(2, 4, 6, 8))
        return self.text(input_ids).logits


def test_attention_over_channels_is_left_out_and_said() -> None:
    result = scan(Mixed(), tokens())
    assert result.figure("f_attr") is not None
    assert set(result.layers["site"]) == {f"text.model.layers.{n}.self_attn" for n in (0, 1)}
    missed = result.not_measured.set_index("site")["reason"]
    assert missed["channels"] == "what attends there are channels or depths, not tokens"


def test_another_model_that_runs_meanwhile_is_left_alone() -> None:
    model, other, ids = build("llama"), build("window"), tokens()
    with torch.no_grad():
        alone = other(ids).logits
    together: list[Tensor] = []

    def elsewhere(*_: Any) -> None:
        def run() -> None:
            with torch.no_grad():
                together.append(other(ids).logits)

        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    handle = model.model.layers[0].register_forward_hook(elsewhere)
    result = scan(model, ids)
    handle.remove()
    assert list(result.layers["layer"]) == [0, 1]
    for logits in together:
        torch.testing.assert_close(logits, alone)
    assert together


# caches, pieces, two calls


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "window"])
@pytest.mark.parametrize("step", [1, 9])
def test_queries_behind_a_cache_are_self_attention_over_all_keys(
    name: str, implementation: str, step: int
) -> None:
    model, ids = build(name, implementation), tokens()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        whole = build(name)(ids, output_attentions=True).attentions
        model(ids[:, :-step], past_key_values=cache, use_cache=True)
        found = calls(model, ids[:, -step:], past_key_values=cache, use_cache=True)
    for call, weights in zip(found, whole, strict=True):
        assert (call.site.kind, call.site.stack) == ("self", "decoder")
        stats, late = measure(call), weights[:, :, -step:]
        late = late[..., -call.key.shape[2] :]  # a window's cache has dropped the others
        mass = late.sum(2)
        torch.testing.assert_close(stats.mass, mass, atol=1e-5, rtol=1e-5)
        entropy = -(late * late.clamp_min(1e-30).log()).sum(-1)
        torch.testing.assert_close(stats.entropy, entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "window", "soft-cap"])
def test_room_for_keys_to_come_is_of_no_document(name: str, implementation: str) -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build(name, "eager" if name == "soft-cap" else implementation)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            room = transformers.StaticCache(config=self.inner.config, max_cache_len=LENGTH + 6)
            cache = {"past_key_values": room, "use_cache": True}
            return self.inner(input_ids, attention_mask=attention_mask, **cache).logits

    model, ids = Filling(), tokens()
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    plain = scan(model.inner, ids, attention_mask=mask, **positions).heads
    roomy = scan(model, ids, attention_mask=mask).heads
    for column in ("f_attr", "f_attr_uniform", "entropy", "value_drain"):
        ours, theirs = (torch.tensor(heads[column].astype(float)) for heads in (roomy, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=column)


def test_positions_that_start_anew_are_documents() -> None:
    model, ids = build("llama"), tokens()
    positions = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)]).expand(2, -1)
    with torch.no_grad():
        given = model(ids, position_ids=positions, use_cache=False, output_attentions=True)
    heads = scan(model, ids, position_ids=positions).heads
    for layer, weights in enumerate(given.attentions):
        assert not bool(weights[:, :, 8:, :8].any())
        first = torch.cat([weights[:, :, :8, 0], weights[:, :, 8:, 8]], -1).mean((0, 2))
        own = torch.tensor(heads[heads["layer"] == layer]["f_attr"].astype(float).to_numpy())
        torch.testing.assert_close(own, first.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_of_sound_is_not_measured(implementation: str) -> None:
    """The model makes a mask of its frames from that of the samples that it is given."""
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    torch.manual_seed(0)
    model = transformers.Wav2Vec2Model._from_config(config, attn_implementation=implementation)
    sound, mask = torch.randn(2, 400), torch.ones(2, 400, dtype=torch.long)
    mask[1, 200:] = 0
    heads = scan(model.eval(), sound, attention_mask=mask).heads
    model.set_attn_implementation("eager")
    with torch.no_grad():
        given = model(sound, attention_mask=mask, output_attentions=True).attentions
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(200)))
    for layer, weights in enumerate(given):
        assert not bool(weights[1, ..., frames:].any())
        real = [weights[0].double(), weights[1, :, :frames, :frames].double()]
        first = torch.cat([w[..., 0] for w in real], -1).mean(-1)
        entropy = torch.cat([-torch.special.xlogy(w, w).sum(-1) for w in real], -1).mean(-1)
        own = heads[heads["layer"] == layer]
        for column, expected in (("f_attr", first), ("entropy", entropy)):
            ours = torch.tensor(own[column].astype(float).to_numpy())
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_queries_that_see_no_key_are_asked_about_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids, kept = build("llama"), tokens(), []
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    monkeypatch.setattr("attnprobe.capture.interface.FILLED", 2 * 4 * LENGTH * 3)
    monkeypatch.setattr("attnprobe.capture.interface.WEIGHTS", 0)
    with spied(kept):
        calls(model, ids, attention_mask=mask)
    assert kept
    assert max(weights.shape[2] for weights in kept) <= 4


class Tower(nn.Module):
    """A vision tower: attention a piece at a time, or twice over the same tokens."""

    def __init__(self, sizes: list[int], twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.sizes, self.twice = sizes, twice

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        pieces = [torch.split(t, self.sizes, dim=2) for t in (q, k, v)]
        if self.twice:
            pieces = [[t, t] for t in (q, k, v)]
        parts = [
            nn.functional.scaled_dot_product_attention(*piece).transpose(1, 2)
            for piece in zip(*pieces, strict=True)
        ]
        y = parts[0] - 0.5 * parts[1] if self.twice else torch.cat(parts, 1)
        return x + self.out(y.flatten(2))


def test_pieces_of_a_sequence_are_documents_of_one_call() -> None:
    model, x = Tower([4, 7, 5]), torch.randn(1, 16, 16)
    (call,) = calls(model, x)
    assert call.queries is call.keys
    assert call.keys.lengths.tolist() == [4, 7, 5]
    assert call.projection is not None
    stats = measure(call)
    with torch.no_grad():
        q, k, _ = model.qkv(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
    for start, stop in ((0, 4), (4, 11), (11, 16)):
        own = slice(start, stop)
        weights = (q[:, :, own] @ k[:, :, own].mT * 8**-0.5).softmax(-1)
        torch.testing.assert_close(stats.first[:, :, own], weights[..., 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(stats.mass[:, :, own], weights.sum(2), atol=1e-5, rtol=1e-5)


def test_two_calls_over_the_same_tokens_are_two_sites_of_one_layer() -> None:
    model = nn.ModuleList([Tower([16], twice=True) for _ in range(2)])
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    found = calls(model, torch.randn(1, 16, 16))
    places = [(call.site.path, call.site.stack, call.site.layer) for call in found]
    assert places == [
        ("0", "encoder", 0),
        ("0#1", "encoder 2", 0),
        ("1", "encoder", 1),
        ("1#1", "encoder 2", 1),
    ]


def test_padded_patches_are_no_queries() -> None:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.Siglip2VisionConfig(
        **sizes, num_attention_heads=4, patch_size=4, num_patches=16
    )
    model = transformers.Siglip2VisionModel(config).eval()
    patches, mask = torch.randn(2, 16, 48), torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    shapes = torch.tensor([[4, 4], [3, 4]])
    both, alone = (
        scan(model, patches[n:], pixel_attention_mask=mask[n:], spatial_shapes=shapes[n:])
        for n in (0, 1)
    )
    rows = both.samples[both.samples["sample"] == 1].reset_index(drop=True)
    assert set(rows["queries"][rows["site"].str.startswith("encoder")]) == {12}
    for column in ("f_attr", "entropy"):
        ours, theirs = (torch.tensor(r[column].astype(float)) for r in (rows, alone.samples))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0, equal_nan=True)
