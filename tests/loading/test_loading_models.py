"""Folders of transformers as people have them: the right class, every weight, and who it is."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from attnprobe import scan
from attnprobe.errors import CheckpointError
from attnprobe.subject import Subject, addresses, load

TOKENS = torch.randint(3, tiny.VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))


def loaded(place: object, **how: Any) -> Subject:
    (address,) = addresses([str(place)])
    return load(address, **how)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n].to(a[n].dtype)) for n in a)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny.save("llama", tmp_path / "llama")
    return tmp_path / "llama"


# what it becomes


@pytest.mark.parametrize(
    ("kind", "reads", "longest"),
    [
        ("llama", "tokens", None),
        ("qwen3", "tokens", None),
        ("gpt2", "tokens", 24),
        ("bert", "tokens", 24),
        ("encoder", "tokens", 24),
        ("roberta", "tokens", 22),  # whose positions begin behind that of the padding
        ("t5", "tokens", None),
        ("vit", "image", None),
    ],
)
def test_a_folder_becomes_the_model_that_was_saved(
    tmp_path: Path, kind: str, reads: str, longest: int | None
) -> None:
    model = tiny.save(kind, tmp_path / kind)
    subject = loaded(tmp_path / kind)
    assert type(subject.model) is type(model)
    assert same_weights(subject.model, model)
    assert not subject.model.training
    assert not any(p.requires_grad for p in subject.model.parameters())
    assert (subject.name, subject.reads) == (kind, reads)
    assert subject.is_encoder_decoder == (kind == "t5")
    assert subject.limits.max_length == longest
    assert subject.limits.n_heads == 2
    assert subject.limits.vocab_size == (None if kind == "vit" else tiny.VOCABULARY)
    assert subject.vocabulary is None
    assert subject.notes == ()


@pytest.mark.parametrize("kind", ["gpt2", "bert", "roberta"])
def test_the_longest_sample_is_the_longest_that_runs(tmp_path: Path, kind: str) -> None:
    tiny.save(kind, tmp_path)
    subject = loaded(tmp_path)
    longest = subject.limits.max_length
    assert longest is not None
    subject.model(torch.full((1, longest), 3))
    with pytest.raises((IndexError, RuntimeError)):
        subject.model(torch.full((1, longest + 1), 3))


def test_a_scan_of_it_is_one_of_the_model(llama: Path) -> None:
    subject = loaded(llama)
    ours, theirs = (scan(m, TOKENS) for m in (subject.model, tiny.small("llama").eval()))
    assert ours.heads["f_attr"].tolist() == theirs.heads["f_attr"].tolist()
    assert ours.model["ppl"].tolist() == theirs.model["ppl"].tolist()


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["LlamaModel"], transformers.LlamaModel),
        (["LlamaForTokenClassification"], transformers.LlamaModel),  # whose head is not there
        (None, transformers.LlamaForCausalLM),
        (["LLaMAForCausalLM"], transformers.LlamaForCausalLM),  # as the first conversions said
    ],
)
def test_the_class_is_that_of_the_config(
    llama: Path, architectures: list[str] | None, expected: type
) -> None:
    tiny.change_config(llama, lambda config: config.update(architectures=architectures))
    assert type(loaded(llama).model) is expected


def test_no_kernel_of_the_config_is_followed(llama: Path) -> None:
    for kernel in ("flash_attention_2", "flex_attention"):
        said = dict.fromkeys(("attn_implementation", "_attn_implementation"), kernel)
        tiny.change_config(llama, lambda config, said=said: config.update(said))
        assert loaded(llama).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_weights_are_as_in_the_file_unless_asked(tmp_path: Path, asked: str) -> None:
    tiny.small("llama").bfloat16().save_pretrained(tmp_path)
    expected = torch.bfloat16 if asked == "auto" else getattr(torch, asked)
    assert {p.dtype for p in loaded(tmp_path, dtype=asked).model.parameters()} == {expected}


# formats


def as_shards(folder: Path) -> None:
    shutil.rmtree(folder)
    tiny.save("llama", folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def as_parallel(folder: Path) -> None:
    tiny.change_weights(folder, lambda w: {f"module._orig_mod.{n}": t for n, t in w.items()})


def as_compiled(folder: Path) -> None:
    tiny.change_weights(folder, lambda w: {f"_orig_mod.{n}": t for n, t in w.items()})


def as_bare(folder: Path) -> None:
    """Without the prefix of the class that the config names."""
    tiny.change_weights(folder, lambda w: {n.removeprefix("model."): t for n, t in w.items()})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: None, id="safetensors"),
        pytest.param(as_shards, id="safetensors-shards"),
        pytest.param(tiny.pickled, id="bin"),
        pytest.param(lambda folder: tiny.pickled(folder, parts=3), id="bin-shards"),
        pytest.param(lambda folder: tiny.pickled(folder, prefix="module."), id="bin-parallel"),
        pytest.param(as_parallel, id="parallel"),
        pytest.param(as_compiled, id="compiled"),
        pytest.param(as_bare, id="bare"),
    ],
)
def test_every_format_gives_the_same_weights(llama: Path, change: Callable[[Path], None]) -> None:
    change(llama)
    assert same_weights(loaded(llama).model, tiny.small("llama"))


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "net._orig_mod."])
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".safetensors"])
def test_a_bare_state_dict_with_the_config_given(tmp_path: Path, prefix: str, suffix: str) -> None:
    model = tiny.save("llama", tmp_path / "shape")
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if suffix == ".ckpt" else state, path)
    for given in (tmp_path / "shape/config.json", model.config.to_dict()):
        subject = loaded(path, model_config=given)
        assert same_weights(subject.model, model)
        assert subject.about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_weights_named_themselves_are_their_folder(llama: Path) -> None:
    (address,) = addresses([str(llama / "model.safetensors")])
    assert address.name == "llama"
    assert same_weights(load(address).model, tiny.small("llama"))
    torch.save({}, llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"read from model.safetensors, not from pytorch_mod"):
        loaded(llama / "pytorch_model.bin")


def test_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = tiny.small("llama")
    path = tmp_path / "model.gguf"
    write_gguf(gguf, path, model)
    subject = loaded(path)
    assert same_weights(subject.model, model)
    assert subject.vocabulary is not None
    assert subject.vocabulary.encode("whale") == [3, 4, 5, 6, 7, 8]  # piece by piece
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        loaded(path)


def write_gguf(gguf: Any, path: Path, model: Any) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    words = ["<unk>", "<s>", "</s>", *"▁whale"]
    words += [f"w{n}" for n in range(config.vocab_size - len(words))]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3] + [1] * (len(words) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
    names |= {"ffn_norm": "post_attention_layernorm"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names = {f"blk.{n}.{a}": f"model.layers.{n}.{b}" for n in range(2) for a, b in names.items()}
    names |= {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    state = model.state_dict()
    for theirs, ours in names.items():
        tensor = state[f"{ours}.weight"]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if count := heads.get(theirs.rpartition(".")[2]):  # pairs of a rotation side by side
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{theirs}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# adapters


@pytest.fixture
def lora(tmp_path: Path, llama: Path) -> Path:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "o_proj"], r=2, lora_alpha=6, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(tiny.small("llama"), config)
    model.peft_config["default"].base_model_name_or_path = str(llama)
    model.save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


def test_an_adapter_is_merged_into_its_base(lora: Path, llama: Path) -> None:
    from safetensors.torch import load_file

    subject = loaded(lora)
    parts = load_file(lora / "adapter_model.safetensors")
    base, ours = tiny.small("llama").state_dict(), subject.model.state_dict()
    assert ours.keys() == base.keys()  # paths as in the base
    for name, tensor in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in parts:
            change = parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
            assert torch.allclose(ours[name], tensor + 3 * change, atol=1e-6)  # alpha / r
            assert float(change.abs().max()) > 0.01
        else:
            assert torch.equal(ours[name], tensor)
    assert subject.about["adapter"] == {
        "type": "LORA",
        "rank": 2,
        "merged": True,
        "base": str(llama),
        "base_revision": None,
    }


def test_an_adapter_has_the_tokenizer_of_its_base(lora: Path, llama: Path) -> None:
    tiny.save_words(llama)
    vocabulary = loaded(lora).vocabulary
    assert vocabulary is not None
    assert vocabulary.encode("the whale") == [3, 4]


def test_an_adapter_over_nothing(lora: Path, llama: Path) -> None:
    shutil.rmtree(llama)
    with pytest.raises(CheckpointError, match=r"PEFT adapter over .*does not exist here"):
        loaded(lora)


def test_an_adapter_of_the_prompt_changes_no_weight(llama: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(tiny.small("llama"), config)
    model.peft_config["default"].base_model_name_or_path = str(llama)
    model.save_pretrained(tmp_path / "prompt")
    with pytest.raises(CheckpointError, match="changes the prompt and no weight: measure its base"):
        loaded(tmp_path / "prompt")


@pytest.mark.parametrize(
    ("absent", "place", "says"),
    [
        ("peft", "lora", "is a PEFT adapter: pip install 'attnprobe[peft]'"),
        ("transformers", "llama", "is a model of transformers: pip install 'attnprobe[transf"),
        ("huggingface_hub", "org/m", "is read with transformers: pip install 'attnprobe[transf"),
    ],
)
def test_a_package_that_is_not_installed(
    lora: Path, monkeypatch: pytest.MonkeyPatch, absent: str, place: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(CheckpointError, match=re.escape(says)):
        loaded(place if "/" in place else lora.parent / place)


def test_an_adapter_that_lacks_weights(lora: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = lora / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if ".layers.0." in n}, path)
    with pytest.raises(CheckpointError, match="lacks weights of the adapter"):
        loaded(lora)


# what is not all there


def test_a_head_that_is_not_there_is_left_out(llama: Path) -> None:
    tiny.change_weights(llama, lambda w: {n: t for n, t in w.items() if "lm_head" not in n})
    subject = loaded(llama)
    assert type(subject.model) is transformers.LlamaModel
    assert subject.about["missing"] == ["lm_head.weight"]
    assert "lacks the head of LlamaForCausalLM (lm_head.weight)" in subject.notes[0]
    result = scan(subject.model, TOKENS)
    assert result.model["ppl"].isna().all()  # not that of a random head
    assert result.heads["f_attr"].tolist() == scan(tiny.small("llama"), TOKENS).heads[
        "f_attr"
    ].tolist()  # fmt: skip


def test_a_pooler_reads_attention_and_changes_none(tmp_path: Path) -> None:
    tiny.save("encoder", tmp_path)
    tiny.change_weights(tmp_path, lambda w: {n: t for n, t in w.items() if "pooler" not in n})
    subject = loaded(tmp_path)
    assert type(subject.model) is transformers.BertModel
    assert subject.notes == ()


# trainers


def trained(folder: Path, step: int) -> None:
    tiny.save("llama", folder)
    state = {"global_step": step, "log_history": [{"loss": 3.5}, {"loss": 2.5}, {"eval_loss": 9}]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"):
        (folder / name).write_bytes(b"\x80")


def test_a_trainers_folder_is_its_checkpoints_in_order_of_step(tmp_path: Path) -> None:
    from attnprobe.audit.targets import resolve

    for step in (1000, 20, 300):
        trained(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "training_args.bin").write_bytes(b"\x80")
    (tmp_path / "runs").mkdir()
    order = ["checkpoint-20", "checkpoint-300", "checkpoint-1000"]
    assert [address.name for address in addresses([str(tmp_path)])] == order
    assert [target.name for target in resolve([str(tmp_path)])] == order
    assert [target.name for target in resolve([str(tmp_path / "checkpoint-*")])] == order
    about = loaded(tmp_path / "checkpoint-300").about
    assert (about["step"], about["loss"]) == (300, 2.5)


def test_a_model_with_checkpoints_below_it_is_one_model(llama: Path) -> None:
    trained(llama / "checkpoint-5", 5)
    assert [address.name for address in addresses([str(llama)])] == ["llama"]


# who it is


def test_who_it_is(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "mine", words=True)
    subject = loaded(tmp_path / "mine")
    weights = tmp_path / "mine/model.safetensors"
    about = subject.about
    json.dumps(about, allow_nan=False)
    assert about["path"] == str(tmp_path / "mine")
    assert about["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert about["bytes"] == weights.stat().st_size
    assert about["architecture"] == "LlamaForCausalLM"
    assert about["model_type"] == "llama"
    assert about["parameters"] == sum(p.numel() for p in tiny.small("llama").parameters())
    assert (about["dtype"], about["quantisation"], about["attention"]) == ("float32", None, "sdpa")
    assert about["config"]["vocab_size"] == tiny.VOCABULARY
    assert about["config"]["num_key_value_heads"] == 1
    assert about["tokenizer"] is not None
    assert about["hub"] is None


def test_the_hash_of_shards_is_that_of_what_sha256sum_prints(llama: Path) -> None:
    as_shards(llama)
    lines = "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(llama.glob("*.safetensors"))
    )
    assert loaded(llama).about["sha256"] == hashlib.sha256(lines.encode()).hexdigest()


# code and the network


def test_a_folder_never_touches_the_network(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    tiny.save_words(llama)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert loaded(llama).vocabulary is not None


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_runs_only_when_it_is_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "m"))
    marker = tmp_path / "ran"
    (llama / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    auto = {"AutoConfig": "modeling_own.OwnConfig"}
    auto["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    tiny.change_config(llama, lambda config: config.update(auto_map=auto))
    subject = loaded(llama)  # a known type: its code is not needed
    assert type(subject.model) is transformers.LlamaForCausalLM
    assert "--trust-remote-code runs it" in subject.notes[0]
    tiny.change_config(llama, lambda config: config.update(model_type="own"))
    with pytest.raises(CheckpointError, match="with --trust-remote-code only"):
        loaded(llama)
    assert not marker.exists()
    subject = loaded(llama, trust_remote_code=True)
    assert marker.exists()
    assert type(subject.model).__name__ == "OwnForCausalLM"
    assert same_weights(subject.model, tiny.small("llama"))


def test_the_settings_of_the_library_are_put_back(llama: Path) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loaded(llama)
    (llama / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        loaded(llama)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# where it runs


def test_layers_on_disk_give_the_same_figures(llama: Path) -> None:
    pytest.importorskip("accelerate")
    spread = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    spread |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    subject = loaded(llama, device_map=spread)
    assert {p.device.type for p in subject.model.parameters()} == {"cpu", "meta"}
    ours, theirs = (scan(m, TOKENS) for m in (subject.model, tiny.small("llama").eval()))
    for table in ("model", "layers", "heads"):
        columns = getattr(theirs, table).select_dtypes("number").columns
        pairs = (getattr(r, table)[columns].to_numpy(float) for r in (ours, theirs))
        torch.testing.assert_close(*map(torch.tensor, pairs), equal_nan=True)
    assert ours.layers["erank"].notna().all()


def test_a_device_map_needs_accelerate(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnprobe.loading import pretrained

    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install 'attnprobe\[accelerate\]'"):
        loaded(llama, device_map="auto")
    assert same_weights(loaded(llama).model, tiny.small("llama"))
