"""How many layers and heads each stack of a model has, as its config says. Needs no torch.

Configs count them in three ways: once for a model of one stack; once a side, as `encoder_layers`
and `decoder_layers` do; or in a config inside the config for each part, as `vision_config` is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_LAYERS = ("depths", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_SIDE = r"(?:num_)?((?:\w+_)?(?:encoder|decoder))_(?:num_)?"
_SIDE_LAYERS = re.compile(rf"{_SIDE}(?:hidden_)?layers")
_PARTS = re.compile(r"(\w+)_config|((?:\w+_)?(?:encoder|decoder))")
_NO_PARTS = re.compile(r"quantization_config|generation_config")
_NO_SIDES = re.compile(r"sparse_|num_")  # num_sparse_encoder_layers: those with experts


@dataclass(frozen=True)
class Stack:
    """Layers that follow upon each other.

    Attributes:
        stack: encoder, decoder, text, vision, …; "" where the model has only this one.
        layers: how many; of all stages where there are several.
        heads: of a layer; a list of those of the stages where they differ, None if unsaid.
        key_value_heads: None where every head has its own.
    """

    stack: str
    layers: int
    heads: int | list[int] | None = None
    key_value_heads: int | None = None


def stacks(config: Mapping[str, Any], names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The stacks of a model, as plain values.

    Args:
        config: what `config.json` holds.
        names: of the tensors, where they are known: a config speaks of decoders that some of its
            models lack.
    """
    if _is_silent(config):
        config = _with_defaults(config)
    found = list(_within(config, (), names))
    if len(found) > 1 and not found[0].stack:  # a text model that a tower was put beside
        found[0] = Stack(**{**asdict(found[0]), "stack": "text"})
    return [asdict(stack) for stack in found]


def _within(
    config: Mapping[str, Any], path: tuple[str, ...], names: Collection[str] | None
) -> Iterator[Stack]:
    own, heads, keys = _count(config, _LAYERS), _listed(config, _HEADS), _count(config, _KEY_HEADS)
    keys = None if keys == heads else keys
    sides = _sides(config)
    if own is not None and (config.get("is_encoder_decoder") or list(sides) == ["decoder"]):
        sides = {"encoder": own, "decoder": own, **sides}  # T5 counts one of them, or both at once
    sides = _there(sides, own is not None, names)
    for side, layers in sides.items():
        told = _count(config, [key for key in config if _is_heads_of(key, side)])
        named = (*path, side.replace("_", " ")) if len(sides) > 1 else path
        yield Stack(" ".join(named), layers, told or heads, None if told else keys)
    parts = [
        stack for name, part in _parts(config) for stack in _within(part, (*path, name), names)
    ]
    if not sides and own is not None and (heads is not None or not (parts or _is_list(config))):
        yield Stack(" ".join(path), own, heads, keys)
    there = [stack for stack in parts if _share(names, stack.stack) > 0]
    is_alone = len(there) == 1 and _share(names, there[0].stack) == 1
    yield from there if is_alone else parts  # a vision tower by itself has the config of both


def _parts(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The configs inside a config, by the name of what they are of."""
    found = []
    for key, part in config.items():
        match = _PARTS.fullmatch(str(key))
        if match and isinstance(part, Mapping) and not _NO_PARTS.fullmatch(key):
            found.append(((match[1] or match[2]).replace("_", " "), part))
    return sorted(found, key=lambda item: item[0] == "decoder")


def _sides(config: Mapping[str, Any]) -> dict[str, int]:
    """Layers by side, of configs that have `encoder_layers` and the like."""
    found = {}
    for key, value in config.items():
        match = _SIDE_LAYERS.fullmatch(str(key))
        if match and _is_count(value) and not _NO_SIDES.match(match[1]):
            found[match[1]] = value
    return dict(sorted(found.items(), key=lambda item: item[0].endswith("decoder")))


def _is_heads_of(key: str, side: str) -> bool:
    return bool(re.fullmatch(rf"(num_)?{side}_(num_)?(self_)?(attention_)?heads", str(key)))


def _there(sides: dict[str, int], has_own: bool, names: Collection[str] | None) -> dict[str, int]:
    """The sides that some tensor lies in, as far as that is known."""
    if names is None:
        return sides
    modules = {module for name in names for module in name.split(".")}
    found = {side: layers for side, layers in sides.items() if side in modules or "_" in side}
    return found if {"encoder", "decoder"} & found.keys() or has_own else sides


def _share(names: Collection[str] | None, stack: str) -> float:
    """The share of the tensors in numbered modules whose path has the name of a part."""
    numbered = [name.lower() for name in names or () if re.search(r"\.\d+\.", name)]
    word = re.compile(rf"(?<![a-z]){re.escape(stack)}(?![a-z])")
    return sum(bool(word.search(name)) for name in numbered) / max(1, len(numbered))


def _count(config: Mapping[str, Any], names: Collection[str]) -> int | None:
    """The first of these numbers; the sum of a list by stage."""
    for name in names:
        value = config.get(name)
        if _is_count(value):
            return int(value)  # type: ignore[arg-type]
        if _are_counts(value):
            return sum(value)  # type: ignore[arg-type]
    return None


def _listed(config: Mapping[str, Any], names: Collection[str]) -> int | list[int] | None:
    """The first of these numbers, or lists of them where the stages differ."""
    for name in names:
        value: Any = config.get(name)
        if _is_count(value):
            return int(value)
        if _are_counts(value):
            return value[0] if len(set(value)) == 1 else list(value)
    return None


def _is_list(config: Mapping[str, Any]) -> bool:
    """Whether layers are counted by stage: without heads those are convolutions."""
    return not any(_is_count(config.get(name)) for name in _LAYERS)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))


# what a config leaves out


def _is_silent(config: Mapping[str, Any]) -> bool:
    """Whether the config, or a part that is a model, leaves layers or heads to the library."""
    parts = [part for _, part in _parts(config)]
    if any("model_type" in part and _is_silent(part) for part in parts):
        return True
    if any(list(_within(part, (), None)) for part in parts):
        return False
    known = _count(config, _LAYERS) and _listed(config, _HEADS)
    return not known and not _sides(config)


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what transformers takes for granted, as far as it knows the type."""
    try:
        from transformers import CONFIG_MAPPING

        usual = CONFIG_MAPPING[config["model_type"]]().to_dict()
    except Exception:  # of any kind: it is not installed, or does not know the type
        usual = {}
    said = {name: value for name, value in config.items() if value is not None}
    if set(said) & {*_LAYERS} and not set(usual) & set(said) & {*_LAYERS}:
        usual = {name: value for name, value in usual.items() if name not in _LAYERS}
    parts = {
        name: _with_defaults(value) if "model_type" in value else {**usual.get(name, {}), **value}
        for name, value in said.items()
        if _PARTS.fullmatch(str(name)) and isinstance(value, Mapping)
    }
    return {**usual, **said, **parts}
