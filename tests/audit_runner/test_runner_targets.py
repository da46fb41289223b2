"""What targets stand for, without opening any."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnprobe.audit.cache import default_folder
from attnprobe.audit.targets import resolve
from attnprobe.loading import places


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"schema": 1}' if name.endswith(".json") else "")


def names(*given: object) -> list[str]:
    return [target.name for target in resolve([str(g) for g in given])]


def test_a_folder_is_in_order_of_step_then_name(tmp_path: Path) -> None:
    touch(
        tmp_path, "final.pt", "ckpt-1000.pt", "step_20_b.pt", "step_20_a.pt", "step-3.pt", "n.txt"
    )
    assert names(tmp_path) == ["step-3", "step_20_a", "step_20_b", "ckpt-1000", "final"]
    assert names(tmp_path / "*") == names(tmp_path)


def test_a_number_beside_the_step_is_not_the_step(tmp_path: Path) -> None:
    touch(tmp_path, "gpt2-step9-v7.pt", "gpt2-step10-v1.pt")
    assert names(tmp_path) == ["gpt2-step9-v7", "gpt2-step10-v1"]


def test_a_folder_of_results_and_a_folder_of_both(tmp_path: Path) -> None:
    touch(tmp_path / "results", "b.json", "a.json")
    (tmp_path / "results/config.json").write_text("{}")
    touch(tmp_path / "both", "a.json", "m.pt")
    assert names(tmp_path / "results") == ["a", "b"]
    assert names(tmp_path / "both") == ["m"]


def test_names_are_as_long_as_it_takes(tmp_path: Path) -> None:
    touch(tmp_path, "run1/last.pt", "run2/last.pt", "a.pt", "a.json", "a.safetensors", "b.pt")
    assert names(tmp_path / "**/last.pt") == ["run1/last", "run2/last"]
    assert names(tmp_path / "a.*", tmp_path / "b.pt") == ["a.json", "a.pt", "a.safetensors", "b"]


def test_a_file_is_taken_once_where_it_is_named_first(tmp_path: Path) -> None:
    touch(tmp_path, "a.pt", "b.pt")
    assert names(tmp_path / "b.pt", tmp_path, tmp_path / "*.pt") == ["b", "a"]


def test_odd_names(tmp_path: Path) -> None:
    touch(tmp_path, "[1].pt", "ünï cödé.pt")
    assert names(tmp_path / "[1].pt", tmp_path / "ünï cödé.pt") == ["[1]", "ünï cödé"]
    (target,) = resolve(["x" * 5000])
    assert "does not exist" in str(target.problem)
    (target,) = resolve(["~nobody-of-this-name/a.pt"])
    assert "does not exist" in str(target.problem)


def test_packaged_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "PRETRAINED", tmp_path)
    touch(tmp_path, "gated.pt", "ungated.pt", "third.pt")
    assert names() == ["ungated", "gated"]
    assert resolve(["third"])[0].path == tmp_path / "third.pt"
    assert "the packaged ones are ungated, gated, third" in str(resolve(["fourth"])[0].problem)


def test_where_the_cache_is() -> None:
    assert default_folder({"ATTNPROBE_CACHE": "/x", "XDG_CACHE_HOME": "/y"}) == Path("/x")
    assert default_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/attnprobe")
    assert default_folder({}) == Path.home() / ".cache/attnprobe"
