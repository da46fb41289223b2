"""Tiny models with grouped heads on disk, and the plans to split them by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SHAPE = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}

#: Name to class and what its config says.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", {}),
    "normed": ("Qwen3", {}),
    "one-key-head": ("Llama", {"num_key_value_heads": 1}),
    "gathered": ("Olmo2", {}),  # every process has all heads, and a part of W_O
    "with-sinks": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "gated": (
        "Qwen3Next",
        {**EXPERTS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    ),
}
SHARED = {f"model.layers.*.self_attn.{m}_proj": "colwise_gather_output" for m in "kv"}


def save(name: str, folder: Path) -> Path:
    """Writes a model; the same one every time."""
    torch.manual_seed(sum(map(ord, name)))
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **more})
    model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
    for path, parameter in model.named_parameters():
        if "sinks" in path or "norm" in path:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(folder / name)
    return folder / name


def tokens() -> torch.Tensor:
    """(3, 24) ids."""
    return torch.randint(0, 37, (3, 24), generator=torch.Generator().manual_seed(0))
