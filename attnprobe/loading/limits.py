"""What a model can be shown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnprobe.models import ModelConfig

#: Names that a table of learned positions goes by; those of distances are no bound.
_POSITIONS = re.compile(r"(wpe|position_embeddings?|embed_positions?|pos_embed\w*|positions_embed)")
_OTHER_SENSES = re.compile(r"vision|visual|image|audio|speech")
_OTHER_ENCODERS = re.compile(rf"{_OTHER_SENSES.pattern}|(^|\.)encoder\.")  # Whisper's: of sound
_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
_UNKNOWN_LENGTH = 512


@dataclass(frozen=True)
class Limits:
    """What a model can be shown.

    Attributes:
        vocab_size: token ids that it takes, None if it reads no tokens.
        max_length: tokens that a sample may have at most, None where nothing but memory bounds it.
        usual_length: tokens that its samples had in training, as far as that is known.
        n_heads: query heads of a layer, None where that is unknown or differs.
    """

    vocab_size: int | None
    max_length: int | None
    usual_length: int
    n_heads: int | None

    @classmethod
    def of(cls, config: ModelConfig) -> Limits:
        """Those of one of the project's own models."""
        is_bound = config.positions == "learned"
        most = config.max_length if is_bound else None
        return cls(config.vocab_size, most, config.max_length, config.n_heads)


def foreign_limits(model: nn.Module, config: Any) -> Limits:
    """Those of a model of transformers, from what its modules can look up."""
    text = config.get_text_config(decoder=False) if hasattr(config, "get_text_config") else config
    most = _learned_positions(model)
    said = next(filter(None, (_whole(text, name) for name in _LONGEST)), None)
    usual = min(filter(None, (most, said)), default=_UNKNOWN_LENGTH)
    if most is None and _whole(text, "rotary_dim") and _is_table(model):
        most = said  # GPT-J's rotations are a table, too
    return Limits(_ids(model, text), most, usual, _whole(text, "num_attention_heads"))


def reads(model: nn.Module) -> str:
    """What its first input is: "tokens", "image", "audio", or the name of that argument."""
    first = getattr(model, "main_input_name", "input_ids")
    known = {"input_ids": "tokens", "pixel_values": "image", "pixel_values_videos": "image"}
    known |= {"input_values": "audio", "input_features": "audio", "audio_values": "audio"}
    return known.get(first, first)


def _ids(model: nn.Module, text: Any) -> int | None:
    if reads(model) not in ("tokens", "audio"):  # what hears may write tokens
        return None
    try:
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        table = None
    sizes = (getattr(table, "num_embeddings", None), _whole(text, "vocab_size"))
    return min(filter(None, sizes), default=None)


def _learned_positions(model: nn.Module) -> int | None:
    """Positions that the smallest table of them has, None where there is none."""
    found = []
    other_senses = _OTHER_SENSES if reads(model) == "tokens" else _OTHER_ENCODERS
    ahead = 1 if getattr(getattr(model, "config", None), "ngram", None) else 0  # ProphetNet
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        is_table = isinstance(module, nn.Embedding) and _POSITIONS.fullmatch(name)
        if is_table and not other_senses.search(path):
            reserved = getattr(module, "offset", None)  # OPT, BART: rows that stand for no position
            if not isinstance(reserved, int):
                reserved = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa
            if hasattr(module, "make_weights"):  # sinusoids, made longer where it takes that
                continue
            found.append(module.num_embeddings - reserved - ahead)
    return min(found, default=None)


def _is_table(model: nn.Module) -> bool:
    return any(name.endswith("embed_positions") for name, _ in model.named_buffers())


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else None
