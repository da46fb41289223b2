"""Every folder that cannot be measured as what it is: one clear line, exit code 2, nothing run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from tiny_models import Ran

Spoil = Callable[[Path], object]
CASES: dict[str, tuple[Spoil, str]] = {}


def case(says: str) -> Callable[[Spoil], Spoil]:
    """Registers what is done to a good folder, and what the one line must say."""

    def register(spoil: Spoil) -> Spoil:
        CASES[spoil.__name__] = (spoil, says)
        return spoil

    return register


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


def cut(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])


def change_header(folder: Path, old: bytes, new: bytes) -> None:
    """Changes the first place in the head of `model.safetensors`, none of its lengths."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    assert old in whole
    assert len(old) == len(new)
    path.write_bytes(whole.replace(old, new, 1))


# files


@case("model.safetensors is cut short: ")
def truncated(folder: Path) -> None:
    cut(folder / "model.safetensors", 0.6)


@case("model.safetensors is no safetensors file, or is cut short")
def truncated_in_its_head(folder: Path) -> None:
    cut(folder / "model.safetensors", 0.01)


@case("model.safetensors is no safetensors file")
def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@case("model.safetensors is no safetensors file")
def text_in_its_place(folder: Path) -> None:
    (folder / "model.safetensors").write_text("no weights at all\n" * 3)


@case("model.safetensors is a pointer of Git LFS, not the weights: git lfs pull")
def a_pointer_in_its_place(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)


@case("holds a config but no weights (model.safetensors or pytorch_model.bin")
def only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@case("lacks model-00002-of-0000")
def a_missing_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny.save("llama", folder, max_shard_size="8KB")
    next(folder.glob("model-00002-*")).unlink()


@case("model-00002-of-00003.safetensors is no safetensors file, or is cut short")
def an_empty_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny.save("llama", folder, max_shard_size="8KB")
    next(folder.glob("model-00002-*")).write_bytes(b"")


@case("model-00002-of-00003.safetensors is a folder, no file of weights")
def a_folder_for_a_shard(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny.save("llama", folder, max_shard_size="8KB")
    shard = next(folder.glob("model-00002-*"))
    shard.unlink()
    shard.mkdir()


@case("model.safetensors is a pipe or a device, no file of weights")
def a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


@case("model.safetensors is a link to ../blobs/abc, which leads nowhere: check it, or download")
def a_link_whose_target_was_cleared_away(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/abc")


@case("is damaged at lm_head.weight: copy or download it again")
def an_offset_that_is_wrong(folder: Path) -> None:
    change_header(folder, b'"data_offsets":[0,', b'"data_offsets":[4,')


@case("is damaged at lm_head.weight")
def a_type_that_there_is_not(folder: Path) -> None:
    change_header(folder, b'"dtype":"F32"', b'"dtype":"Q99"')


@case("lm_head.weight is I32, which holds no fractions")
def whole_numbers(folder: Path) -> None:
    tiny.change_weights(folder, lambda w: {n: t.to(torch.int32) for n, t in w.items()})


@case("lm_head.weight is bool, which holds no fractions")
def pickled_truth_values(folder: Path) -> None:
    tiny.change_weights(folder, lambda w: {n: t > 0 for n, t in w.items()})
    tiny.pickled(folder)


@case("pytorch_model.bin holds a list, not weights by name")
def a_pickled_list(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")


@case("pytorch_model.bin cannot be read as weights: it is damaged")
def a_truncated_pickle(folder: Path) -> None:
    tiny.pickled(folder)
    cut(folder / "pytorch_model.bin", 0.5)


@case("names files that are none")
def an_index_that_leads_elsewhere(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny.save("llama", folder, max_shard_size="8KB")
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00002-", "../model-00002-"))


@case("model.safetensors.index.json has no weight_map")
def an_empty_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


@case("model.safetensors.index.json has no weight_map")
def an_index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


@case("pytorch_model.bin holds Python objects (posix.mkdir), which are never run here")
def a_payload(folder: Path) -> None:
    tiny.pickled(folder)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({**weights, "evil": Payload(folder / "ran")}, folder / "pytorch_model.bin")


@case("pytorch_model.bin holds Python objects")
def a_bare_payload(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Payload(folder / "ran"), file, protocol=2)


@case("pytorch_model.bin cannot be read as weights")
def junk(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02junk")


# config


@case("config.json is not JSON")
def a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


@case("knows no model_type 'zorp': pip install -U transformers")
def an_unknown_type(folder: Path) -> None:
    tiny.change_config(folder, lambda config: config.update(model_type="zorp"))


@case("its config.json has no model_type")
def no_type(folder: Path) -> None:
    tiny.change_config(folder, lambda config: config.pop("model_type") and config)


@case("its config.json has no model_type")
def a_type_that_is_no_name(folder: Path) -> None:
    tiny.change_config(folder, lambda config: config.update(model_type=["llama"]))


@case("config.json is not JSON (Expecting value: line 1 column 1 (char 0))")
def an_empty_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"")


@case("config.json: Too many levels of symbolic links")
def a_config_that_leads_in_circles(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


@case("which runs with --trust-remote-code only")
def code_of_its_own(folder: Path) -> None:
    (folder / "modeling_zorp.py").write_text(f"import os; os.mkdir({str(folder / 'ran')!r})")
    names = {"AutoConfig": "modeling_zorp.C", "AutoModelForCausalLM": "modeling_zorp.M"}
    tiny.change_config(folder, lambda config: config.update(model_type="zorp", auto_map=names))


@case("cannot be loaded by transformers: ")
def a_value_of_another_type(folder: Path) -> None:
    tiny.change_config(folder, lambda config: config.update(num_attention_heads="four"))


@case("cannot be loaded by transformers: ZeroDivisionError")
def no_heads(folder: Path) -> None:
    tiny.change_config(folder, lambda config: config.update(num_key_value_heads=0))


# weights that do not fit


@case("model.layers.1.self_attn.q_proj.weight): they would be random")
def a_missing_weight(folder: Path) -> None:
    tiny.change_weights(folder, lambda w: {n: t for n, t in w.items() if "1.self_attn.q" not in n})


@case("no place for (model.layers.0.self_attn.k_proj.w and 7 more)")
def weights_of_another_model(folder: Path) -> None:
    tiny.change_weights(folder, lambda w: {n.replace("weight", "w"): t for n, t in w.items()})


@case("that its config names (model.embed_tokens.weight and 9 more): they would")
def layers_that_are_not_there(folder: Path) -> None:
    kept = ("norm.weight", "proj.weight")
    tiny.change_weights(
        folder,
        lambda w: {n: t for n, t in w.items() if n.endswith(kept) and ".1." not in n},
    )


@case("does not fit the LlamaForCausalLM of its config: model.layers.0.self_attn.q_proj.weight")
def another_shape(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tiny.change_weights(folder, lambda w: {**w, name: w[name][:8]})


@case("no place for (model.layers.0.self_attn.gate_proj.weight)")
def a_gate_that_transformers_has_not(folder: Path) -> None:
    name = "model.layers.0.self_attn.gate_proj.weight"
    tiny.change_weights(folder, lambda w: {**w, name: torch.zeros(16, 16)})


@case("no place for (model.layers.0.self_attn.sinks)")
def sinks_that_transformers_has_not(folder: Path) -> None:
    name = "model.layers.0.self_attn.sinks"
    tiny.change_weights(folder, lambda w: {**w, name: torch.zeros(2)})


@case("no place for (model.layers.0.self_attn.q_proj.bias)")
def a_bias_that_the_config_denies(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    tiny.change_weights(folder, lambda w: {**w, name: torch.zeros(16)})


# packages that are not here

NEEDLESS = {"quantised_by_a_package": "torchao", "quantised_for_gpus": "bitsandbytes"}


@case("torchao")
def quantised_by_a_package(folder: Path) -> None:
    how = {"quant_method": "torchao", "quant_type": "int4_weight_only"}
    tiny.change_config(folder, lambda config: config.update(quantization_config=how))


@case("bitsandbytes")
def quantised_for_gpus(folder: Path) -> None:
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    tiny.change_config(folder, lambda config: config.update(quantization_config=how))


# adapters


@case("adapter_config.json is not JSON")
def a_broken_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


@case("is a PEFT adapter without base_model_name_or_path")
def an_adapter_without_a_base(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))


@case("org/base is no path here and not in the cache of the Hugging Face hub")
def an_adapter_over_what_is_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(about))


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_and_exit_2(name: str, tmp_path: Path, run: Callable[..., Ran]) -> None:
    spoil, says = CASES[name]
    if name in NEEDLESS and find_spec(NEEDLESS[name]):
        pytest.skip(f"{NEEDLESS[name]} is installed")
    folder = tmp_path / "model"
    tiny.save("llama", folder)
    spoil(folder)
    ran = run("sink", folder, "--length", "8", "--samples", "2")
    assert ran.code == 2
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("attnprobe: error: ")
    assert says in line
    assert "Traceback" not in line
    assert not (folder / "ran").exists()


def test_floats_of_every_kind_are_weights(tmp_path: Path, run: Callable[..., Ran]) -> None:
    for kind in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        folder = tmp_path / str(kind)
        tiny.save("llama", folder)
        tiny.change_weights(folder, lambda w, kind=kind: {n: t.to(kind) for n, t in w.items()})
        assert run("sink", folder, "--length", "8", "--samples", "2").code == 0


def test_what_a_config_says_may_be_anything(tmp_path: Path, run: Callable[..., Ran]) -> None:
    tiny.save("llama", tmp_path)
    odd = {"model_type": [5], "architectures": [7], "quantization_config": [], "auto_map": "x"}
    tiny.change_config(tmp_path, lambda config: config.update(odd))
    ran = run("models", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "2 × 2" in ran.out


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "m.gguf is empty: copy or"), (b"no weights", "m.gguf is no GGUF file, or is damaged")],
)
def test_what_is_no_gguf(
    content: bytes, says: str, tmp_path: Path, run: Callable[..., Ran]
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    for verb in ("models", "sink"):
        ran = run(verb, tmp_path / "m.gguf")
        assert (ran.code, ran.out) == (2, "")
        assert says in ran.err
        assert ran.err.count("\n") == 1


def test_what_a_trainer_wrote_down_may_be_anything(tmp_path: Path, run: Callable[..., Ran]) -> None:
    tiny.save("llama", tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"global_step": "x", "log_history": [5]}')
    assert run("models", tmp_path).code == 0
    assert run("sink", tmp_path, "--length", "8", "--samples", "2").code == 0


def test_a_name_with_blanks_and_of_another_script(tmp_path: Path, run: Callable[..., Ran]) -> None:
    folder = tmp_path / "a b" / "ünïcödé 鲸"
    tiny.save("llama", folder)
    ran = run("sink", folder, "--length", "8", "--samples", "2")
    assert ran.code == 0
    assert ran.out.startswith("ünïcödé 鲸 · 2 layers × 2 heads")


def test_files_that_may_not_be_read(
    tmp_path: Path, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system refuses; root, who tests run as in containers, is refused nothing."""
    tiny.save("llama", tmp_path / "m", words=True)
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    for closed in ("config.json", "model.safetensors"):
        for verb in ("models", "sink"):
            ran = run(verb, tmp_path / "m")
            assert ran.code == 2
            assert ran.err == (
                f"attnprobe: error: cannot read {tmp_path / 'm' / closed}: Permission denied\n"
            )


def test_weights_that_are_no_numbers_are_not_measured(
    tmp_path: Path, run: Callable[..., Ran]
) -> None:
    tiny.save("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tiny.change_weights(tmp_path, lambda w: {**w, name: w[name] * torch.nan})
    ran = run("sink", tmp_path, "--length", "8", "--samples", "2", "--format", "json")
    layers = json.loads(ran.out)["results"][0]["layers"] if ran.out else []
    assert ran.code in (0, 3)
    assert all(row["f_attr"] is None for row in layers if row["layer"] == 0)
    assert "NaN" in ran.out + ran.err
