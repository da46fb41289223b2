"""`attnprobe models`: what is packaged, what can be made, what a file is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import Folder, Ran

from attnprobe.cli.models import gate_in_words
from attnprobe.cli.space import SPACE
from attnprobe.loading import places
from attnprobe.models import GateConfig

Run = Callable[..., Ran]


@pytest.fixture
def packaged(checkpoints: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("gated", "ungated"):
        shutil.copy(checkpoints / f"{name}.pt", tmp_path)
    monkeypatch.setattr(places, "PRETRAINED", tmp_path)
    return tmp_path


def test_the_packaged_ones_and_the_config_space(packaged: Path, run: Run) -> None:
    ran = run("models")
    assert (ran.code, ran.err) == (0, "")
    for word in ("ungated.pt", "gated.pt", "2×2", "G1 element", "1.500", "kB", str(packaged)):
        assert word in ran.out
    for option, choices in SPACE.items():
        assert option in ran.out
        assert all(choice in ran.out for choice in choices)


def test_as_json(packaged: Path, run: Run) -> None:
    content = json.loads(run("models", "--format", "json").out)
    assert [entry["name"] for entry in content["checkpoints"]] == ["ungated", "gated"]
    assert content["space"]["--gate"] == ["none", "G1", "G2", "G3", "G4", "G5"]


def test_without_packaged_ones(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PRETRAINED", tmp_path / "nowhere")
    ran = run("models")
    assert ran.code == 0
    assert "No packaged checkpoints" in ran.out
    ran = run("sink")
    assert ran.code == 2
    assert "attnprobe train" in ran.err


def test_one_in_full(checkpoints: Folder, run: Run) -> None:
    ran = run("models", checkpoints / "gated.pt", checkpoints / "translator.pt")
    assert (ran.code, ran.err) == (0, "")
    shapes = (" 2 × 2", "encoder 2 × 2 · decoder 2 × 2")
    for word in ("gated", "G1 element", "7 steps", "backcopy", "no tokenizer", *shapes):
        assert word in ran.out


def test_one_in_full_as_json(checkpoints: Folder, run: Run) -> None:
    (entry,) = json.loads(run("models", checkpoints / "gated.pt", "--format", "json").out)[
        "checkpoints"
    ]
    assert entry["config"]["gate"]["position"] == "G1"
    assert (entry["step"], entry["dtype"]) == (7, "float32")
    assert entry["parameters"] > 1000


def test_brackets_in_a_name_are_no_markup(tmp_path: Path, checkpoints: Folder, run: Run) -> None:
    path = tmp_path / "run[bold]1[reset].pt"
    shutil.copy(checkpoints / "gated.pt", path)
    ran = run("models", path)
    assert ran.code == 0
    assert ran.out.splitlines()[0] == "run[bold]1[reset]"
    assert "run[bold]1[reset]" in run("sink", path).out


def test_a_bad_one_among_others(tmp_path: Path, checkpoints: Folder, run: Run) -> None:
    ran = run("models", tmp_path / "missing.pt", checkpoints / "gated.pt")
    assert ran.code == 2
    assert "G1 element" in ran.out
    assert "missing.pt" in ran.err


def test_gates_in_words() -> None:
    def words(*arguments: str) -> str:
        return gate_in_words(GateConfig(*arguments).__dict__)

    assert words() == "none"
    assert words("G1") == "G1 element"
    assert words("G2", "head") == "G2 head"
    assert words("G1", "head", "input-independent") == "G1 head input-independent"
    assert words("G1", "element", "query", "silu", "additive") == "G1 element silu additive"
