"""What a path or a packaged name turns into."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnprobe.audit.targets import resolve
from attnprobe.errors import CheckpointError, InputError
from attnprobe.loading import places
from attnprobe.models import ModelConfig, build, save_checkpoint
from attnprobe.subject import Address, addresses, find_device, load, packaged
from attnprobe.tasks import Bytes

CONFIG = ModelConfig(vocab_size=257, d_model=8, n_layers=1, n_heads=1, max_length=8)


def save(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    train = {"step": 5, "loss": 2.0, "perplexity": 7.389, "seed": 3}
    save_checkpoint(path, build(CONFIG), Bytes().state(), train)
    return path


@pytest.fixture
def pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pretrained"
    for name in ("gated-head", "gated", "ungated"):
        save(folder / f"{name}.pt")
    monkeypatch.setattr(places, "PRETRAINED", folder)
    return folder


def names(*given: Path | str) -> list[str]:
    return [address.name for address in addresses([str(g) for g in given])]


def test_packaged_ones_come_with_the_pair_first(pretrained: Path) -> None:
    assert [address.name for address in packaged()] == ["ungated", "gated", "gated-head"]


@pytest.mark.parametrize("nothing", [None, []])
def test_nothing_means_the_pair(pretrained: Path, nothing: list[str] | None) -> None:
    assert [address.name for address in addresses(nothing)] == ["ungated", "gated"]


def test_nothing_without_a_pair_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PRETRAINED", tmp_path)
    with pytest.raises(CheckpointError, match="attnprobe train"):
        addresses(None)


def test_a_packaged_name(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert addresses(["gated"]) == [Address("gated", pretrained / "gated.pt")]
    save(tmp_path / "gated")
    assert addresses(["gated"]) == [Address("gated", Path("gated"))]  # what is there goes first


def test_names_are_made_distinct() -> None:
    assert names("a/model.pt") == ["model"]
    assert names("a/model.pt", "b/model.pt", "c.pt") == ["a/model", "b/model", "c"]
    assert names("x/a/model.pt", "y/a/model.pt") == ["x/a/model", "y/a/model"]
    assert names("model.pt", "model.pt") == ["model", "model (2)"]
    assert names("m.pt", "m.safetensors") == ["m", "m (2)"]
    assert names("model.v1.pt", "odd.name") == ["model.v1", "odd.name"]


def test_a_folder_is_its_checkpoints_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("step10.pt", "step9.pt", "notes.txt", "log.metrics.csv"):
        (tmp_path / name).touch()
    assert names(tmp_path) == ["step9", "step10"]
    (tmp_path / "empty").mkdir()
    assert names(tmp_path / "empty") == ["empty"]  # which says what it lacks when it is loaded


def test_who_it_is(tmp_path: Path) -> None:
    path = save(tmp_path / "mine.pt")
    found = load(Address("mine", path))
    assert found.about == {
        "name": "mine",
        "path": str(path),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "task": "bytes",
        "tokenizer": found.about["tokenizer"],
        "step": 5,
        "loss": 2.0,
        "perplexity": 7.389,
        "seed": 3,
        "config": CONFIG.to_dict(),
    }
    json.dumps(found.about)
    assert isinstance(found.vocabulary, Bytes)
    assert found.config == CONFIG
    assert not found.model.training


def test_a_bare_state_dict_has_no_vocabulary(tmp_path: Path) -> None:
    torch.save(build(CONFIG).state_dict(), tmp_path / "bare.pt")
    found = load(Address("bare", tmp_path / "bare.pt"), model_config=CONFIG.to_dict())
    assert found.vocabulary is None
    assert found.about["tokenizer"] is None
    assert (found.about["task"], found.about["step"]) == (None, None)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_weights_are_cast(tmp_path: Path, dtype: str) -> None:
    found = load(Address("mine", save(tmp_path / "mine.pt")), dtype=dtype)
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert next(found.model.parameters()).dtype == expected


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("cuda:99", "toaster", "", "meta"):
        with pytest.raises(InputError, match="no device"):
            find_device(name)


def test_what_is_not_there_lists_what_is(pretrained: Path) -> None:
    (address,) = addresses(["gatde"])
    with pytest.raises(CheckpointError, match="packaged ones are ungated, gated, gated-head"):
        load(address)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "no/such/folder/x.pt"])
def test_names_of_no_file(pretrained: Path, name: str) -> None:
    (address,) = addresses([name])
    with pytest.raises(CheckpointError):
        load(address)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_no_folder_to_look_into(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(pretrained)  # where there is something to measure
    for find in (addresses, resolve):
        with pytest.raises(InputError, match="a checkpoint has no name"):
            find([name])


def test_a_link_that_leads_nowhere(pretrained: Path) -> None:
    for name, target in (("loop", "loop"), ("lost", "gone.pt")):
        (pretrained / name).symlink_to(target)
        (address,) = addresses([str(pretrained / name)])
        with pytest.raises(CheckpointError, match=f"is a link to {target}, which leads nowhere"):
            load(address)
        (found,) = resolve([str(pretrained / name)])
        assert "leads nowhere" in str(found.problem)


def test_a_path_that_may_not_be_seen(pretrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user sees it; root, who tests run as in containers, is refused nothing."""

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (pretrained / "closed").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    (address,) = addresses([str(pretrained / "closed")])
    with pytest.raises(CheckpointError, match=r"cannot read .*closed: Permission denied"):
        load(address)
    assert "Permission denied" in str(resolve([str(pretrained / "closed")])[0].problem)


def test_a_transformers_folder_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (address,) = addresses([str(tmp_path)])
    with pytest.raises(CheckpointError, match="holds a config but no weights"):
        load(address)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load(Address("x", tmp_path / "model-00001-of-00002.safetensors"))


def test_no_unforeseen_error_for_any_bytes(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.pt").read_bytes()
    for number, content in enumerate((b"", b"\x80", b"PK\x03\x04", whole[:200], whole[:-50])):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{number}\.pt"):
            load(Address("bad", path))


def test_equal_vocabularies_have_equal_names(tmp_path: Path) -> None:
    same = [load(Address(n, save(tmp_path / f"{n}.pt"))).about["tokenizer"] for n in "ab"]
    assert same[0] == same[1]
    packaged = {load(address).about["tokenizer"] for address in addresses([])}
    assert len(packaged) == 1
    assert packaged != set(same)
