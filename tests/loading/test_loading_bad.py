"""Every folder that cannot be measured as what it is: one clear line, exit code 2, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

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
