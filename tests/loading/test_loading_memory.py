"""A run that cannot fit is refused before it starts, with the flag that would make it fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from tiny_models import Ran

from attnprobe import probing
from attnprobe.errors import TooLargeError
from attnprobe.loading import memory
from attnprobe.loading.folder import read

SHORT = ("--length", "8", "--samples", "4")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny.save("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes are free for weights."""
    monkeypatch.setattr(probing, "check_batch", lambda *_: None)

    def free(count: int) -> None:
        monkeypatch.setattr(memory, "available", lambda device: count)

    return free


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_bytes_of_weights_are_those_that_the_model_has(
    llama: Path, dtype: torch.dtype | None
) -> None:
    model = tiny.small("llama").to(dtype or torch.float32)
    expected = sum(p.numel() * p.itemsize for p in model.parameters())
    assert memory.bytes_of_weights(read(llama).weights, dtype) == expected


def test_this_machine_says_what_is_free() -> None:
    free = memory.available(torch.device("cpu"))
    if not Path("/proc/meminfo").exists():
        pytest.skip("no such file here")
    assert free is not None
    assert 1 << 20 < free < 1 << 50
    assert memory.available(torch.device("meta")) is None


def test_weights_that_fit_as_bfloat16(
    llama: Path, run: Callable[..., Ran], room: Callable[[int], None]
) -> None:
    needed = memory.bytes_of_weights(read(llama).weights, None)
    room(needed - 1)
    ran = run("sink", llama, *SHORT)
    assert (ran.code, ran.out) == (2, "")
    assert re.fullmatch(
        r"attnprobe: error: the weights of .*llama take [\d.]+ kB, cpu has [\d.]+ kB free: "
        r"use --dtype bfloat16\n",
        ran.err,
    )
    assert run("sink", llama, *SHORT, "--dtype", "bfloat16").code == 0


def test_weights_that_fit_nowhere(
    llama: Path, run: Callable[..., Ran], room: Callable[[int], None]
) -> None:
    room(1000)
    ran = run("sink", llama, *SHORT)
    assert ran.code == 2
    assert "--device-map auto" in ran.err
    assert run("sink", llama, *SHORT, "--device-map", "auto").code == 0


def test_a_batch_that_fits_in_parts(
    llama: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "check_weights", lambda *_: None)
    a_sample = 8 * 16 * 4 * 16  # hidden states
    monkeypatch.setattr(memory, "available", lambda device: 3 * a_sample)
    ran = run("sink", llama, *SHORT)
    assert (ran.code, ran.out) == (2, "")
    assert "a pass of llama over 4 × 8 tokens takes" in ran.err
    assert "use --batch-size 3\n" in ran.err
    assert run("sink", llama, *SHORT, "--batch-size", "3").code == 0
    monkeypatch.setattr(memory, "available", lambda device: a_sample // 2)
    ran = run("sink", llama, *SHORT, "--batch-size", "1")
    assert "use --batch-size 1 --length 4 or less\n" in ran.err
    assert run("sink", llama, "--length", "4", "--batch-size", "1", "--samples", "2").code == 0


@pytest.mark.parametrize("all_at_once", [False, True])
def test_logits_need_room_only_where_they_are_made_all_at_once(
    all_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.small("llama")
    if all_at_once:
        model.lm_head.__class__ = type("Adapted", (torch.nn.Linear,), {})
    monkeypatch.setattr(memory, "available", lambda device: 8 * 16 * 4 * 16)
    batch = ("llama", model, 1, 8, torch.device("cpu"))
    if not all_at_once:
        memory.check_batch(*batch)
        return
    with pytest.raises(TooLargeError, match="use --batch-size 1 --length 7"):
        memory.check_batch(*batch)


def test_where_nobody_says_what_is_free_nothing_is_refused(
    llama: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: None)
    assert run("sink", llama, *SHORT).code == 0


def test_what_does_not_fit_now_may_fit_later() -> None:
    from attnprobe.audit.worker import _is_lasting
    from attnprobe.errors import CheckpointError

    assert not _is_lasting(TooLargeError("too large"))
    assert _is_lasting(CheckpointError("damaged"))
