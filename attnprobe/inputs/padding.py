"""Samples as one batch, checked against what a model can take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.drawn import vocab_size
from attnprobe.subject import Subject


def padded(rows: Sequence[Tensor], subject: Subject) -> tuple[Tensor, Tensor | None]:
    """(N, T) rows, filled up on the right, and (N, T) 1 at their tokens; None where none is.

    Raises:
        InputError: ids outside the vocabulary, or rows longer than the model has positions for.
    """
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
