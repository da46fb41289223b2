"""Inputs that a model does not run on: one line that says on which it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

from attnprobe import fitting, probing
from attnprobe.cli import main
from attnprobe.errors import InputError
from attnprobe.inputs import InputOptions, Inputs, prepare, read
from attnprobe.loading.limits import foreign_limits, reads
from attnprobe.probing import probe
from attnprobe.subject import Subject

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 8}
KERNELS, STRIDES = (10, 3, 4), (5, 2, 3)
SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
}


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **{**SMALL, "vocab_size": 32},
        num_feat_extract_layers=3,
        conv_dim=(16, 16, 16),
        conv_kernel=KERNELS,
        conv_stride=STRIDES,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2Model(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        **SIDES,
        vocab_size=32,
        d_model=16,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def spectrogram() -> nn.Module:
    config = transformers.ASTConfig(
        **SMALL, patch_size=4, num_mel_bins=8, max_length=16, frequency_stride=2, time_stride=2
    )
    return transformers.ASTModel(config)


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**IMAGE))


def clip() -> nn.Module:
    text = {**SMALL, "vocab_size": 32, "max_position_embeddings": 24}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**text, **ends}, vision_config=IMAGE, projection_dim=8
    )
    return transformers.CLIPModel(config)


def caption() -> nn.Module:
    """Which stretches no positions: its images are of one size."""
    text = {**SMALL, "vocab_size": 32, "max_position_embeddings": 24}
    decoder = transformers.BertConfig(**text, is_decoder=True, add_cross_attention=True)
    model = transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(transformers.ViTConfig(**IMAGE)),
        decoder=transformers.BertLMHeadModel(decoder),
    )
    model.config.decoder_start_token_id = 1
    return model


def mpt() -> nn.Module:
    config = transformers.MptConfig(
        d_model=16, n_heads=2, n_layers=1, expansion_ratio=1, max_seq_len=24, vocab_size=32
    )
    return transformers.MptForCausalLM(config)


def subject(model: nn.Module) -> Subject:
    torch.manual_seed(0)
    config: Any = model.config
    return Subject(
        "m",
        {},
        model.eval(),
        foreign_limits(model, config),
        None,
        {},
        reads=reads(model),
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        config=config,
    )


def shown(target: Subject, **options: Any) -> Inputs:
    asked = InputOptions(**options)
    return prepare(target, read(asked), asked)


def array(folder: Path, *shape: int) -> str:
    values = np.random.default_rng(0).normal(size=shape)
    np.save(folder / "values.npy", values.astype(np.float32))
    return str(folder / "values.npy")


def shortest() -> int:
    """What convolutions without padding need for one step at their end."""
    length = 1
    for kernel, stride in zip(reversed(KERNELS), reversed(STRIDES), strict=True):
        length = (length - 1) * stride + kernel
    return length


CASES: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "too short": (wav2vec2, (2, 30), f"m takes sound of N × {shortest()} or more, not N × 30"),
    "one sample": (wav2vec2, (2, 1), f"m takes sound of N × {shortest()} or more, not N × 1"),
    "no whole 30 s": (whisper, (2, 8, 20), "m takes sound of N × 8 × 40, not N × 8 × 20"),
    "over 30 s": (whisper, (2, 8, 60), "m takes sound of N × 8 × 40, not N × 8 × 60"),
    "few frames": (spectrogram, (2, 2, 8), "m takes sound of N × 16 × 8, not N × 2 × 8"),
    "below a patch": (vit, (2, 3, 4, 4), "m takes pixels of N × 3 × 8 × 8 or more, not N × 3 × 4"),
    "too low": (vit, (2, 3, 4, 32), "m takes pixels of N × 3 × 8 × 32 or more, not N × 3 × 4 × 32"),
    "in one tower": (clip, (2, 3, 5, 6), "m takes pixels of N × 3 × 8 × 8 or more, not N × 3 × 5"),
    "of one size": (caption, (2, 3, 32, 32), "m takes pixels of N × 3 × 16 × 16, not N × 3 × 32"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_model_takes_is_told(name: str, tmp_path: Path) -> None:
    build, shape, says = CASES[name]
    target = subject(build())
    with pytest.raises(InputError) as told:
        probe(target, shown(target, tokens=array(tmp_path, *shape)))
    assert str(told.value).startswith(says)
    assert "\n" not in str(told.value)


def test_the_shortest_that_is_told_is_taken(tmp_path: Path) -> None:
    target = subject(wav2vec2())
    result = probe(target, shown(target, tokens=array(tmp_path, 2, shortest())))
    assert result.layers["f_attr"].notna().all()


@pytest.mark.parametrize(
    ("build", "shape"), [(wav2vec2, (2, 0)), (whisper, (2, 8, 0)), (clip, (2, 3, 0, 0))]
)
def test_nothing_at_all_is_refused_before(
    build: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"values.npy has the shape 2 × .*0, m reads N × "):
        shown(subject(build()), tokens=array(tmp_path, *shape))


def test_texts_longer_than_a_models_own_code_takes() -> None:
    target = subject(mpt())
    assert target.limits.max_length is None  # no table that could be counted
    with pytest.raises(InputError) as told:
        probe(target, shown(target, random_tokens=True, length=40, samples=2))
    assert str(told.value) == (
        "a sample has 40 tokens, m takes at most 24: use --length 24 or less"
    )
    probe(target, shown(target, random_tokens=True, length=24, samples=2))


def test_where_patience_ends_what_ran_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "PATIENCE", -1.0)
    target = subject(mpt())
    with pytest.raises(InputError, match=r"a sample has 40 tokens, m runs on 24: use --length 24$"):
        probe(target, shown(target, random_tokens=True, length=40, samples=2))


class Picky(nn.Module):
    """Refuses one token, whatever the length."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.GPT2Model(
            transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=24)
        )
        self.config = self.model.config

    def forward(self, input_ids: Tensor) -> Any:
        if bool((input_ids == 7).any()):
            raise ValueError("no sevens\nplease")
        return self.model(input_ids)


def test_what_no_size_would_mend_is_said_in_the_models_words(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[1, 2, 3], [4, 5, 6], [7, 7, 7]]))
    target = subject(Picky())
    given = shown(target, tokens=str(tmp_path / "ids.npy"))
    with pytest.raises(InputError) as told:
        probe(target, given, batch_size=1)
    assert str(told.value) == (
        f"m does not run on {tmp_path / 'ids.npy'} (ValueError: no sevens please)"
    )


def test_a_fault_of_ours_is_not_put_on_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("of our own")

    target = subject(vit())
    given = shown(target, samples=2)
    monkeypatch.setattr(probing, "scan", broken)
    with pytest.raises(RuntimeError, match="of our own"):
        probe(target, given)


def test_on_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wav2vec2().save_pretrained(tmp_path / "ears")  # type: ignore[operator]
    capfd.readouterr()
    code = main(["sink", str(tmp_path / "ears"), "--tokens", array(tmp_path, 2, 30)])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err == (f"attnprobe: error: ears takes sound of N × {shortest()} or more, not N × 30\n")


def test_positions_of_sound_are_no_bound_of_text() -> None:
    assert subject(whisper()).limits.max_length == 24  # of its decoder, not the 20 of its encoder
