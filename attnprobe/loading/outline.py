"""A model of transformers in plain values, without loading it. Needs no torch."""

from __future__ import annotations

from typing import Any

from attnprobe.loading.base import BASE
from attnprobe.loading.folder import DTYPES, Folder, elements, header, step
from attnprobe.loading.identity import joint_sha256
from attnprobe.loading.places import HubId
from attnprobe.loading.stacks import stacks

#: Of a config: what says what attention is like, under the names of transformers.
ESSENTIALS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("sliding_window", "rope_parameters", "attention_bias", "tie_word_embeddings"),
)
_OLD_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
}
_PLAIN = (bool, int, float, str)


def of(folder: Folder, hub: HubId | None = None, commit: str | None = None) -> dict[str, Any]:
    """Describes a folder, a GGUF file, or a bare state dict whose config comes from elsewhere.

    Raises:
        CheckpointError: it is not whole.
        OSError: a file cannot be read.
    """
    counts = elements(folder.weights)
    names = None if counts is None else [name for file in folder.weights for name in header(file)]
    config = folder.config
    classes = config.get("architectures")
    quantised = config.get("quantization_config")
    auto = config.get("auto_map")
    return {
        "path": str(folder.path),
        "hub": None if hub is None else {"id": str(hub), "commit": commit},
        "format": _format(folder),
        "files": [file.name for file in folder.weights],
        "bytes": sum(file.stat().st_size for file in folder.weights),
        "sha256": joint_sha256(folder.weights),
        "architecture": _text(classes[0]) if isinstance(classes, list) and classes else None,
        "model_type": _text(config.get("model_type")),
        "parameters": None if counts is None or quantised else sum(counts.values()),
        "dtype": None if not counts else DTYPES.get(counts.most_common(1)[0][0]),
        "quantisation": quantised.get("quant_method") if isinstance(quantised, dict) else None,
        "adapter": {"type": config["peft_type"], "rank": config.get("r"), "base": config.get(BASE)}
        if folder.is_adapter
        else None,
        "code": ", ".join(sorted(map(str, auto.values()))) if isinstance(auto, dict) else None,
        "has_tokenizer": any("tokenizer" in p.name or "vocab" in p.name for p in folder.beside()),
        **step(folder.root),
        "stacks": stacks(config, names),
        "config": essentials(config),
    }


def essentials(config: Any) -> dict[str, Any]:
    """The parts of a config that `ESSENTIALS` names, that of the text model where it has several.

    Args:
        config: an object of transformers, or what `config.json` holds.
    """
    if isinstance(config, dict):
        nested = config.get("text_config")
        text = nested if isinstance(nested, dict) else config
        found = {name: _said(text, name) for name in ESSENTIALS}
    else:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        found = {name: getattr(text, name, None) for name in ESSENTIALS}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, _PLAIN)
        or (isinstance(value, dict) and all(isinstance(v, _PLAIN) for v in value.values()))
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _said(config: dict[str, Any], name: str) -> Any:
    names = (name, *_OLD_NAMES.get(name, ()))
    return next((config[n] for n in names if config.get(n) is not None), None)


def _format(folder: Folder) -> str:
    if folder.is_gguf:
        return "GGUF"
    kind = "safetensors" if folder.weights[0].suffix == ".safetensors" else "pickled tensors"
    return f"PEFT adapter, {kind}" if folder.is_adapter else kind
