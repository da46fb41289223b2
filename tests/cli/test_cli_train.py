"""`attnprobe train` in miniature."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import Ran

from attnprobe import load_checkpoint
from attnprobe.train import Progress

Run = Callable[..., Ran]
TINY = ["--steps", 4, "--width", 16, "--layers", 1, "--heads", 2, "--length", 8]
TINY += ["--batch-size", 4, "--monitor-every", 2, "--device", "cpu"]


def test_a_checkpoint_that_can_be_measured(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "mine.pt"
    ran = run("train", out, *TINY, "--gate", "G1", "--granularity", "head")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"{out}: 4 steps, ")
    assert f"attnprobe scan {out}" in ran.out
    checkpoint = load_checkpoint(out)
    assert checkpoint.config.gate.granularity == "head"
    assert checkpoint.train["step"] == 4
    with (tmp_path / "mine.metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"]
    assert {"loss", "ppl", "f_attr"} <= set(rows[0])
    assert run("scan", out).code == 0


def test_a_log_shows_that_a_run_goes_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnprobe.cli.train.LINE_EVERY", 0.0)
    ran = run("train", tmp_path / "mine.pt", *TINY)
    assert ran.code == 0
    lines = ran.err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [f"step {n} of 4" for n in (1, 2, 3, 4)]
    assert "F-Attr" in lines[-1]
    assert run("train", tmp_path / "other.pt", *TINY, "--quiet").err == ""


def test_a_text_of_ones_own(tmp_path: Path, run: Run) -> None:
    text = tmp_path / "law.txt"
    text.write_text("call me ishmael " * 40)
    out = tmp_path / "text.pt"
    ran = run("train", out, *TINY, "--task", "text", "--text-file", text)
    assert ran.code == 0, ran.err
    inputs = load_checkpoint(out).inputs
    assert inputs is not None
    assert inputs["kind"] == "bytes"


def test_resuming_needs_no_option_again(tmp_path: Path, run: Run) -> None:
    whole, halves = tmp_path / "whole.pt", tmp_path / "halves.pt"
    options = [*TINY, "--gate", "G2", "--seed", 3, "--feed-forward", "swiglu"]
    assert run("train", whole, *options, "--steps", 6).code == 0
    assert run("train", halves, *options).code == 0
    ran = run("train", halves, "--resume", "--steps", 6)
    assert ran.code == 0, ran.err
    resumed = load_checkpoint(halves)
    assert resumed.train["step"] == 6
    assert resumed.config == load_checkpoint(whole).config
    ran = run("train", halves, "--resume", "--steps", 8, "--gate", "G1")
    assert ran.code == 2
    assert "trained otherwise" in ran.err


def test_resuming_on_another_text_asks_for_it(tmp_path: Path, run: Run) -> None:
    text, out = tmp_path / "law.txt", tmp_path / "mine.pt"
    text.write_text("call me ishmael " * 40)
    assert run("train", out, *TINY, "--text-file", text).code == 0
    ran = run("train", out, "--resume", "--steps", 6)
    assert ran.code == 2
    assert "law.txt" in ran.err
    assert run("train", out, "--resume", "--steps", 6, "--text-file", text).code == 0


def test_a_safetensors_name_is_refused(tmp_path: Path, run: Run) -> None:
    ran = run("train", tmp_path / "mine.safetensors", *TINY)
    assert ran.code == 2
    assert ".pt" in ran.err
    assert not list(tmp_path.iterdir())


def test_interrupted_it_says_how_to_go_on(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: object, path: Path, *, resume: bool, on_step: object) -> None:
        on_step(Progress(step=3, steps=9, loss=1.0, perplexity=2.7, f_attr=0.5))  # type: ignore[operator]
        raise KeyboardInterrupt

    monkeypatch.setattr("attnprobe.train.train", interrupted)
    out = tmp_path / "mine.pt"
    ran = run("train", out, *TINY)
    assert (ran.code, ran.out) == (130, "")
    assert f"after 3 steps; attnprobe train {out} --resume goes on" in ran.err


def test_a_checkpoint_that_is_there_is_not_lost(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "mine.pt"
    assert run("train", out, *TINY).code == 0
    before = out.read_bytes()
    ran = run("train", out, *TINY, "--seed", "1")
    assert (ran.code, ran.out) == (2, "")
    assert ran.error_lines == [
        f"attnprobe: error: {out} is there already: "
        "--resume goes on with it, --force trains it anew"
    ]
    assert out.read_bytes() == before
    assert run("train", out, *TINY, "--seed", "1", "--force").code == 0
    assert out.read_bytes() != before


@pytest.mark.parametrize("resume", [["--force"], ["--resume"]])
def test_interrupted_before_the_first_step(
    resume: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.pt"
    assert run("train", out, *TINY).code == 0

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnprobe.train.train", interrupted)
    ran = run("train", out, *TINY, *resume)
    assert ran.code == 130
    assert ran.error_lines == ["attnprobe: interrupted: stopped before it was done"]


def test_gate_options_without_a_gate_are_refused(tmp_path: Path, run: Run) -> None:
    ran = run("train", tmp_path / "a.pt", *TINY, "--granularity", "head")
    assert (ran.code, ran.out) == (2, "")
    assert "give --gate G1" in ran.err
    assert not list(tmp_path.iterdir())


def test_quiet_says_nothing(tmp_path: Path, run: Run) -> None:
    ran = run("train", tmp_path / "a.pt", *TINY, "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
