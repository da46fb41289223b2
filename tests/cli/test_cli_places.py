"""What checkpoints are called on the command line, and options that fit only some of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import Folder, Ran

from attnprobe import subject
from attnprobe.audit.runner import GatherOptions, gather

Run = Callable[..., Ran]
VERBS = ("sink", "entropy", "rank", "scan", "models", "compare", "audit")


@pytest.fixture
def steps(checkpoints: Folder, tmp_path: Path) -> Path:
    """Two checkpoints in a folder, and what training loops and people leave beside them."""
    shutil.copy(checkpoints / "gated.pt", tmp_path / "step10.pt")
    shutil.copy(checkpoints / "ungated.pt", tmp_path / "step9.pt")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "optimizer.pt").write_text("x")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("pattern", ["*", "step*.pt", "**/step?*"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_quoted_glob_is_what_it_matches_in_order(
    verb: str, pattern: str, steps: Path, run: Run
) -> None:
    ran = run(verb, steps / pattern, "-q", "--format", "json")
    assert ran.code == 0, ran.err
    content = json.loads(ran.out)
    text = json.dumps(content)
    assert text.index("step9") < text.index("step10")
    assert "optimizer" not in text


@pytest.mark.parametrize("verb", VERBS)
def test_a_glob_that_matches_nothing_is_one_line(verb: str, steps: Path, run: Run) -> None:
    ran = run(verb, steps / "*.zip", "-q", "--format", "json")
    assert ran.code == 2
    (line,) = ran.error_lines
    assert "no checkpoint" in line
    assert "matches" in line
    assert "*.zip" in line


def test_results_and_a_glob_of_them_are_no_checkpoints(steps: Path, run: Run) -> None:
    run("sink", steps / "step9.pt", "-q", "--output", steps / "saved.json")
    (line,) = run("sink", steps / "*.json", "-q").error_lines
    assert "no checkpoint matches" in line
    assert run("audit", steps / "*.json", "-q", "--rule", "f_attr<=1").code == 0


def test_a_file_with_brackets_in_its_name_is_itself(steps: Path, run: Run) -> None:
    shutil.copy(steps / "step9.pt", steps / "a[1].pt")
    assert [a.name for a in subject.addresses([str(steps / "a[1].pt")])] == ["a[1]"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_revision_of_a_path_is_refused(verb: str, checkpoints: Folder, run: Run) -> None:
    named = [checkpoints / "gated.pt", checkpoints / "ungated.pt"]
    ran = run(verb, *named, "--revision", "v2", "-q", "--format", "json")
    assert ran.code == 2
    assert all("--revision v2 is for models of the hub" in line for line in ran.error_lines)
    assert ran.error_lines


def test_a_revision_is_refused_though_the_result_is_known(
    checkpoints: Folder, tmp_path: Path
) -> None:
    (known,) = gather([checkpoints / "gated.pt"], GatherOptions(samples=2), cache=tmp_path)
    assert known.error is None
    options = GatherOptions(samples=2, revision="v2")
    (refused,) = gather([checkpoints / "gated.pt"], options, cache=tmp_path)
    assert refused.error is not None
    assert "--revision v2" in refused.error


def test_what_is_not_there_is_said_before_its_revision(run: Run, tmp_path: Path) -> None:
    (line,) = run("sink", tmp_path / "none.pt", "--revision", "v2", "-q").error_lines
    assert "none.pt does not exist" in line


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "models"])
def test_a_device_map_of_our_own_checkpoints_is_refused(
    verb: str, checkpoints: Folder, run: Run
) -> None:
    named = [checkpoints / "gated.pt", checkpoints / "ungated.pt"]
    ran = run(verb, *named, "--device-map", "auto", "-q", "--format", "json")
    assert ran.code == 2
    assert any("--device-map spreads models of transformers" in line for line in ran.error_lines)
