"""The released gated-attention checkpoints (`1B_baseline`, `1B_gate_headwise`,
`1B_gate_elementwise`) on today's transformers, without their own code.

They are Qwen3 with three differences: the norms of queries and keys are a choice, one flag gives
all four maps of attention a bias, and `q_proj` is wider by a gate. Its rows lie by group of heads
that share keys: the group's D·G query rows, then its G (a head) or D·G (an element) gate rows,
with D the width of a head and G heads in a group. sigmoid(gate) multiplies the attention output.

Source: Qiu et al. 2025, "Gated Attention for Large Language Models", and the released code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.errors import CheckpointError

ELEMENT, HEAD, QK_NORM = (
    "elementwise_attn_output_gate",
    "headwise_attn_output_gate",
    "use_qk_norm",
)
BIAS = "qkv_bias"


def is_official(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of the release; transformers' own Qwen3 has no such keys."""
    return config.get("model_type") == "qwen3" and any(
        n in config for n in (ELEMENT, HEAD, QK_NORM)
    )


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Module:
    """The model in a folder, in eval mode; from safetensors or .bin, whole or in shards.

    Args:
        folder: holds `config.json` and the weights.
        dtype: of the weights; by default the type that the config names.
        device: where to; the CPU by default.
        options: further ones of `from_pretrained`.

    Raises:
        CheckpointError: weights are missing, left over or of another shape than the config says.
    """
    settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    model, found = model_class().from_pretrained(
        str(folder),
        config=config_of(settings),
        dtype=dtype or "auto",
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told in `found`, as the others are
        **options,
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in found.get(what) or ())
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise CheckpointError(
                f"{folder}: {what.replace('_', ' ')}: {keys[0]}{more}; its weights do not fit its "
                "config.json: copy or download both again"
            )
    model = model.eval()
    return model if device is None else model.to(device)


def config_of(settings: Mapping[str, Any]) -> Any:
    """transformers' Qwen3 config of a `config.json` of the release."""
    from transformers import Qwen3Config

    if settings.get("use_sliding_window"):
        raise CheckpointError(
            "its config.json has use_sliding_window, which the released code reads in two ways: "
            "set it to false if the model was trained without a window"
        )
    known = {k: v for k, v in settings.items() if k not in ("auto_map", "architectures")}
    # the released code reads `qkv_bias` where transformers reads `attention_bias`
    known["attention_bias"] = bool(settings.get(BIAS, False))
    config = Qwen3Config.from_dict(known)
    for name, default in ((QK_NORM, True), (ELEMENT, False), (HEAD, False)):
        setattr(config, name, bool(settings.get(name, default)))
    return config


def split_by_group(made: Tensor, key_heads: int, group: int, width: int) -> tuple[Tensor, Tensor]:
    """The queries (B, T, H, D) and the gate's logits (B, T, H, D | 1) in what `q_proj` gave.

    Args:
        made: (B, T, K·G·(D + D | 1)).
        key_heads: K.
        group: G, query heads that share keys.
        width: D of a head.
    """
    parts = made.unflatten(-1, (key_heads, -1))  # (B, T, K, G·(D + D | 1))
    each = parts.shape[-1] // group - width  # D or 1
    query, gate = parts.split([group * width, group * each], -1)
    shape = made.shape[:-1]
    return query.reshape(*shape, -1, width), gate.reshape(*shape, -1, each)


@cache
def model_class() -> Any:
    """`GatedQwen3ForCausalLM`, made when first asked for: transformers is an extra."""
    try:
        from transformers.models.qwen3 import modeling_qwen3 as qwen3

        find = qwen3.ALL_ATTENTION_FUNCTIONS.get_interface
    except (ImportError, AttributeError):
        raise CheckpointError(
            "the released gated checkpoints need transformers 5 or newer: "
            "pip install -U 'attnprobe[transformers]'"
        ) from None

    class GatedQwen3Attention(qwen3.Qwen3Attention):
        """Qwen3's attention with a gate in its `q_proj`."""

        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.key_heads = config.num_key_value_heads
            gates = {HEAD: 1, ELEMENT: self.head_dim}
            each = next((n for name, n in gates.items() if getattr(config, name)), 0)
            self.is_gated = each > 0
            rows = config.num_attention_heads * (self.head_dim + each)
            self.q_proj = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
            if not getattr(config, QK_NORM):
                self.add_module("q_norm", nn.Identity())
                self.add_module("k_norm", nn.Identity())

        def forward(
            self,
            hidden_states: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            attention_mask: Tensor | None = None,
            cache: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            """hidden_states (B, T, d_model) to the same, and the weights if there are any."""
            query, gate = self.q_proj(hidden_states), None
            if self.is_gated:
                query, gate = split_by_group(
                    query, self.key_heads, self.num_key_value_groups, self.head_dim
                )
            heads = (*hidden_states.shape[:-1], -1, self.head_dim)
            query = self.q_norm(query.reshape(heads)).transpose(1, 2)  # (B, H, T, D)
            key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
            value = self.v_proj(hidden_states).view(heads).transpose(1, 2)  # (B, K, T, D)
            query, key = qwen3.apply_rotary_pos_emb(query, key, *position_embeddings)
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx)
            attend = find(self.config._attn_implementation, qwen3.eager_attention_forward)
            output, weights = attend(
                self,
                query,
                key,
                value,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=self.sliding_window,
                **kwargs,
            )  # (B, T, H, D)
            if gate is not None:
                output = output * torch.sigmoid(gate)
            return self.o_proj(output.flatten(2)), weights

    class GatedQwen3ForCausalLM(qwen3.Qwen3ForCausalLM):
        """Qwen3 with `GatedQwen3Attention` in every layer."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for number, layer in enumerate(self.model.layers):
                layer.self_attn = GatedQwen3Attention(config, number)

    return GatedQwen3ForCausalLM
