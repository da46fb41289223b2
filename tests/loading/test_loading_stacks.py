"""Layers and heads by stack, as configs say them and as the models that they make have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from tiny_models import Ran
from torch import nn

from attnprobe.loading.stacks import stacks

WIDE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT: dict[str, Any] = {**WIDE, "vocab_size": 32, "max_position_embeddings": 24}
IMAGE: dict[str, Any] = {**WIDE, "image_size": 16, "patch_size": 8}
SIDES: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CLIP = transformers.CLIPConfig(
    text_config={**TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
    vision_config={**IMAGE, "num_hidden_layers": 3, "num_attention_heads": 4},
    projection_dim=8,
)
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(**SIDES, num_mel_bins=8, max_source_positions=20)
    return transformers.WhisperForConditionalGeneration(config)


def photographed() -> nn.Module:
    decoder = transformers.BertConfig(**{**TEXT, "num_hidden_layers": 3}, is_decoder=True)
    decoder.add_cross_attention = True
    return transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(transformers.ViTConfig(**IMAGE)),
        decoder=transformers.BertLMHeadModel(decoder),
    )


def swin() -> nn.Module:
    shape = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 4}
    return transformers.SwinModel(transformers.SwinConfig(**shape, depths=[1, 2], num_heads=[2, 4]))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(**T5, num_layers=2, num_decoder_layers=3)
        ),
        "encoder 2 × 2 · decoder 3 × 2",
    ),
    "t5 encoder": (
        lambda: transformers.T5EncoderModel(transformers.T5Config(**T5, num_layers=2)),
        "2 × 2",
    ),
    "clip": (lambda: transformers.CLIPModel(CLIP), "text 2 × 2 · vision 3 × 4"),
    "clip's images": (
        lambda: transformers.CLIPForImageClassification(CLIP),
        "vision 3 × 4",
    ),
    "whisper": (whisper, "encoder 2 × 2 · decoder 3 × 4"),
    "bart's decoder": (
        lambda: transformers.BartForCausalLM(transformers.BartConfig(**SIDES)),
        "3 × 4",
    ),
    "an image's caption": (photographed, "encoder 2 × 2 · decoder 3 × 2"),
    "swin": (swin, "3 × 2–4"),
    "videomae": (
        lambda: transformers.VideoMAEModel(
            transformers.VideoMAEConfig(**IMAGE, num_frames=4, decoder_num_hidden_layers=5)
        ),
        "2 × 2",
    ),
    "llama": (lambda: tiny.small("llama"), "2 × 2, 1 key–value head"),
    "bert": (lambda: tiny.small("bert"), "2 × 2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_stack_by_itself(name: str, tmp_path: Path, run: Callable[..., Ran]) -> None:
    torch.manual_seed(0)
    build, expected = MODELS[name]
    build().save_pretrained(tmp_path)  # type: ignore[operator]
    ran = run("models", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    (line,) = [line for line in ran.out.splitlines() if line.startswith("layers × heads")]
    assert line.removeprefix("layers × heads").strip() == expected


def test_they_are_those_that_a_scan_meets(tmp_path: Path, run: Callable[..., Ran]) -> None:
    for name in ("clip", "whisper", "t5", "an image's caption"):
        folder = tmp_path / name
        MODELS[name][0]().save_pretrained(folder)  # type: ignore[operator]
        ran = run("sink", folder, "--samples", "1", "--length", "4", "--format", "json")
        (result,) = json.loads(ran.out)["results"]
        layers = {(row["stack"], row["layer"]) for row in result["layers"] if row["kind"] == "self"}
        met: dict[str, int] = {}
        for stack, _ in layers:
            met[stack] = met.get(stack, 0) + 1
        (entry,) = json.loads(run("models", folder, "--format", "json").out)["checkpoints"]
        assert {stack["stack"]: stack["layers"] for stack in entry["stacks"]} == met


def test_what_a_config_leaves_out_is_what_the_library_takes_for_granted() -> None:
    said = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}
    found = {stack["stack"]: (stack["layers"], stack["heads"]) for stack in stacks(said)}
    text, vision = transformers.LlamaConfig(), transformers.LlavaConfig().vision_config
    assert found == {
        "text": (text.num_hidden_layers, text.num_attention_heads),
        "vision": (vision.num_hidden_layers, vision.num_attention_heads),
    }


@pytest.mark.parametrize("config", [{}, {"model_type": "zorp"}, {"text_config": 5, "depths": []}])
def test_what_is_not_known_is_not_said(config: dict[str, Any]) -> None:
    assert stacks(config) == []


def test_a_tower_beside_a_text_model_of_the_same_config() -> None:
    """As the first vision–language models wrote it: the text's own at the top."""
    vision = {"depth": 3, "num_heads": 4}
    found = stacks({"num_hidden_layers": 2, "num_attention_heads": 2, "vision_config": vision})
    assert [(s["stack"], s["layers"], s["heads"]) for s in found] == [
        ("text", 2, 2),
        ("vision", 3, 4),
    ]


def test_layers_without_heads() -> None:
    assert stacks({"num_hidden_layers": 2, "state_size": 4}) == [
        {"stack": "", "layers": 2, "heads": None, "key_value_heads": None}
    ]
    assert stacks({"depths": [1, 2], "hidden_sizes": [8, 16]}) == []  # of convolutions
