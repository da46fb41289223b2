"""What only a process of its own can show: start-up, pipes, signals and streams."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import Folder

from attnprobe import load_checkpoint
from attnprobe.cli.output import write_stdout

ATTNPROBE = [sys.executable, "-m", "attnprobe"]
HEAVY = ("torch", "transformers", "pandas", "matplotlib", "numpy")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
posix = pytest.mark.skipif(os.name != "posix", reason="signals and FIFOs of POSIX")


def start(*arguments: object, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [*ATTNPROBE, *map(str, arguments)],
        **{
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "encoding": "utf-8",
            "env": ENVIRONMENT,
            **more,
        },
    )


@pytest.mark.parametrize("arguments", [["--help"], ["scan", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from attnprobe.cli import main; code = main(sys.argv[1:]); "
        f"sys.exit(code or ', '.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (ran.returncode, ran.stderr) == (0, "")


SLOW = ("torch._dynamo", "torch._inductor", "transformers", "matplotlib.pyplot", "IPython")


@pytest.mark.parametrize("verb", ["sink", "entropy", "rank", "gate", "scan"])
def test_measuring_our_own_imports_nothing_slow(verb: str, checkpoints: Folder) -> None:
    """The compiler of torch alone takes as long to import as the rest takes together."""
    code = (
        "import sys; from attnprobe.cli import main; code = main(sys.argv[1:]); "
        f"sys.exit(code or ', '.join(m for m in {SLOW} if m in sys.modules) or 0)"
    )
    arguments = [verb, checkpoints / "gated.pt"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_help_answers_in_under_half_a_second() -> None:
    """Of processor time, which a busy machine does not stretch: what torch costs to import."""
    resource = pytest.importorskip("resource")

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*ATTNPROBE, "--help"], capture_output=True, check=True, env=ENVIRONMENT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.5


@posix
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["gated.pt"], 0), (["gated.pt", "missing.pt", "--format", "json"], 2)],
)
def test_a_reader_that_goes_away_is_no_error(
    arguments: list[str], code: int, checkpoints: Folder
) -> None:
    process = start("sink", *arguments, cwd=checkpoints.path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) == code
    assert len(err.splitlines()) == (code != 0)


@posix
def test_help_into_a_closed_pipe() -> None:
    process = start("--help")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0


@posix
def test_a_full_disk_is_an_error(checkpoints: Folder) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        process = start("sink", checkpoints / "gated.pt", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == ("attnprobe: error: cannot write the output: no space is left on the device\n")


@posix
def test_interrupt_is_130(tmp_path: Path, checkpoints: Folder) -> None:
    fifo = tmp_path / "text.txt"
    os.mkfifo(fifo)
    process = start("sink", checkpoints / "text.pt", "--text-file", fifo)
    with fifo.open("wb"):  # opens when the other side does, and keeps it waiting
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "attnprobe: interrupted: stopped before it was done\n")


@posix
def test_interrupted_training_leaves_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "mine.pt"
    shape = ["--width", 16, "--layers", 1, "--heads", 2, "--length", 8, "--batch-size", 2]
    process = start("train", out, *shape, "--steps", 10**6, "--monitor-every", 1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "mine.metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume goes on" in err
    assert load_checkpoint(out).train["step"] >= 1


def test_text_comes_from_stdin(checkpoints: Folder) -> None:
    process = start(
        *("sink", checkpoints / "text.pt", "--text-file", "-", "--length", 8, "--samples", 2),
        stdin=subprocess.PIPE,
    )
    out, err = process.communicate("a long text about a whale", timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "2 of 3 samples of stdin" in out


def test_a_terminal_that_knows_no_box_drawing(checkpoints: Folder) -> None:
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = start("scan", checkpoints / "gated.pt", env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.isascii()


def test_other_programs_get_utf8_whatever_the_terminal_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    write_stdout('{"token": "é"}')
    assert written.getvalue() == '{"token": "é"}\n'.encode()
