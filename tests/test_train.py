"""Training: the same twice, the same when resumed, and safe to interrupt."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from attnprobe import tasks
from attnprobe.errors import CheckpointError, InputError
from attnprobe.models import GateConfig, load_checkpoint
from attnprobe.train import TrainConfig, train

TINY = TrainConfig(
    steps=8,
    batch_size=8,
    length=16,
    width=16,
    layers=1,
    heads=2,
    ff=32,
    dropout=0.1,  # so that the random state matters
    warmup=2,
    gate=GateConfig("G1"),
    save_every=0,
    monitor_every=0,
    device="cpu",
)


def tiny(**changes) -> TrainConfig:
    return dataclasses.replace(TINY, **changes)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(path).model.state_dict()


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of TINY that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "model.pt"
    train(TINY, path)
    return path


def test_what_a_run_leaves(tmp_path):
    seen = []
    done = train(tiny(steps=60, lr=0.01), tmp_path / "a.pt", on_step=seen.append)
    assert [p.step for p in seen] == list(range(1, 61))
    assert seen[-1].loss < seen[0].loss - 0.5
    assert seen[0].perplexity == pytest.approx(math.exp(seen[0].loss))
    checkpoint = load_checkpoint(done.path)
    assert checkpoint.config.gate == GateConfig("G1")
    assert checkpoint.train["step"] == 60
    assert checkpoint.train["loss"] == done.loss
    assert checkpoint.train["seed"] == 0
    assert set(checkpoint.train["versions"]) == {"attnprobe", "torch"}
    assert done.perplexity == pytest.approx(math.exp(done.loss))
    assert done.parameters == sum(p.numel() for p in checkpoint.model.parameters())
    sampled = tasks.load(checkpoint.inputs).sample(2, 16, seed=0)
    assert checkpoint.model(sampled).shape == (2, 16, checkpoint.config.vocab_size)
    assert str(tmp_path) not in str(checkpoint.train)  # no path of the machine it was made on


def test_the_same_seed_gives_the_same_weights(tmp_path, whole):
    state = torch.get_rng_state()
    train(TINY, tmp_path / "again.pt")
    assert torch.equal(state, torch.get_rng_state())
    assert_same_weights(tmp_path / "again.pt", whole)
    train(tiny(seed=1), tmp_path / "other.pt")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "other.pt", whole)


class _Stop:
    """Breaks a run off after a step, by Ctrl-C or by a crash that saves nothing."""

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def __call__(self, progress) -> None:
        if progress.step != self.step:
            return
        if self.how == "crash":
            raise RuntimeError("power cut")
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("how", "kept"), [("ctrl-c", 5), ("crash", 4)])
def test_resumed_equals_uninterrupted(tmp_path, whole, how, kept):
    path = tmp_path / "model.pt"
    expected = KeyboardInterrupt if how == "ctrl-c" else RuntimeError
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(expected):
        train(tiny(save_every=2), path, on_step=_Stop(5, how))
    assert signal.getsignal(signal.SIGINT) is handler
    assert load_checkpoint(path).train["step"] == kept
    torch.rand(3)  # whatever happens in between
    train(TINY, path, resume=True)
    assert_same_weights(path, whole)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_resuming_a_finished_run_changes_nothing(tmp_path, whole):
    path = tmp_path / "model.pt"
    path.write_bytes(whole.read_bytes())
    train(TINY, path, resume=True)
    assert_same_weights(path, whole)


def test_more_steps_may_follow(tmp_path, whole):
    path = tmp_path / "model.pt"
    path.write_bytes(whole.read_bytes())
    train(tiny(steps=10), path, resume=True)
    assert load_checkpoint(path).train["step"] == 10


def test_resuming_needs_the_same_run(tmp_path, whole):
    with pytest.raises(CheckpointError, match="does not exist"):
        train(TINY, tmp_path / "nothing.pt", resume=True)
    with pytest.raises(InputError, match=r"trained otherwise: .*lr \(0.006, now 0.1\)"):
        train(tiny(lr=0.1), whole, resume=True)
    content = torch.load(whole, weights_only=True)
    del content["resume"]
    torch.save(content, tmp_path / "packaged.pt")
    with pytest.raises(CheckpointError, match="no optimiser state"):
        train(TINY, tmp_path / "packaged.pt", resume=True)


@pytest.mark.parametrize("tokens", ["bytes", "bpe"])
def test_task_text(tmp_path, tokens):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    config = tiny(task="text", tokens=tokens, vocab_size=300, text_file=text, steps=30, lr=0.01)
    done = train(config, tmp_path / "text.pt")
    checkpoint = load_checkpoint(done.path)
    assert checkpoint.inputs["kind"] == tokens
    assert checkpoint.config.vocab_size == tasks.load(checkpoint.inputs).vocab_size
    assert done.loss < math.log(checkpoint.config.vocab_size)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_curve_is_kept_beside_the_checkpoint(tmp_path):
    path, progress = tmp_path / "model.pt", []
    done = train(tiny(monitor_every=2), path, on_step=progress.append)
    curve = rows(done.metrics_path)
    assert done.metrics_path == tmp_path / "model.metrics.csv"
    assert [int(row["step"]) for row in curve] == [2, 4, 6, 8]
    assert {"loss", "ppl", "f_attr", "entropy", "gate_mean"} <= set(curve[0])
    assert [p.f_attr is None for p in progress] == [True] + [False] * 7
    assert progress[3].f_attr == pytest.approx(float(curve[1]["f_attr"]))
    train(tiny(monitor_every=2), path)
    assert rows(done.metrics_path) == curve  # a new run starts a new curve


def test_watching_changes_nothing(tmp_path, whole):
    train(tiny(monitor_every=1), tmp_path / "watched.pt")
    assert_same_weights(tmp_path / "watched.pt", whole)


def test_a_resumed_curve_has_each_step_once(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(RuntimeError):
        train(tiny(monitor_every=1, save_every=3), path, on_step=_Stop(5, "crash"))
    done = train(tiny(monitor_every=1, save_every=3), path, resume=True)
    assert [int(row["step"]) for row in rows(done.metrics_path)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"task": "chess"}, "chess"),
        ({"tokens": "words"}, "words"),
        ({"steps": 0}, "steps"),
        ({"length": 1}, "length"),
        ({"lr": 0.0}, "lr"),
        ({"save_every": -1}, "save_every"),
        ({"heads": 3}, "n_heads=3"),
        ({"device": "abacus"}, "abacus"),
        ({"lr": 1e30, "clip": 1e30}, "smaller --lr"),
        ({"text_file": Path("nowhere.txt")}, "nowhere.txt"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path, changes, named):
    with pytest.raises(InputError, match=named) as caught:
        train(tiny(**changes), tmp_path / "model.pt")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_texts_too_short(tmp_path):
    text = tmp_path / "short.txt"
    for config, content in ((tiny(task="text"), "too short"), (tiny(), "ab")):
        text.write_text(content)
        with pytest.raises(InputError, match="longer --text-file"):
            train(dataclasses.replace(config, text_file=text), tmp_path / "model.pt")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        train(TINY, tmp_path / "no" / "model.pt")
