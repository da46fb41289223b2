"""What is foreseen of a checkpoint's input is what its result then says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch

from attnprobe.audit.foreseeing import Foreseen
from attnprobe.compare import refuse_different
from attnprobe.errors import InputError
from attnprobe.foreseen import foreseen
from attnprobe.inputs import InputOptions, prepare, read
from attnprobe.loading import pretrained
from attnprobe.models import ModelConfig, build, save_checkpoint
from attnprobe.probing import probe
from attnprobe.subject import LoadOptions, addresses, load
from attnprobe.tasks import Bytes

ASKED = {
    "default": InputOptions(samples=3),
    "text": InputOptions(texts=["the whale and the sea", "dawn"]),
    "random": InputOptions(random_tokens=True, length=6, samples=2, seed=5),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2", "roberta", "t5"):
        tiny.save(kind, folder / kind, words=True)
    tiny.save("vit", folder / "vit")
    config = ModelConfig(vocab_size=257, d_model=8, n_layers=1, n_heads=1, max_length=8)
    save_checkpoint(folder / "own.pt", build(config), Bytes().state(), {})
    return folder


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["llama", "gpt2", "roberta", "t5", "own.pt"])
def test_it_is_what_is_then_measured(models: Path, name: str, asked: str) -> None:
    (address,) = addresses([str(models / name)])
    source = read(ASKED[asked])
    told = foreseen(address, LoadOptions(), source, ASKED[asked])
    subject = load(address)
    result = probe(subject, prepare(subject, source, ASKED[asked]), metrics="sink")
    for key in ("sha256", "length", "samples", "source", "seed", "kind"):
        assert told["input"][key] == result.input[key]
    for key in ("task", "tokenizer"):
        assert told["checkpoint"][key] == result.checkpoint[key]
    assert told["checkpoint"]["config"] == result.checkpoint["config"]


def test_of_pixels_the_type_of_the_weights_decides(models: Path) -> None:
    (address,) = addresses([str(models / "vit")])
    told = foreseen(address, LoadOptions(), read(ASKED["default"]), ASKED["default"])
    assert told["input"]["samples"] == 3
    assert "sha256" not in told["input"]


def test_no_weight_is_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_them(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(pretrained, "load", read_them)
    (address,) = addresses([str(models / "llama")])
    source = read(ASKED["text"])
    assert foreseen(address, LoadOptions(), source, ASKED["text"])["input"]["length"] == 5
    assert all(
        p.device == torch.device("meta")
        for p in pretrained.sketch(_folder(models / "llama"), LoadOptions()).model.parameters()
    )


def _folder(path: Path) -> Any:
    from attnprobe.loading.folder import read as read_folder

    return read_folder(path)


def shown(name: str, **about: Any) -> Foreseen:
    told = {"source": "text", "length": 8, "samples": 2, **about}
    return Foreseen(name, {"tokenizer": "ab" * 32}, told, {"epsilon": 0.3, "pre_gate": False})


def test_only_what_is_known_is_a_reason() -> None:
    alike, other = shown("b", sha256="1"), shown("c", sha256="2")
    refuse_different([shown("a", sha256="1"), alike])
    refuse_different([shown("a", sha256="1"), shown("b")])  # of pixels
    refuse_different([shown("a"), other, None])
    refuse_different([None, alike, other])  # the first cannot be read, which is said later
    with pytest.raises(InputError, match="c would be measured on another input than a"):
        refuse_different([shown("a", sha256="1"), None, alike, other])
    with pytest.raises(InputError, match="c would be measured with another length than a"):
        refuse_different([shown("a"), shown("c", length=9)])
