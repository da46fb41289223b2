"""Samples as they come from a source, and how many of them there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.options import InputOptions
from attnprobe.subject import Subject

LONGEST_DEFAULT = 512  # tokens a sample
FEWEST_SAMPLES, DEFAULT_TOKENS = 16, 8192


@dataclass(frozen=True)
class Drawn:
    """Samples of tokens.

    Attributes:
        rows: ids (T,) of each.
        source: a sentence on where they come from.
        kind: "text", "tokens", "task", "random" or "repeated".
        bos: whether they begin with a start token.
        note: something the user should know, and may not expect.
        is_seeded: whether another seed would give others.
    """

    rows: list[Tensor]
    source: str
    kind: str
    bos: bool
    note: str | None = None
    is_seeded: bool = False


@dataclass(frozen=True)
class Values:
    """Samples of something else: pixels, sound.

    Attributes:
        values: (N, …) floats.
        source: a sentence on where they come from.
        kind: "images", "arrays" or "random".
        kwargs: what else the model is to be told of them.
    """

    values: Tensor
    source: str
    kind: str
    kwargs: dict[str, Any] = field(default_factory=dict)


class TokenSource(Protocol):
    """Where tokens come from."""

    def draw(self, subject: Subject, options: InputOptions) -> Drawn:
        """The samples for one model."""


class ValueSource(Protocol):
    """Where pixels or sound come from."""

    def draw(self, subject: Subject) -> Values:
        """The samples for one model."""


@dataclass(frozen=True)
class Source:
    """Where samples come from; None where nothing was asked for.

    It is read before any model is, and once for all of them.
    """

    tokens: TokenSource | None = None
    values: ValueSource | None = None


def default_length(subject: Subject) -> int:
    """Tokens a sample where none are asked for: as trained, within reason."""
    return min(subject.limits.usual_length, LONGEST_DEFAULT)


def default_samples(length: int) -> int:
    """How many samples make a steady figure: some 8,192 tokens, and 16 at least."""
    return max(FEWEST_SAMPLES, DEFAULT_TOKENS // length)


def shape(subject: Subject, options: InputOptions) -> tuple[int, int]:
    """How many tokens a drawn sample has, and how many samples are drawn."""
    length = options.length or default_length(subject)
    return length, options.samples or default_samples(length)


def vocab_size(subject: Subject) -> int:
    """How many ids a model takes, or its decoder where it hears or sees first.

    Raises:
        InputError: it takes none.
    """
    if subject.limits.vocab_size is not None:
        return subject.limits.vocab_size
    config = subject.config
    for part in (getattr(config, "decoder", None), getattr(config, "text_config", None), config):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    raise InputError(
        f"{subject.name} reads no tokens, but {subject.reads}: give an array, --tokens FILE.npy"
    )


def chosen(rows: Sequence[Tensor], options: InputOptions, default: int | None) -> list[Tensor]:
    """As many rows as asked for, spread evenly over all of them."""
    if options.samples is not None and options.samples > len(rows):
        raise InputError(
            f"--samples asks for {options.samples}, the input gives {len(rows)}: "
            "give more of it, or a shorter --length"
        )
    wanted = options.samples or default or len(rows)
    return spread(rows, min(wanted, len(rows)))


def spread(rows: Sequence[Tensor], count: int) -> list[Tensor]:
    """`count` of the rows, evenly; all of them over and over where they are too few."""
    if count > len(rows):
        return [rows[n % len(rows)] for n in range(count)]
    return [rows[n * len(rows) // count] for n in range(count)]


def share(taken: Sequence[Tensor], there: Sequence[Tensor]) -> str:
    """ "16 of 78 samples of " where not all were taken."""
    return "" if len(taken) == len(there) else f"{len(taken)} of {len(there)} samples of "
