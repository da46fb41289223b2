"""Models split over two processes of torchrun give the tables that one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers
from split_models import MODELS, save, tokens

import attnprobe
from attnprobe.cli import main
from attnprobe.errors import CheckpointError, InputError
from attnprobe.loading import parallel
from attnprobe.loading.folder import read
from attnprobe.loading.options import LoadOptions
from attnprobe.result import Result, load_results

pytest.importorskip("transformers.distributed.tensor_parallel")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or torch.cuda.is_available(), reason="gloo and CPUs"
)

HERE = Path(__file__).parent
TABLES = ("model", "layers", "heads", "samples", "sinks", "positions", "gates", "spectra")
INPUT = ("--random-tokens", "--length", "24", "--samples", "4")


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Two processes; where they hang all are ended, and the test fails."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
    ) as running:
        try:
            out, err = running.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            running.terminate()  # upon which torchrun ends what it started
            raise
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def lines(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """What attnprobe said on stderr, among torchrun's own words."""
    return [line for line in ran.stderr.splitlines() if line.startswith("attnprobe:")]


def same(ours: Result, theirs: Result) -> None:
    for table in (*TABLES, "massive", "not_measured"):
        pd.testing.assert_frame_equal(
            getattr(ours, table),
            getattr(theirs, table),
            rtol=1e-5,
            atol=1e-5,
            check_dtype=False,
            obj=table,
        )
    assert ours.architecture == theirs.architecture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def split(folder: Path) -> Path:
    """The results of all models, saved by each of two processes."""
    for name in MODELS:
        save(name, folder)
    ran = torchrun(HERE / "scan_split.py", folder, *MODELS)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_give_what_one_gives(name: str, split: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(split / name)
    alone = attnprobe.scan(model, tokens(), batch_size=2)
    for column in ("f_attr", "entropy", "erank", "ppl"):
        assert alone.model[column].notna().all()
    for rank in (0, 1):
        (result,) = load_results(split / f"{name}-{rank}.json")
        same(result, alone)


def test_the_gate_of_all_heads_is_read(split: Path) -> None:
    (result,) = load_results(split / "gated-0.json")
    assert sorted(result.gates["head"].dropna()) == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_put_together_is_refused(rank: int, split: Path) -> None:
    """Two key heads that each of two processes has: the library then attends to other ones."""
    said = json.loads((split / f"said-{rank}.json").read_text())
    assert "its keys are the same in several processes" in said["copied keys"]
    assert "give all the same tokens" in said["other tokens"]


def test_the_command_line_speaks_once_whatever_happens(split: Path, tmp_path: Path) -> None:
    """Both processes run a command, then the same again, of which the second dies half-way."""
    both, alone = tmp_path / "both.json", tmp_path / "alone.json"
    scan = ("scan", split / "grouped", *INPUT)
    ran = torchrun(
        *(HERE / "run_twice.py", *scan, "--tensor-parallel", "--format", "json"),
        *("--output", both),
    )
    assert ran.returncode != 0
    assert json.loads(ran.stdout) == json.loads(both.read_text())
    assert main([*map(str, scan), "-q", "--output", str(alone)]) == 0
    (ours,), (theirs,) = load_results(both), load_results(alone)
    same(ours, theirs)
    assert ours.checkpoint == theirs.checkpoint
    assert len(lines(ran)) == 1, ran.stderr
    assert lines(ran)[0].startswith("attnprobe: error: RuntimeError: nothing works")
    assert "exitcode: 2" in ran.stderr  # of the one that failed; that of torchrun is always 1


# what needs no second process


def as_one_of(monkeypatch: pytest.MonkeyPatch, count: int, rank: int = 0) -> None:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


def splitting(path: Path, **options: object) -> dict[str, object]:
    how = LoadOptions(tensor_parallel=True, **options)  # type: ignore[arg-type]
    config = transformers.AutoConfig.from_pretrained(path)
    return parallel.splitting(read(path), how, config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "processes", "told"),
    [
        ("one-key-head", 2, "4 heads and 1 key heads in a layer.*2 processes.*measure it in one"),
        ("grouped", 4, "4 heads and 2 key heads.*4 processes.*as many as divide 2"),
        ("grouped", 3, "3 processes"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    name: str, processes: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_one_of(monkeypatch, processes)
    with pytest.raises(CheckpointError, match=told):
        splitting(save(name, tmp_path))


def test_a_model_without_a_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_one_of(monkeypatch, 2)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, **shape))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no plan to split a gpt2"):
        splitting(tmp_path)


def test_it_needs_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save("grouped", tmp_path)
    assert main(["sink", str(path), "--tensor-parallel"]) == 2
    assert "torchrun --nproc-per-node 2 -m attnprobe" in capsys.readouterr().err


def test_it_is_no_device_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_one_of(monkeypatch, 2)
    with pytest.raises(InputError, match="--device-map"):
        splitting(save("grouped", tmp_path), device_map="auto")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sink"], "torchrun started 2 processes, and each would measure the same"),
        (["sink", "--tensor-parallel"], "ungated.pt is one of attnprobe's own"),
        (["sink", "--tensor-parallel", "--text-file", "-"], "cannot share stdin"),
        (["sink", "--nope"], "no option --nope"),
    ],
)
def test_torchrun_is_told_in_one_line_what_is_wrong(
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The first process to fail speaks; the other waits to be ended, and speaks if it is not."""
    waited: list[float] = []
    monkeypatch.setattr("attnprobe.cli.processes.time.sleep", waited.append)
    for rank in (1, 0):
        as_one_of(monkeypatch, 2, rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert told in shown.err
        assert len(waited) == (rank == 0)


def test_audit_in_a_job_of_torchrun_is_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A training job may judge its checkpoint from any of its processes."""
    as_one_of(monkeypatch, 2, rank=1)
    assert main(["audit", str(tmp_path / "missing.json"), "--preset", "gated"]) == 2
    shown = capsys.readouterr()
    assert "Not judged" in shown.out
    assert shown.err.startswith("attnprobe: 1 of 1: missing failed")
