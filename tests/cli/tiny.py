"""Tiny checkpoints on disk, and what a command line gave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from attnprobe.models import GateConfig, ModelConfig, build, save_checkpoint
from attnprobe.tasks import BackCopy, Bytes

LAW = "the whale and the sea and the ship that sailed at dawn "
LENGTH = 16


@dataclass
class Ran:
    """What a command line gave."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return self.err.splitlines()


@dataclass
class Folder:
    """Where the checkpoints of a test session lie; `folder / "gated.pt"`."""

    path: Path

    def __truediv__(self, name: str) -> str:
        return str(self.path / name)


def make(path: Path, vocabulary: BackCopy | Bytes | None, seed: int = 0, **changes: object) -> None:
    """An untrained two-layer model that looks like one that `attnprobe train` wrote."""
    size = 30 if vocabulary is None else vocabulary.vocab_size
    shape: dict[str, object] = {
        "vocab_size": size,
        "d_model": 16,
        "n_layers": 2,
        "n_heads": 2,
        "max_length": LENGTH,
        **changes,
    }
    torch.manual_seed(seed)
    model = build(ModelConfig(**shape))  # type: ignore[arg-type]
    train = {"step": 7, "steps": 7, "loss": 1.5, "perplexity": 4.4817, "seed": seed}
    save_checkpoint(path, model, None if vocabulary is None else vocabulary.state(), train)


def fill(folder: Path) -> Folder:
    """One checkpoint of every kind, with names that the tests speak of."""
    task = BackCopy.learn(LAW)
    make(folder / "ungated.pt", task)
    make(folder / "gated.pt", task, gate=GateConfig("G1"))
    make(folder / "text.pt", Bytes())
    make(folder / "learned.pt", Bytes(), positions="learned")
    make(folder / "translator.pt", None, architecture="encoder-decoder")
    make(folder / "wide.pt", task, n_layers=3, max_length=20)
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=30, d_model=16, n_layers=2, n_heads=2, max_length=LENGTH)
    state = build(config).state_dict()
    torch.save({f"module.{name}": value for name, value in state.items()}, folder / "bare.pt")
    (folder / "shape.json").write_text(json.dumps(config.to_dict()))
    return Folder(folder)
