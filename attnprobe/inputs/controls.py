"""Controls without any structure: tokens drawn at random, and one token over and over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.drawn import Drawn, shape, vocab_size
from attnprobe.inputs.framing import Frame
from attnprobe.inputs.options import InputOptions
from attnprobe.subject import Subject

ANY_TOKEN = "random"  # --repeated-token random: another token in every sample


@dataclass(frozen=True)
class RandomTokens:
    """Tokens drawn uniformly from those that stand for text."""

    note: str | None = None

    def draw(self, subject: Subject, options: InputOptions) -> Drawn:
        frame = Frame.of(subject, options, default=True)
        length, samples = shape(subject, options)
        generator = torch.Generator().manual_seed(options.seed)
        ordinary = _ordinary(subject)
        size = (samples, frame.room(length))
        rows = ordinary[torch.randint(len(ordinary), size, generator=generator)]
        sentence = f"tokens drawn uniformly from the vocabulary{frame.told}"
        return Drawn(
            [frame.around(row) for row in rows],
            sentence,
            "random",
            bool(frame.before),
            self.note,
            is_seeded=True,
        )


@dataclass(frozen=True)
class RepeatedToken:
    """One token in all places of a sample (Gu et al. 2025): no key differs from another but by
    where it stands.

    Attributes:
        wanted: an id, the text of one token, or "random": another token in every sample.
    """

    wanted: str

    def draw(self, subject: Subject, options: InputOptions) -> Drawn:
        frame = Frame.of(subject, options, default=True)
        length, samples = shape(subject, options)
        room = frame.room(length)
        is_drawn = self.wanted == ANY_TOKEN
        if is_drawn:
            generator = torch.Generator().manual_seed(options.seed)
            ordinary = _ordinary(subject)
            drawn = ordinary[torch.randperm(len(ordinary), generator=generator)]
            tokens = [int(drawn[n % len(drawn)]) for n in range(samples)]
            what = "one token repeated, another in each sample"
        else:
            token = self._token(subject)
            tokens = [token] * (options.samples or 1)  # others would only be the same again
            vocabulary = subject.vocabulary
            text = "" if vocabulary is None else f" {vocabulary.token(token)!r}"
            what = f"one token repeated, id {token}{text}"
        rows = [frame.around(torch.full((room,), token)) for token in tokens]
        return Drawn(
            rows, f"{what}{frame.told}", "repeated", bool(frame.before), is_seeded=is_drawn
        )

    def _token(self, subject: Subject) -> int:
        size, vocabulary = vocab_size(subject), subject.vocabulary
        if self.wanted.isdecimal():
            if int(self.wanted) >= size:
                raise InputError(
                    f"--repeated-token {self.wanted} is outside the vocabulary of "
                    f"{subject.name}, which has ids 0 to {size - 1}"
                )
            return int(self.wanted)
        if vocabulary is None:
            raise InputError(
                f"{subject.name} comes without a tokenizer: give --repeated-token an id, "
                f"or {ANY_TOKEN!r}"
            )
        named = [n for n in vocabulary.special if vocabulary.token(n) == self.wanted]
        ids = named or vocabulary.encode(self.wanted)
        if len(ids) != 1:
            raise InputError(
                f"--repeated-token {self.wanted!r} is {len(ids)} tokens of {subject.name}: "
                "give the text of one, or an id"
            )
        if ids != named and ids[0] in vocabulary.special:  # what stands for all it does not know
            raise InputError(
                f"--repeated-token {self.wanted!r} is not in the vocabulary of {subject.name}: "
                "give the text of a token, or an id"
            )
        return ids[0]


def _ordinary(subject: Subject) -> Tensor:
    """The ids that stand for text, and that the model has an embedding for."""
    vocabulary, size = subject.vocabulary, vocab_size(subject)
    if vocabulary is None:
        return torch.arange(size)
    keeps = torch.ones(min(size, vocabulary.vocab_size), dtype=torch.bool)
    keeps[[n for n in vocabulary.special if n < len(keeps)]] = False
    ids = keeps.nonzero().flatten()
    if not len(ids):
        raise InputError(f"{subject.name} has no token that stands for text: give --tokens FILE")
    return ids
