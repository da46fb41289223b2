"""Files in, models out, and one clear line for everything that is neither."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnprobe.errors import CheckpointError, InputError
from attnprobe.models import GateConfig, ModelConfig, build, load_checkpoint, save_checkpoint

CONFIG = ModelConfig(
    vocab_size=13, d_model=8, n_layers=2, n_heads=2, max_length=16, gate=GateConfig("G1", "head")
)
TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build(CONFIG).eval()


@pytest.fixture
def saved(tmp_path, model) -> Path:
    save_checkpoint(tmp_path / "model.pt", model, {"kind": "bytes"}, {"step": 3})
    return tmp_path / "model.pt"


def assert_same_model(checkpoint, model):
    assert checkpoint.config == model.config
    assert not checkpoint.model.training
    assert torch.equal(checkpoint.model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path, architecture, tied):
    values = {**CONFIG.to_dict(), "architecture": architecture, "tie_embeddings": tied}
    model = build(ModelConfig.from_dict(values)).eval()
    inputs, resume = {"kind": "bytes", "law": torch.eye(2)}, {"rng": torch.get_rng_state()}
    save_checkpoint(tmp_path / "a.pt", model, inputs, {"step": 3, "loss": 0.5}, resume)
    loaded = load_checkpoint(str(tmp_path / "a.pt"))
    assert loaded.path == tmp_path / "a.pt"
    assert loaded.config == model.config
    assert loaded.train == {"step": 3, "loss": 0.5}
    assert torch.equal(loaded.inputs["law"], torch.eye(2))
    assert torch.equal(loaded.resume["rng"], resume["rng"])
    arguments = (TOKENS,) if architecture == "decoder" else (TOKENS, TOKENS[:, :3])
    assert torch.equal(loaded.model(*arguments), model(*arguments))
    assert all(p.requires_grad for p in loaded.model.parameters())


def test_a_failed_write_leaves_the_old_file(saved, model, monkeypatch):
    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match=r"cannot write .*disk full"):
        save_checkpoint(saved, model, None, {"step": 9})
    assert load_checkpoint(saved).train == {"step": 3}
    assert list(saved.parent.iterdir()) == [saved]


def test_writing_into_a_missing_folder(tmp_path, model):
    with pytest.raises(InputError, match="cannot write"):
        save_checkpoint(tmp_path / "no" / "a.pt", model, None, {})


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
def test_bare_state_dicts(tmp_path, model, prefix, wrapper):
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match="--model-config"):
        load_checkpoint(tmp_path / "bare.pt")
    (tmp_path / "shape.json").write_text(json.dumps(CONFIG.to_dict()))
    for model_config in (tmp_path / "shape.json", CONFIG.to_dict()):
        loaded = load_checkpoint(tmp_path / "bare.pt", model_config)
        assert_same_model(loaded, model)
        assert loaded.inputs is None


def test_a_loop_of_ones_own_may_keep_the_config(tmp_path, model):
    content = {"model": model.state_dict(), "config": CONFIG.to_dict()}
    torch.save(content, tmp_path / "own.pt")
    assert_same_model(load_checkpoint(tmp_path / "own.pt"), model)


def test_safetensors_with_its_config_inside_beside_or_given(tmp_path, model):
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    with pytest.raises(CheckpointError, match="--model-config"):
        load_checkpoint(path)
    assert_same_model(load_checkpoint(path, CONFIG.to_dict()), model)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    assert_same_model(load_checkpoint(path), model)
    assert_same_model(load_checkpoint(tmp_path), model)
    save_file(model.state_dict(), path, {"attnprobe": json.dumps(CONFIG.to_dict())})
    (tmp_path / "config.json").write_text("{}")
    assert_same_model(load_checkpoint(path), model)


def test_dtype_of_the_file_is_kept(tmp_path, model):
    torch.save(model.bfloat16().state_dict(), tmp_path / "half.pt")
    loaded = load_checkpoint(tmp_path / "half.pt", CONFIG.to_dict()).model
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    mixed = model.state_dict()
    mixed["norm.weight"] = mixed["norm.weight"].float()
    torch.save(mixed, tmp_path / "mixed.pt")
    loaded = load_checkpoint(tmp_path / "mixed.pt", CONFIG.to_dict()).model
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_same_weights_may_appear_on_disk_twice(tmp_path, saved):
    (tmp_path / "other.pt").write_bytes(saved.read_bytes())
    with pytest.raises(CheckpointError, match=r"several models \(model.pt, other.pt\)"):
        load_checkpoint(tmp_path)


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_a_payload_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    torch.save({"state_dict": _Payload(mark)}, tmp_path / "zip.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(_Payload(mark), protocol=2))
    for name in ("zip.pt", "raw.pt"):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path / name, CONFIG.to_dict())
        assert "never run" in str(caught.value)
        assert not mark.exists()
    pickle.loads((tmp_path / "raw.pt").read_bytes())
    assert mark.exists()  # it would have


def spoil(saved: Path, how: str) -> Path:
    content = torch.load(saved, weights_only=True)
    state, path = content["state_dict"], saved.with_name(f"{how}.pt")
    name = "layers.1.attention.query.weight"
    if how == "nan":
        state[name][2, 3] = float("nan")
    elif how == "inf":
        state[name][2, 3] = float("inf")
    elif how == "shape":
        state[name] = state[name][:4]
    elif how == "missing":
        del state[name]
    elif how == "surplus":
        state["layers.7.attention.query.weight"] = state[name]
    elif how == "integers":
        state[name] = state[name].long()
    elif how == "text":
        state[name] = "weights"
    elif how == "version":
        content["version"] = 2
    elif how == "config":
        content["config"] = {**content["config"], "n_heads": 3}
    elif how == "no-weights":
        content["state_dict"] = None
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", r"layers\.1\.attention\.query\.weight holds NaN"),
        ("inf", r"layers\.1\.attention\.query\.weight holds infinite"),
        ("shape", r"layers\.1\.attention\.query\.weight is \(4, 8\), the config makes it \(8, 8\)"),
        ("missing", r"lacks layers\.1\.attention\.query\.weight"),
        ("surplus", r"unexpected layers\.7\.attention\.query\.weight"),
        ("integers", r"layers\.1\.attention\.query\.weight is not a tensor of real numbers"),
        ("text", r"layers\.1\.attention\.query\.weight is not a tensor"),
        ("version", "format version 2"),
        ("config", "n_heads=3"),
        ("no-weights", "no state dict"),
    ],
)
def test_unfit_weights_are_named(saved, how, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        load_checkpoint(spoil(saved, how))
    assert "\n" not in str(caught.value)


def unreadable(folder: Path, saved: Path) -> dict[str, Path]:
    whole = saved.read_bytes()
    files = {
        "missing": folder / "nowhere.pt",
        "empty folder": folder / "empty",
        "empty file": folder / "empty.pt",
        "text": folder / "notes.pt",
        "more text": folder / "readme.pt",
        "safetensors cut short": folder / "cut.safetensors",
        "bare tensor": folder / "tensor.pt",
        "a list": folder / "list.pt",
    }
    files["empty folder"].mkdir()
    files["empty file"].write_bytes(b"")
    files["text"].write_text("these are not weights")
    files["more text"].write_text("hello, these are not weights either")
    files["safetensors cut short"].write_bytes(whole[:100])
    torch.save(torch.zeros(3), files["bare tensor"])
    torch.save([1, 2], files["a list"])
    for share in (0.01, 0.5, 0.99):
        files[f"cut at {share}"] = folder / f"cut{share}.pt"
        files[f"cut at {share}"].write_bytes(whole[: int(len(whole) * share)])
    return files


def test_unreadable_files_get_one_line_each(tmp_path, saved):
    for what, path in unreadable(tmp_path, saved).items():
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, CONFIG.to_dict())
        message = str(caught.value)
        assert str(path) in message, what
        assert "\n" not in message, what
        assert "Python objects" not in message, what


@pytest.mark.parametrize("content", [None, "not json", "[1, 2]", '{"layers": 3}', "\xff"])
def test_bad_model_configs_get_one_line_each(tmp_path, model, content):
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    shape = tmp_path / "shape.json"
    if content is not None:
        shape.write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "bare.pt", shape)
    assert "\n" not in str(caught.value)


def test_a_config_beyond_any_memory_is_refused_at_once(saved):
    huge = {**CONFIG.to_dict(), "d_model": 2**24, "head_dim": 2**22, "d_ff": 2**26}
    with pytest.raises(CheckpointError, match="the config makes it"):
        load_checkpoint(saved, huge)


@pytest.mark.parametrize("part", ["inputs", "train"])
def test_parts_that_are_no_mapping(saved: Path, part: str) -> None:
    content = torch.load(saved, weights_only=True)
    content[part] = [1]
    torch.save(content, saved)
    with pytest.raises(CheckpointError, match=f"its {part} must be a mapping"):
        load_checkpoint(saved)


@pytest.mark.parametrize(("name", "value"), [("n_layers", 10**9), ("vocab_size", 10**30)])
def test_a_config_without_bounds_takes_no_memory(saved: Path, name: str, value: int) -> None:
    content = torch.load(saved, weights_only=True)
    content["config"][name] = value
    torch.save(content, saved)
    with pytest.raises(CheckpointError, match=r"layers, \d+ tensors|as large as its config"):
        load_checkpoint(saved)


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="no regular file"):
        load_checkpoint(tmp_path / "pipe.pt")
