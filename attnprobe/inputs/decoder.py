"""The second sequence of an encoder–decoder."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.padding import padded
from attnprobe.models import ModelConfig
from attnprobe.subject import Subject


def decoder_input(
    subject: Subject, rows: Sequence[Tensor], tokens: Tensor, mask: Tensor | None
) -> tuple[dict[str, Any], str]:
    """The second sequence of an encoder–decoder, and the half-sentence that says what it is.

    The project's own models read the same tokens twice. Those of transformers read them behind
    the model's own start token and without the last, as when they are trained to say them.
    """
    if not has_decoder(subject):
        return {}, ""
    takes = _arguments(subject)
    if "decoder_input_ids" not in takes:
        masks = {} if mask is None else {"decoder_attention_mask": mask}
        return {"decoder_tokens": tokens, **masks}, "; encoder and decoder read the same tokens"
    start = _decoder_start(subject)
    shifted, mask = padded([_behind(start, row) for row in rows], subject)
    kwargs = {"decoder_input_ids": shifted}
    if mask is not None and "decoder_attention_mask" in takes:
        kwargs["decoder_attention_mask"] = mask
    name = f"id {start}" if subject.vocabulary is None else subject.vocabulary.token(start)
    return kwargs, f"; the decoder reads the same behind {name}"


def _arguments(subject: Subject) -> Collection[str]:
    return inspect.signature(subject.model.forward).parameters


def has_decoder(subject: Subject) -> bool:
    """Whether a second sequence is read: a config says it of an encoder that is alone, too."""
    is_own = subject.config is None or isinstance(subject.config, ModelConfig)
    return subject.is_encoder_decoder and (is_own or "decoder_input_ids" in _arguments(subject))


def _behind(start: int, row: Tensor) -> Tensor:
    return row if int(row[0]) == start else torch.cat((row.new_tensor([start]), row[:-1]))


def _decoder_start(subject: Subject) -> int:
    """What a decoder of transformers reads first."""
    configs = [
        subject.config,
        getattr(subject.model, "generation_config", None),
        getattr(subject.config, "decoder", None),
        getattr(subject.config, "text_config", None),
    ]
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for config in configs:
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= 0:
                return token
    raise InputError(f"{subject.name} does not say what its decoder starts with")
