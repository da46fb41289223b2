"""Small random models of transformers' types, with every kind of layer that the type has."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from sizes import (
    FIRST,
    GEMMA3N_VISION,
    HEAD_WIDTH,
    HEADS,
    IMAGE,
    LAYERS,
    MOST_LAYERS,
    OVERRIDES,
    SLIDING,
    SMALL,
    TOKENS,
    WINDOW,
)
from torch import Tensor, nn

GAIN = 1.2  # of a random linear map, so that attention is neither even nor on one key
GAINS = {"fsmt": 0.6, "mobilebert": 0.6, "rembert": 0.6}  # few norms in them
DRAFTERS = ("gemma4_assistant", "gemma4_unified_assistant")
PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}  # the part that is the language model
TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
}


def types(task: str) -> dict[str, str]:
    """The class name of every type that transformers maps to a task."""
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES"))


def built(task: str, name: str, **options: Any) -> nn.Module:
    """A small model of a type.

    Args:
        task: causal, masked, seq2seq or image.
        name: the type.
        options: of transformers' own builder, such as attn_implementation.
    """
    import transformers

    config = small_config(name, is_decoder=task == "causal")
    kind = types(task)[name]
    kind = kind if isinstance(kind, str) else kind[0]
    if name in PARTS or task == "image":
        return redrawn(getattr(transformers, kind)._from_config(config, **options), name)
    auto = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
    }
    model = redrawn(auto[task].from_config(config, **options), name)
    return Drafter(model) if name in DRAFTERS else model


def small_config(name: str, is_decoder: bool = False) -> Any:
    """The config of a type, made small."""
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[name](**FIRST.get(name, {}))
    whole = getattr(whole, PARTS.get(name, ""), whole)
    fields = merged(shrunk(whole), FIRST.get(name, {}))
    if "is_decoder" in vars(whole):
        fields["is_decoder"] = is_decoder
    config = type(whole)(**merged(fields, OVERRIDES.get(name, {})))
    if name == "gemma3n":  # its own vision tower comes from timm, and no image is shown to it
        tower = CONFIG_MAPPING["siglip_vision_model"]
        vars(config)["vision_config"] = tower(**merged(shrunk(tower()), GEMMA3N_VISION))
    return config


class Drafter(nn.Module):
    """A type that drafts for another model: it reads the keys and values of that one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings: Tensor) -> Any:
        """(B, T, 2 · width) what the other model would hand over."""
        text = self.model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        widths = {"sliding_attention": HEAD_WIDTH, "full_attention": 2 * HEAD_WIDTH}
        shape = len(embeddings), text.num_key_value_heads, 2 * WINDOW
        states = {
            kind: tuple(torch.randn(*shape, width, generator=generator) for _ in "kv")
            for kind, width in widths.items()
        }
        return self.model(inputs_embeds=embeddings, shared_kv_states=states)


def merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second one's values winning, dictionaries merged."""
    result = dict(fields)
    for name, value in more.items():
        inner = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if inner else value
    return result


def shrunk(config: Any) -> dict[str, Any]:
    """Fields that make a config small, sub-configs as dictionaries."""
    from transformers import PretrainedConfig

    own = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    fields: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, PretrainedConfig):
            fields[name] = shrunk(value) | {"model_type": value.model_type}
        elif name in SMALL and (_is_int(value) or name == "sliding_window"):
            fields[name] = SMALL[name]
        elif name in TOKENS and _is_int(value):
            fields[name] = min(value, TOKENS.index(name))
        elif name == "attn_logit_softcapping" and value is not None:
            fields[name] = 2.0  # which random logits reach
        elif name == "use_sliding_window":
            fields[name] = True
    if _is_int(own.get("kv_lora_rank")):  # latent attention: a key head for every query head
        fields |= {n: HEADS for n in ("num_key_value_heads",) if n in own}
        if own.get("head_dim") == own["qk_rope_head_dim"]:
            fields["head_dim"] = fields["qk_rope_head_dim"]
    if _is_int(own.get("image_size")):
        fields |= {name: size for name, size in IMAGE.items() if name in own}
    depth = next((own[n] for n in LAYERS if _is_int(own.get(n))), None)
    lists = {k: v for k, v in own.items() if isinstance(v, list) and len(v) == depth}
    layers = _layers(lists, depth) if depth else []
    for name in LAYERS:
        if _is_int(own.get(name)):
            fields[name] = len(layers)
    fields |= {name: [values[i] for i in layers] for name, values in lists.items()}
    if "sliding_window" in own and set(fields.get("layer_types", ())) == {"full_attention"}:
        fields["layer_types"] = SLIDING[: len(layers)]
    return fields


def _layers(lists: Mapping[str, list[Any]], depth: int) -> list[int]:
    """Layers of which each is of another kind, two at least."""
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(str([values[layer] for values in lists.values()]), layer)
    return (list(kinds.values()) if len(kinds) > 1 else [0, 0])[:MOST_LAYERS]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def redrawn(model: nn.Module, name: str) -> nn.Module:
    """Weights that attend unevenly, and nothing left at 0, so that a mistake shows."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    gain = GAINS.get(name, GAIN)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "sink" in path:
                weight.copy_(normal(weight))
            elif weight.dim() < 2 or not weight.numel():
                weight.add_(0.2 * (float(weight.abs().mean()) or 1.0) * normal(weight))
            elif id(weight) in tables or "embed" in path.rpartition(".")[2]:
                weight.copy_(normal(weight))
            else:
                weight.copy_(gain * normal(weight) * (weight.numel() // len(weight)) ** -0.5)
    return model.eval()


def pixels(model: Any) -> int:
    """How wide the square images are that a vision model takes."""
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 32)
    return size if isinstance(size, int) else size[0]
