"""What `scan` is given: the samples of one model, checked, padded, and under its own names."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.arrays import default_count, random_values
from attnprobe.inputs.controls import RandomTokens
from attnprobe.inputs.default import Default
from attnprobe.inputs.drawn import (
    FEWEST_SAMPLES,
    Drawn,
    Source,
    Values,
    spread,
    vocab_size,
)
from attnprobe.inputs.options import InputOptions
from attnprobe.inputs.shapes import second_input
from attnprobe.models import ModelConfig
from attnprobe.subject import Subject


@dataclass(frozen=True)
class Inputs:
    """What `scan` is given.

    Attributes:
        tokens: (samples, length) ids, padded on the right; what a model reads first that reads
            images or sound.
        attention_mask: (samples, length), 1 at tokens; None where no sample is padded.
        about: for `Result.input`: `source` (a sentence), `kind`, `bos`, `seed`.
        kwargs: further arguments of the model.
        note: something the user should know, and may not expect.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    about: dict[str, Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


def prepare(subject: Subject, source: Source, options: InputOptions) -> Inputs:
    """The input of one model, checked against what it can take.

    Raises:
        InputError: ids outside its vocabulary, samples longer than it has positions for, a text
            that is too short, a model without a tokenizer, or one that reads something else.
    """
    if subject.reads in ("image", "audio") or (subject.reads != "tokens" and source.values):
        return _of_values(subject, source, options)
    second = second_input(subject)
    if source.values is not None and source.tokens is None and second is None:
        source.values.draw(subject)  # says why not
    if second is not None:
        return _of_both(subject, source, options, second)
    drawn = (source.tokens or Default()).draw(subject, options)
    tokens, mask = _padded(drawn.rows, subject)
    kwargs, told = _decoder(subject, drawn.rows, tokens, mask)
    return Inputs(
        tokens,
        mask,
        _about(drawn.source + told, drawn.kind, drawn.bos, options, drawn.is_seeded),
        kwargs,
        _notes(subject, drawn),
    )


def _of_values(subject: Subject, source: Source, options: InputOptions) -> Inputs:
    """For a model that reads images or sound, and a decoder's text beside it."""
    if not _has_decoder(subject):
        if source.tokens is not None and not isinstance(source.tokens, RandomTokens):
            what = "an image with --image FILE, " if subject.reads == "image" else ""
            raise InputError(
                f"{subject.name} reads {subject.reads}, no tokens: give {what}"
                "an array with --tokens FILE.npy, or nothing for random input"
            )
        values = _values(subject, source, options)
        return Inputs(
            _cast(values.values, subject),
            None,
            _about(values.source, values.kind, False, options, values.kind == "random"),
            values.kwargs,
        )
    drawn, values = _both(subject, source, options)
    tokens, mask = _padded(drawn.rows, subject)
    kwargs, _ = _decoder(subject, drawn.rows, tokens, mask)
    told = f"{values.source}; the decoder reads its own start token, then {drawn.source}"
    is_seeded = drawn.is_seeded or values.kind == "random"
    return Inputs(
        _cast(values.values, subject),
        None,
        _about(told, values.kind, drawn.bos, options, is_seeded),
        values.kwargs | kwargs,
        _notes(subject, drawn),
    )


def _of_both(subject: Subject, source: Source, options: InputOptions, second: str) -> Inputs:
    """For a model with a tower for text and one for images."""
    drawn, values = _both(subject, source, options)
    tokens, mask = _padded(drawn.rows, subject)
    is_seeded = drawn.is_seeded or values.kind == "random"
    return Inputs(
        tokens,
        mask,
        _about(f"{drawn.source}; {values.source}", drawn.kind, drawn.bos, options, is_seeded),
        {second: _cast(values.values, subject), **values.kwargs},
        _notes(subject, drawn),
    )


def _both(subject: Subject, source: Source, options: InputOptions) -> tuple[Drawn, Values]:
    """Text and values, as many of one as of the other; those that were given say how many."""
    given = None if source.values is None else _values(subject, source, options)
    count = len(given.values) if given else options.samples or default_count(subject)
    if source.tokens is None:
        few = replace(options, samples=min(count, FEWEST_SAMPLES))
        drawn = Default().draw(subject, few)
    else:
        drawn = source.tokens.draw(
            subject, options if given is None else replace(options, samples=None)
        )
        there = len(drawn.rows)
        if given is None:
            count = there
        elif there != count:
            others = "sounds" if subject.reads == "audio" else "images"
            note = f"{there} samples of text beside {count} {others}: "
            note += "some of the text was left out" if there > count else "the text was repeated"
            drawn = replace(drawn, note=note)
    drawn = replace(drawn, rows=spread(drawn.rows, count))
    return drawn, given or random_values(subject, count, options.seed)


def _values(subject: Subject, source: Source, options: InputOptions) -> Values:
    if source.values is None:
        return random_values(subject, options.samples or default_count(subject), options.seed)
    found = source.values.draw(subject)
    there = len(found.values)
    if options.samples is not None and options.samples != there:
        if options.samples > there:
            raise InputError(f"--samples asks for {options.samples}, the input gives {there}")
        raw = list(found.values)
        found = replace(found, values=torch.stack(spread(raw, options.samples)), kwargs={})
    return found


def _cast(values: Tensor, subject: Subject) -> Tensor:
    """In the precision of the weights, which the first layer insists on."""
    kinds = [p.dtype for p in subject.model.parameters() if p.is_floating_point()]
    is_plain = bool(kinds) and kinds[0] in (torch.float64, torch.float16, torch.bfloat16)
    return values.to(kinds[0]) if is_plain else values


def _decoder(
    subject: Subject, rows: Sequence[Tensor], tokens: Tensor, mask: Tensor | None
) -> tuple[dict[str, Any], str]:
    """The second sequence of an encoder–decoder, and the half-sentence that says what it is.

    The project's own models read the same tokens twice. Those of transformers read them behind
    the model's own start token and without the last, as when they are trained to say them.
    """
    if not _has_decoder(subject):
        return {}, ""
    takes = _arguments(subject)
    if "decoder_input_ids" not in takes:
        masks = {} if mask is None else {"decoder_attention_mask": mask}
        return {"decoder_tokens": tokens, **masks}, "; encoder and decoder read the same tokens"
    start = _decoder_start(subject)
    shifted, mask = _padded([_behind(start, row) for row in rows], subject)
    kwargs = {"decoder_input_ids": shifted}
    if mask is not None and "decoder_attention_mask" in takes:
        kwargs["decoder_attention_mask"] = mask
    name = f"id {start}" if subject.vocabulary is None else subject.vocabulary.token(start)
    return kwargs, f"; the decoder reads the same behind {name}"


def _arguments(subject: Subject) -> Collection[str]:
    return inspect.signature(subject.model.forward).parameters


def _has_decoder(subject: Subject) -> bool:
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


def _padded(rows: Sequence[Tensor], subject: Subject) -> tuple[Tensor, Tensor | None]:
    """(N, T) rows, filled up on the right, and where they are none of it."""
    _check(rows, subject)
    longest = max(len(row) for row in rows)
    if all(len(row) == longest for row in rows):
        return torch.stack(list(rows)), None
    pad = getattr(subject.config, "pad_token_id", None)  # some count positions by it
    fill = pad if isinstance(pad, int) and 0 <= pad < vocab_size(subject) else 0
    tokens = torch.full((len(rows), longest), fill, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return tokens, mask


def _check(rows: Sequence[Tensor], subject: Subject) -> None:
    size = vocab_size(subject)
    for number, row in enumerate(rows, start=1):
        outside = row[(row < 0) | (row >= size)]
        if len(outside):
            raise InputError(
                f"token id {int(outside[0])} in sample {number} is outside the vocabulary of "
                f"{subject.name}, which has ids 0 to {size - 1}"
            )
    longest, room = max(len(row) for row in rows), subject.limits.max_length
    if room is not None and longest > room:
        raise InputError(
            f"a sample has {longest} tokens, {subject.name} has learned {room} positions: "
            f"use --length {room} or less"
        )


def _notes(subject: Subject, drawn: Drawn) -> str | None:
    longest, usual = max(len(row) for row in drawn.rows), subject.limits.usual_length
    notes = [drawn.note] if drawn.note else []
    if longest > usual and _is_said(subject, usual):
        notes.append(
            f"a sample has {longest} tokens, {subject.name} was made for {usual}: "
            "its figures may say no more than that"
        )
    return "; ".join(notes) or None


def _is_said(subject: Subject, length: int) -> bool:
    """Whether a length is what the model's config says, and no guess of ours."""
    config = subject.config
    config = config.get_text_config(decoder=False) if hasattr(config, "get_text_config") else config
    names = ("max_length", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    return any(getattr(config, name, None) == length for name in names)


def _about(
    source: str, kind: str, bos: bool, options: InputOptions, is_seeded: bool
) -> dict[str, Any]:
    seed = options.seed if is_seeded else None
    return {"source": source, "kind": kind, "bos": bos, "seed": seed}
