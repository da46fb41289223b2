"""`attnprobe compare` as it is called."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made import made

from attnprobe.audit import runner
from attnprobe.cli import main
from attnprobe.loading import places
from attnprobe.models import GateConfig, ModelConfig, build, save_checkpoint
from attnprobe.result import save_results
from attnprobe.tasks import BackCopy

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path_factory.getbasetemp() / "compare-cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: object) -> tuple[int, str, str]:
        code = main(["compare", *map(str, arguments)])
        return (code, *capfd.readouterr())

    return run_it


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results in files: a and b alike, both in one, and one of another length."""
    folder = tmp_path_factory.mktemp("saved")
    a, b = made("a"), made("b", seed=1, gate=True)
    save_results([a], folder / "a.json")
    save_results([b], folder / "b.json")
    save_results([a, b], folder / "both.json")
    save_results([made("long", input={"length": 64, "sha256": "x"})], folder / "long.json")
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    task = BackCopy.learn("the whale and the sea and the ship that sailed at dawn ")
    for name, gate in (("ungated", GateConfig()), ("gated", GateConfig("G1"))):
        torch.manual_seed(0)
        shape = {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 32}
        model = build(ModelConfig(vocab_size=task.vocab_size, gate=gate, **shape))
        save_checkpoint(folder / f"{name}.pt", model, task.state(), {"step": 1})
    (folder / "bad.pt").write_bytes(b"nothing")
    return folder


def test_result_files_need_no_torch_and_under_a_second(saved: Path) -> None:
    script = (
        "import sys, time\nfrom attnprobe.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules, time.process_time(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "compare", "-q", saved / "a.json", saved / "b.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, has_torch, seconds = done.stderr.split()
    assert (code, has_torch) == ("0", "False")
    assert float(seconds) < 1.5  # of the processor, on a machine that may be busy: 0.7 when not
    assert done.stdout.startswith("b against a\n")


def test_a_file_of_several_results(saved: Path, run: Run) -> None:
    code, out, err = run(saved / "both.json")
    assert (code, err) == (0, "")
    assert out == run(saved / "a.json", saved / "b.json")[1]


def test_another_length_is_refused_with_the_flag_to_override(saved: Path, run: Run) -> None:
    code, out, err = run(saved / "a.json", saved / "long.json")
    assert (code, out) == (2, "")
    assert err == (
        "attnprobe: error: long was measured with another length than a (64 tokens, not 32 "
        "tokens): measure them alike, or give --allow-different\n"
    )
    code, out, err = run(saved / "a.json", saved / "long.json", "--allow-different")
    assert (code, err) == (0, "")
    assert "compared all the same: long was measured" in out


def test_what_would_be_measured_unlike_is_refused_before(
    checkpoints: Path, saved: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path / "cache"))
    other = BackCopy.learn("call me ishmael some years ago never mind how long precisely ")
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 32}
    model = build(ModelConfig(vocab_size=other.vocab_size, **shape))
    save_checkpoint(tmp_path / "other.pt", model, other.state(), {})
    ours, how = checkpoints / "ungated.pt", ("--length", 32, "--samples", 8)
    code, out, err = run(ours, tmp_path / "other.pt", *how)
    assert (code, out) == (2, "")
    assert err.startswith(
        "attnprobe: error: other would be measured with another tokenizer than ungated (backcopy"
    )
    assert err.endswith("measure them alike, or give --allow-different\n")
    assert err.count("\n") == 1  # no line says that one was measured
    assert not list((tmp_path / "cache").glob("*.json"))
    code, out, err = run(saved / "long.json", ours, *how)
    assert (code, out) == (2, "")
    assert "ungated would be measured with another length than long (32 tokens, not 64" in err
    assert err.count("\n") == 1
    code, out, err = run(ours, tmp_path / "other.pt", *how, "--allow-different")
    assert (code, err.count("measured")) == (0, 2)
    assert "compared all the same: other was measured with another tokenizer" in out
    code, out, err = run(ours, tmp_path / "other.pt", *how)  # now all is known
    assert (code, out) == (2, "")
    assert "other was measured with another tokenizer" in err


def test_checkpoints_are_measured_once_then_known(checkpoints: Path, run: Run) -> None:
    asked = (checkpoints / "ungated.pt", checkpoints / "gated.pt", "--length", 32, "--samples", 8)
    code, out, err = run(*asked, "--by-layer")
    assert code == 0
    assert [line.split(":")[1] for line in err.splitlines()] == [" 1 of 2", " 2 of 2"]
    assert "ungated measured" in err
    assert "gate mean by layer" in out
    code, again, err = run(*asked, "--by-layer")
    assert (code, again) == (0, out)
    assert "gated known from the cache" in err
    assert run(*asked, "--quiet")[2] == ""


def test_a_bad_one_of_several_is_reported(checkpoints: Path, run: Run) -> None:
    good = (checkpoints / "ungated.pt", checkpoints / "gated.pt", "-q", "--length", 32)
    code, out, err = run(*good, "--samples", 8, checkpoints / "bad.pt")
    assert code == 2
    assert out.startswith("gated against ungated")
    assert err.count("\n") == 1
    assert "bad.pt" in err
    code, out, err = run(checkpoints / "bad.pt", *good, "--samples", 8)
    assert (code, out) == (2, "")
    assert "what the others are to be compared to" in err


def test_without_arguments_it_is_the_packaged_pair(
    checkpoints: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PRETRAINED", checkpoints)
    code, out, _ = run("--length", 32, "--samples", 8)
    assert code == 0
    assert out.startswith("gated against ungated")


@pytest.mark.skipif(not places.PRETRAINED.joinpath("gated.pt").exists(), reason="no pair")
def test_the_packaged_pair_is_as_the_docs_show_it(run: Run) -> None:
    code, out, _ = run("-q")
    assert code == 0
    page = (Path(__file__).parents[2] / "docs/compare.md").read_text(encoding="utf-8")
    (found, numbers), (shown, expected) = (_table(text) for text in (out, page))
    assert found == shown
    assert numbers == pytest.approx(expected, rel=0.02, abs=2e-3)  # of another machine


def _table(text: str) -> tuple[list[str], list[float]]:
    """The words of a comparison's table, and its numbers."""
    lines = "\n".join(line for line in text.splitlines() if "│" in line)
    number = r"[+-]?\d+(?:\.\d+)?"
    return re.sub(number, "", lines).split(), [float(n) for n in re.findall(number, lines)]


def test_files_formats_and_the_figure(saved: Path, run: Run, tmp_path: Path) -> None:
    pair = (saved / "a.json", saved / "b.json")
    files = [tmp_path / f"t{suffix}" for suffix in (".json", ".csv", ".md", ".tex")]
    outputs = [word for path in files for word in ("--output", path)]
    code, out, _ = run(*pair, *outputs, "--plot", tmp_path / "f.svg", "--format", "json")
    assert code == 0
    assert json.loads(out) == json.loads(files[0].read_text())
    assert all(path.stat().st_size for path in (*files, tmp_path / "f.svg"))
    for format, path in zip(("csv", "md", "latex"), files[1:], strict=True):
        assert run(*pair, "--format", format)[1] == path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.json",), "only one result to compare: give two different ones or more"),
        (("a.json", "a.json"), "only one result"),
        (("a.json", "nowhere.json"), "nowhere.json does not exist"),
        (("a.json", "b.json", "--plot", "f.jpg"), "use one of .png, .svg, .pdf"),
        (("a.json", "b.json", "--output", "f.xlsx"), "use one of .json"),
        (("a.json", "b.json", "--output", "nowhere/f.csv"), "there is no folder nowhere"),
        (("a.json", "b.json", "--epsilon", "2"), "between 0 and 1"),
        (("a.json", "b.json", "--format", "xml"), "xml"),
        (("a.json", "b.json", "--jobs", "0"), "jobs"),
    ],
)
def test_wrong_usage(
    saved: Path, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(saved)
    code, out, err = run(*arguments, "-q")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_one_checkpoint_is_not_measured_in_vain(
    checkpoints: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(runner, "gather", measured)
    for given in ((checkpoints / "gated.pt",), (checkpoints / "gated.pt",) * 2):
        code, out, err = run(*given)
        assert (code, out) == (2, "")
        assert err == (
            "attnprobe: error: gated alone is nothing to compare: name another checkpoint or "
            "result, too\n"
        )


def test_a_reader_that_goes_away(saved: Path) -> None:
    command = f"{sys.executable} -m attnprobe compare -q a.json b.json --by-layer | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        cwd=saved,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b against a\n", "")
