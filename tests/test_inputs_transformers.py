"""What models of transformers are shown: their own tokenizers, decoders, images and sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import tiny_tokenizers as tiny
import transformers

import attnprobe
from attnprobe.errors import InputError
from attnprobe.forward import ForwardInputs
from attnprobe.inputs import InputOptions, Inputs, prepare, read
from attnprobe.probing import probe
from attnprobe.subject import Limits, Subject
from attnprobe.tokenizer import Tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def subject(
    tokenizer: Any = None,
    model: nn.Module | None = None,
    *,
    vocab_size: int | None = None,
    usual_length: int = 16,
    **more: Any,
) -> Subject:
    """A subject as loading makes them; of text without weights where none are needed."""
    vocabulary = None if tokenizer is None else Tokenizer(tokenizer)
    if vocab_size is None and vocabulary is not None:
        vocab_size = vocabulary.vocab_size
    limits = Limits(vocab_size, None, usual_length, 2)
    model = nn.Identity() if model is None else model.eval()
    more.setdefault("config", getattr(model, "config", None))
    return Subject("m", {}, model, limits, vocabulary, {}, **more)


def shown(target: Subject, **options: Any) -> Inputs:
    asked = InputOptions(**options)
    return prepare(target, read(asked), asked)


def spelled(target: Subject, inputs: Inputs) -> list[list[str]]:
    assert target.vocabulary is not None
    mask = inputs.attention_mask
    mask = torch.ones_like(inputs.tokens) if mask is None else mask
    return [
        [target.vocabulary.token(i) for i in row[keep == 1].tolist()]
        for row, keep in zip(inputs.tokens, mask, strict=True)
    ]


def runs(target: Subject, inputs: Inputs) -> Any:
    """The output of the model, called as a scan calls it."""
    whole = ForwardInputs(inputs.tokens, inputs.attention_mask, None, inputs.kwargs)
    with torch.no_grad():
        return whole.batch(slice(0, len(whole)), torch.device("cpu")).forward(target.model)


# what stands around a text


@pytest.mark.parametrize(
    ("made", "bos", "expected", "told"),
    [
        (tiny.bert, None, ["[CLS]", "whale", "[SEP]"], "--text, between [CLS] and [SEP]"),
        (tiny.bert, True, ["[CLS]", "whale", "[SEP]"], "--text, between [CLS] and [SEP]"),
        (tiny.bert, False, ["whale", "[SEP]"], "--text, without a start token, before [SEP]"),
        (tiny.t5, None, [" whale", "</s>"], "--text, without a start token, before </s>"),
        (tiny.gpt2, None, ["wha", "le"], "--text, without a start token"),
        (
            *(tiny.gpt2, True, ["<|endoftext|>", "wha", "le"]),
            "--text, behind the start token <|endoftext|>",
        ),
    ],
)
def test_special_tokens_are_put_by_the_tokenizers_rule(
    made: Any, bos: bool | None, expected: list[str], told: str
) -> None:
    target = subject(made())
    found = shown(target, texts=["whale"], bos=bos)
    assert spelled(target, found) == [expected]
    assert found.about["source"] == told
    assert found.about["bos"] is (expected[0] in ("[CLS]", "<|endoftext|>"))


def test_every_window_has_them() -> None:
    target = subject(tiny.bert())
    found = shown(target, texts=["the sea the whale the sea"], length=4)
    assert spelled(target, found) == [
        ["[CLS]", "the", "sea", "[SEP]"],
        ["[CLS]", "the", "whale", "[SEP]"],
        ["[CLS]", "the", "sea", "[SEP]"],
    ]
    with pytest.raises(InputError, match="--length 2 leaves no room beside the special tokens"):
        shown(target, texts=["the sea"], length=2)
    with pytest.raises(InputError, match="--text has 4 tokens with the special tokens"):
        shown(target, texts=["the sea"], length=5)


def test_the_packaged_text_is_the_default() -> None:
    target = subject(tiny.llama())
    found = shown(target)
    assert found.tokens.shape == (8192 // 16, 16)
    assert (found.tokens[:, 0] == 1).all()
    assert found.about["source"].endswith("packaged Moby-Dick, behind the start token <s>")


def test_without_a_start_token_to_put() -> None:
    with pytest.raises(InputError, match="--bos: m has no start token"):
        shown(subject(tiny.t5()), texts=["the"], bos=True)


def test_texts_are_padded_with_the_models_own_padding() -> None:
    config = transformers.BertConfig(vocab_size=10, pad_token_id=4)
    found = shown(subject(tiny.bert(), config=config), texts=["the", "the sea"])
    assert found.tokens.tolist() == [[2, 5, 3, 4], [2, 5, 7, 3]]
    assert found.attention_mask is not None
    assert found.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


# controls


def test_drawn_tokens_stand_for_text_and_have_an_embedding() -> None:
    found = shown(subject(tiny.bert(), vocab_size=64), random_tokens=True, samples=400)
    assert set(found.tokens[:, 1:-1].unique().tolist()) == {5, 6, 7, 8, 9}
    assert (found.tokens[:, 0] == 2).all()
    assert (found.tokens[:, -1] == 3).all()
    fewer = shown(subject(tiny.bert(), vocab_size=7), random_tokens=True, samples=400, bos=False)
    assert set(fewer.tokens[:, :-1].unique().tolist()) == {5, 6}
    with pytest.raises(InputError, match="no token that stands for text"):
        shown(subject(tiny.bert(), vocab_size=4), random_tokens=True)


def test_a_word_repeated() -> None:
    target = subject(tiny.bert())
    found = shown(target, repeated_token="whale", length=5)
    assert spelled(target, found) == [["[CLS]", "whale", "whale", "whale", "[SEP]"]]
    assert spelled(target, shown(target, repeated_token="[MASK]", length=3))[0][1] == "[MASK]"
    with pytest.raises(InputError, match="'harpoon' is not in the vocabulary of m"):
        shown(target, repeated_token="harpoon")
    with pytest.raises(InputError, match="cannot read the text"):
        shown(subject(tiny.words("sea")), repeated_token="whale")
    with pytest.raises(InputError, match="without a tokenizer: give --repeated-token an id"):
        shown(subject(vocab_size=9), repeated_token="whale")
    bare = shown(subject(vocab_size=9), repeated_token="8")
    assert (bare.tokens == 8).all()


# conversations


CHATS = [
    {"messages": [{"role": "user", "content": "the whale"}]},
    {"prompt": "the sea"},
    {"text": "the"},
    {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
]


def jsonl(folder: Path, *entries: Any) -> str:
    path = folder / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return str(path)


def test_conversations_by_the_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    target = subject(tiny.llama(chat_template=tiny.CHAT), usual_length=64)
    found = shown(target, text_files=[jsonl(tmp_path, *CHATS)], chat_template=True)
    said = ["".join(row) for row in spelled(target, found)]
    expected = ["[user] the whale [assistant]", "[user] the sea [assistant]"]
    expected += ["[user] the [assistant]", "[user] a [assistant] b "]
    assert [text.removeprefix("<s>").strip() for text in said] == [t.strip() for t in expected]
    assert all(text.count("<s>") == 1 for text in said)  # the template's own, and no second
    assert found.about["bos"] is True
    assert found.about["source"].endswith("chats.jsonl, by the chat template")
    cut = shown(target, texts=["the whale"], chat_template=True, length=4)
    assert cut.tokens.shape == (1, 4)
    assert cut.note == "1 of 1 conversations were cut to 4 tokens"


@pytest.mark.parametrize(
    ("template", "entry", "options", "says"),
    [
        (None, {"text": "a"}, {"chat_template": True}, "m has no chat template"),
        (tiny.CHAT, CHATS[0], {}, "no 'text' that is a string, but a conversation: add --chat"),
        (tiny.CHAT, {"messages": []}, {"chat_template": True}, "line 1 of .* has messages that"),
        (tiny.CHAT, {"messages": [{"role": "user"}]}, {"chat_template": True}, "messages that"),
        (tiny.CHAT, {"prompt": 3}, {"chat_template": True}, "messages that are no list"),
        (tiny.CHAT, {"n": 3}, {"chat_template": True}, "has no 'text' that is a string$"),
        (tiny.CHAT, {"prompt": ""}, {"chat_template": True}, "line 1 of .* is empty"),
        (tiny.CHAT, CHATS[0], {"chat_template": True, "bos": True}, "leave --bos and --no-bos out"),
        ("{{ raise_exception('x\ny') }}", CHATS[0], {"chat_template": True}, "line 1 .*: x y"),
    ],
)
def test_conversations_that_are_none(
    tmp_path: Path, template: str | None, entry: Any, options: dict[str, Any], says: str
) -> None:
    pytest.importorskip("jinja2")
    target = subject(tiny.llama(chat_template=template))
    with pytest.raises(InputError, match=says) as raised:
        shown(target, text_files=[jsonl(tmp_path, entry)], **options)
    assert "\n" not in str(raised.value)


# encoder–decoders


def test_the_decoder_reads_the_text_behind_its_own_start() -> None:
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config)
    target = subject(tiny.t5(), model, is_encoder_decoder=True)
    found = shown(target, texts=["the whale", "the"])
    assert found.tokens.tolist() == [[3, 5, 1], [3, 1, 0]]
    # as transformers itself shifts them for training
    shifted = model.prepare_decoder_input_ids_from_labels(found.tokens)
    assert torch.equal(found.kwargs["decoder_input_ids"][0], shifted[0])
    assert found.kwargs["decoder_input_ids"].tolist() == [[0, 3, 5], [0, 3, 0]]
    assert torch.equal(found.kwargs["decoder_attention_mask"], found.attention_mask)
    assert found.about["source"].endswith("; the decoder reads the same behind <pad>")
    batched = runs(target, found).logits[1, :2]
    alone = runs(target, shown(target, texts=["the"])).logits[0]
    assert torch.allclose(batched, alone, atol=1e-5)


def test_an_encoder_alone_has_no_decoder_to_feed() -> None:
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    target = subject(tiny.t5(), transformers.T5EncoderModel(config), is_encoder_decoder=True)
    found = shown(target, texts=["the whale"])
    assert found.kwargs == {}
    assert runs(target, found).last_hidden_state.shape == (1, 3, 16)


# images and sound


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8))


def clip() -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    text = {**SMALL, **ends, "vocab_size": 300, "max_position_embeddings": 32}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=300,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=5,
        **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos")},
    )
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    groups = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**SMALL, **layers, **groups, num_feat_extract_layers=2)
    return transformers.Wav2Vec2Model(config)


def spectrogram() -> nn.Module:
    strides = {"frequency_stride": 8, "time_stride": 8, "patch_size": 8}
    config = transformers.ASTConfig(**SMALL, **strides, max_length=64, num_mel_bins=16)
    return transformers.ASTModel(config)


def video() -> nn.Module:
    config = transformers.VideoMAEConfig(**SMALL, image_size=32, patch_size=16, num_frames=4)
    return transformers.VideoMAEModel(config)


@pytest.mark.parametrize(
    ("made", "reads", "shape"),
    [
        (vit, "image", (3, 32, 32)),
        (video, "image", (4, 3, 32, 32)),
        (wav2vec2, "audio", (16_000,)),
        (spectrogram, "audio", (64, 16)),
    ],
)
def test_random_values_have_the_shape_of_the_config(
    made: Any, reads: str, shape: tuple[int, ...]
) -> None:
    target = subject(None, made(), reads=reads)
    found = shown(target, samples=2, seed=1)
    assert found.tokens.shape == (2, *shape)
    assert torch.equal(found.tokens, shown(target, random_tokens=True, samples=2, seed=1).tokens)
    assert not torch.equal(found.tokens, shown(target, samples=2, seed=2).tokens)
    assert (found.about["kind"], found.about["seed"], found.about["bos"]) == ("random", 1, False)
    assert runs(target, found).last_hidden_state.shape[0] == 2


@pytest.mark.parametrize(("size", "samples"), [(224, 16), (1024, 2)])
def test_fewer_samples_are_drawn_where_they_are_large(size: int, samples: int) -> None:
    config = transformers.ViTConfig(image_size=size)
    found = shown(subject(config=config, reads="image"))
    assert found.tokens.shape == (samples, 3, size, size)


def test_values_are_in_the_precision_of_the_weights() -> None:
    target = subject(None, vit().bfloat16(), reads="image")
    assert runs(target, shown(target, samples=2)).last_hidden_state.dtype == torch.bfloat16


def test_whisper_hears_and_its_decoder_reads() -> None:
    target = subject(tiny.gpt2(), whisper(), vocab_size=300, reads="audio", is_encoder_decoder=True)
    found = shown(target)
    assert found.tokens.shape == (16, 8, 40)
    assert found.kwargs["decoder_input_ids"].shape == (16, 16)
    assert (found.kwargs["decoder_input_ids"][:, 0] == 5).all()
    assert runs(target, found).logits.shape == (16, 16, 300)
    said = shown(target, texts=["the whale", "sea"])
    assert said.tokens.shape == (2, 8, 40)
    assert said.kwargs["decoder_attention_mask"].sum(1).tolist() != [0, 0]
    assert "the decoder reads its own start token, then --text 1" in said.about["source"]


def test_clip_is_shown_texts_and_images(tmp_path: Path) -> None:
    target = subject(tiny.gpt2(), clip(), vocab_size=300)
    found = shown(target, texts=["the whale", "sea"])
    assert found.kwargs["pixel_values"].shape == (2, 3, 32, 32)
    assert runs(target, found).logits_per_image.shape == (2, 2)
    assert len(shown(target).tokens) == len(shown(target).kwargs["pixel_values"]) == 16
    files = [picture(tmp_path / f"{n}.png", n) for n in range(3)]
    both = shown(target, texts=["the whale", "sea"], images=files)
    assert both.kwargs["pixel_values"].shape == (3, 3, 32, 32)
    assert len(both.tokens) == 3
    assert both.note == "2 samples of text beside 3 images: the text was repeated"


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (40, 24)) -> str:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def test_image_files_are_prepared_as_the_model_says(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    file = picture(tmp_path / "a.png")
    plain = shown(subject(None, vit(), reads="image"), images=[file])
    assert plain.tokens.shape == (1, 3, 32, 32)
    assert plain.tokens.abs().max() <= 1
    assert plain.about["source"].endswith("a.png, resized and scaled to -1 to 1")
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]
    )
    processor.save_pretrained(tmp_path)
    found = shown(subject(None, vit(), reads="image", folder=tmp_path), images=[file, file])
    from PIL import Image

    by_hand = processor(images=[Image.open(file)], return_tensors="pt")["pixel_values"]
    assert torch.allclose(found.tokens[1], by_hand[0], atol=1e-5)
    assert found.about["kind"] == "images"
    settings = tmp_path / "preprocessor_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({**known, "image_processor_type": "NobodysProcessor"}))
    again = shown(subject(None, vit(), reads="image", folder=tmp_path), images=[file])
    assert torch.allclose(again.tokens, by_hand, atol=1e-5)
    settings.write_text("{")
    with pytest.raises(InputError, match="cannot be read: "):
        shown(subject(None, vit(), reads="image", folder=tmp_path), images=[file])


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_arrays_are_taken_as_they_are(tmp_path: Path, suffix: str) -> None:
    values = torch.randn(2, 3, 32, 32)
    path = tmp_path / f"pixels{suffix}"
    if suffix == ".pt":
        torch.save(values, path)
    else:
        np.save(path, values.numpy())
    target = subject(None, vit(), reads="image")
    assert torch.equal(shown(target, tokens=str(path)).tokens, values)
    assert torch.equal(shown(target, tokens=str(path), samples=1).tokens, values[:1])


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_a_recording_is_one_sample_of_any_precision(tmp_path: Path, kind: torch.dtype) -> None:
    values = torch.tensor([0.5, -1.0]).repeat(400)
    torch.save(values.to(kind), tmp_path / "sound.pt")
    found = shown(subject(None, wav2vec2(), reads="audio"), tokens=str(tmp_path / "sound.pt"))
    assert torch.equal(found.tokens, values[None])


def test_images_of_another_size_where_the_model_stretches_its_positions(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 48, 48), dtype=np.float32))
    target = subject(None, vit(), reads="image")
    found = shown(target, tokens=str(tmp_path / "a.npy"), samples=1)
    assert runs(target, found).last_hidden_state.shape == (1, 37, 16)


def array(folder: Path, *shape: int, of: float = 0.5) -> str:
    np.save(folder / "values.npy", np.full(shape, of, dtype=np.float32))
    return str(folder / "values.npy")


def no_image(folder: Path) -> dict[str, Any]:
    (folder / "a.png").write_text("no image")
    return {"images": [str(folder / "a.png")]}


@pytest.mark.parametrize(
    ("reads", "options", "says"),
    [
        ("image", lambda p: {"tokens": array(p, 2, 3, 32)}, "2 × 3 × 32, m reads N × 3 × 32 × 32"),
        ("image", lambda p: {"tokens": array(p, 2, 1, 32, 32)}, "m reads N × 3 × 32 × 32"),
        ("image", lambda p: {"tokens": array(p, 1, 3, 32, 32, of=np.nan)}, "no finite numbers"),
        ("image", lambda p: {"tokens": array(p, 0, 3, 32, 32)}, "m reads N × 3"),
        ("tokens", lambda p: {"tokens": array(p, 2, 3)}, "must hold whole numbers"),
        ("image", no_image, "a.png is no image that Pillow can read"),
        ("image", lambda p: {"images": [str(p / "b.png")]}, "cannot read .*b.png: No such file"),
        ("image", lambda p: {"images": [str(p)]}, "cannot read .*: Is a directory"),
        ("image", lambda p: {"texts": ["a"]}, "m reads image, no tokens: give an image with"),
        ("image", lambda p: {"repeated_token": "1"}, "m reads image, no tokens"),
        ("tokens", lambda p: {"images": [picture(p / "c.png")]}, "--image: m reads tokens, no im"),
        (
            *("image", lambda p: {"images": [picture(p / "c.png")], "samples": 2}),
            "--samples asks for 2, the input gives 1",
        ),
        ("image", lambda p: {"images": ["a"], "tokens": "b.npy"}, "--tokens and --image exclude"),
        ("values", lambda p: {}, "m reads no tokens, but values: give an array"),
    ],
)
def test_values_that_cannot_be_shown(tmp_path: Path, reads: str, options: Any, says: str) -> None:
    pytest.importorskip("PIL")
    is_text = reads == "tokens"
    model = None if is_text else vit()
    target = subject(tiny.gpt2() if is_text else None, model, reads=reads)
    with pytest.raises(InputError, match=says) as raised:
        shown(target, **options(tmp_path))
    assert "\n" not in str(raised.value)


def test_figures_of_what_hears_and_writes() -> None:
    target = subject(tiny.gpt2(), whisper(), vocab_size=300, reads="audio", is_encoder_decoder=True)
    shown_ = shown(target, texts=["the whale and the sea", "sea"])  # padded, which sound is not
    result = probe(target, shown_)
    assert sorted(zip(result.layers["stack"], result.layers["kind"], strict=True)) == [
        ("decoder", "cross"),
        ("decoder", "self"),
        ("encoder", "self"),
    ]
    assert result.layers["f_attr"].notna().all()
    mask = shown_.kwargs["decoder_attention_mask"]
    assert (result.input["length"], result.input["tokens"]) == (mask.shape[1], int(mask.sum()))
    pixels = subject(None, vit(), reads="image")
    seen = probe(pixels, shown(pixels, samples=3))
    assert (seen.input["samples"], seen.input["length"], seen.input["tokens"]) == (3, None, 0)
    assert seen.layers["f_attr"].notna().all()


def test_why_two_towers_have_no_perplexity() -> None:
    target = subject(tiny.gpt2(), clip())
    result = probe(target, shown(target, texts=["the whale and the sea"]))
    (reason,) = result.not_measured[result.not_measured["metric"] == "ppl"]["reason"]
    assert reason == "the model's output is not logits over its vocabulary for every token"


def test_perplexity_beside_images_is_that_of_the_text() -> None:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL, vocab_size=50),
        vision_config=transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8),
        image_token_index=49,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    tokens = torch.tensor([[1, *[49] * 4, 5, 6, 7, 8]])  # four patches
    pixels = torch.randn(1, 3, 16, 16)
    result = attnprobe.scan(model, tokens, pixel_values=pixels)
    assert {"vision"} < set(result.layers["stack"])
    with torch.no_grad():
        logits = model(input_ids=tokens, pixel_values=pixels).logits
    nll = nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert result.model["nll"].iloc[0] == pytest.approx(float(nll), rel=1e-5)


# padding


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "roberta"])
def test_padding_on_either_side_gives_what_a_text_alone_gives(family: str, side: str) -> None:
    torch.manual_seed(0)
    text = {**SMALL, "vocab_size": 50, "pad_token_id": 1}
    model: nn.Module
    if family == "gpt2":
        shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2Model(transformers.GPT2Config(**shape, **ends))
    elif family == "llama":
        model = transformers.LlamaModel(transformers.LlamaConfig(**text))
    elif family == "bert":
        model = transformers.BertModel(transformers.BertConfig(**text))
    else:
        model = transformers.RobertaModel(transformers.RobertaConfig(**text))
    model.eval()
    rows = [torch.randint(2, 50, (length,)) for length in (9, 4)]
    tokens, mask = torch.full((2, 9), 1), torch.zeros(2, 9, dtype=torch.long)
    for n, row in enumerate(rows):
        where = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
        tokens[n, where], mask[n, where] = row, 1
    with torch.no_grad():
        batched = ForwardInputs(tokens, mask, None, {}).forward(model).last_hidden_state
        for n, row in enumerate(rows):
            alone = model(row[None]).last_hidden_state[0]
            assert torch.allclose(batched[n][mask[n] == 1], alone, atol=1e-5)


def test_figures_do_not_depend_on_padding() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, vocab_size=50, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config)
    rows = [torch.randint(2, 50, (length,)) for length in (12, 7)]
    tokens = {side: torch.zeros(2, 12, dtype=torch.long) for side in ("left", "right")}
    masks = {side: torch.zeros(2, 12, dtype=torch.long) for side in tokens}
    for n, row in enumerate(rows):
        for side, start in (("left", 12 - len(row)), ("right", 0)):
            tokens[side][n, start : start + len(row)] = row
            masks[side][n, start : start + len(row)] = 1
    columns = ["f_attr", "entropy", "entropy_norm", "first4"]
    alone = [attnprobe.scan(model, row[None]).samples for row in rows]
    for side in tokens:
        both = attnprobe.scan(model, tokens[side], attention_mask=masks[side]).samples
        for n, expected in enumerate(alone):
            own = both[(both["sample"] == n) & both["head"].notna()]
            wanted = expected[expected["head"].notna()]
            assert len(own) == len(wanted) == 4
            assert np.allclose(own[columns], wanted[columns], atol=1e-5)
