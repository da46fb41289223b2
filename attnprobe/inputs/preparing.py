"""What `scan` is given: the samples of one model, checked, padded, and under its own names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.arrays import default_count, random_values
from attnprobe.inputs.controls import RandomTokens
from attnprobe.inputs.decoder import decoder_input, has_decoder
from attnprobe.inputs.default import Default
from attnprobe.inputs.drawn import FEWEST_SAMPLES, Drawn, Source, Values, spread
from attnprobe.inputs.options import InputOptions
from attnprobe.inputs.padding import padded
from attnprobe.inputs.shapes import second_input
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
    tokens, mask = padded(drawn.rows, subject)
    kwargs, told = decoder_input(subject, drawn.rows, tokens, mask)
    return Inputs(
        tokens,
        mask,
        _about(drawn.source + told, drawn.kind, drawn.bos, options, drawn.is_seeded),
        kwargs,
        _notes(subject, drawn),
    )


def _of_values(subject: Subject, source: Source, options: InputOptions) -> Inputs:
    """For a model that reads images or sound, and a decoder's text beside it."""
    if not has_decoder(subject):
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
    tokens, mask = padded(drawn.rows, subject)
    kwargs, _ = decoder_input(subject, drawn.rows, tokens, mask)
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
    tokens, mask = padded(drawn.rows, subject)
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
    there, wanted = len(found.values), options.samples or len(found.values)
    if wanted > there:
        raise InputError(f"--samples asks for {wanted}, the input gives {there}")
    if wanted == there:
        return found
    taken = torch.arange(wanted) * there // wanted  # spread evenly

    def some(value: Any) -> Any:
        by_sample = isinstance(value, Tensor) and value.dim() > 0 and len(value) == there
        return value[taken] if by_sample else value

    kwargs = {name: some(value) for name, value in found.kwargs.items()}
    return replace(found, values=found.values[taken], kwargs=kwargs)


def _cast(values: Tensor, subject: Subject) -> Tensor:
    """In the precision of the weights, which the first layer insists on."""
    kinds = [p.dtype for p in subject.model.parameters() if p.is_floating_point()]
    is_plain = bool(kinds) and kinds[0] in (torch.float64, torch.float16, torch.bfloat16)
    return values.to(kinds[0]) if is_plain else values


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
