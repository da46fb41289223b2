"""Tiny random models of transformers on disk, in every format that people have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

VOCABULARY = 32
WORDS = ["the", "whale", "and", "sea", "ship", "that", "sailed", "at", "dawn", "fish"]


class Ran(NamedTuple):
    """What a command line gave."""

    code: int
    out: str
    err: str


def small(kind: str) -> nn.Module:
    """A model of a family; the same one every time."""
    torch.manual_seed(sum(map(ord, kind)))
    wide = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    wide |= {"num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 24}
    if kind in ("llama", "qwen3"):
        name = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
        config = getattr(transformers, f"{name}Config")(
            **wide, **text, num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=2
        )
        return getattr(transformers, f"{name}ForCausalLM")(config)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=24,
                bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**wide, **text))
    if kind == "encoder":
        return transformers.BertModel(transformers.BertConfig(**wide, **text))
    if kind == "roberta":
        return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**wide, **text))
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                decoder_start_token_id=0,
            )
        )  # fmt: skip
    assert kind == "vit"
    return transformers.ViTModel(transformers.ViTConfig(**wide, image_size=16, patch_size=8))


def save(kind: str, folder: Path, *, words: bool = False, **how: Any) -> nn.Module:
    """Writes a model as `save_pretrained` does; with a tokenizer on request."""
    model = small(kind)
    model.save_pretrained(folder, **how)
    if words:
        save_words(folder)
    return model


def save_words(folder: Path) -> None:
    """A tokenizer of whole words."""
    entries = ["<unk>", "<s>", "</s>", *WORDS]
    entries += [f"w{n}" for n in range(VOCABULARY - len(entries))]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(entries)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites `config.json`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(change(config) or config))


def change_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Rewrites `model.safetensors`."""
    path = folder / "model.safetensors"
    changed = change(dict(load_file(path)))
    save_file({n: t.contiguous() for n, t in changed.items()}, path, {"format": "pt"})


def pickled(folder: Path, parts: int = 1, prefix: str = "") -> None:
    """Replaces `model.safetensors` by `pytorch_model.bin`, or by shards with an index."""
    path = folder / "model.safetensors"
    weights = {prefix + name: tensor for name, tensor in load_file(path).items()}
    path.unlink()
    if parts == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    names = sorted(weights)
    where = {}
    for part in range(parts):
        file = f"pytorch_model-{part + 1:05}-of-{parts:05}.bin"
        torch.save({n: weights[n] for n in names[part::parts]}, folder / file)
        where |= dict.fromkeys(names[part::parts], file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def cached(cache: Path, repo: str, folder: Path, commit: str = "c" * 40, ref: str = "main") -> Path:
    """Puts a folder into the cache of the hub, as a download of a revision would."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    snapshot = root / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    return snapshot
