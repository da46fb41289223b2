"""Bigram back-copy (Guo et al. 2024, "Active-Dormant Attention Heads"): sinks in minutes.

A sequence starts with `<s>`. Each character follows from the one before by the bigram law of a
text, except after a *trigger*: there the next character is a copy of the one before the trigger
(`…h e` with trigger `e` goes on `h`). One attention head has work at triggers and none elsewhere,
and softmax makes it look somewhere all the same: at `<s>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import CheckpointError, InputError
from attnprobe.tasks.vocabulary import BOS_TEXT


class BackCopy:
    """The law of one text: its characters, their bigram, and which of them are triggers.

    Attributes:
        characters: the alphabet, `characters[i - 1]` being the text of token i; token 0 is `<s>`.
        triggers: those after which the sequence copies.
        cumulative: (V, V) float64, running sums of `P(next | current)`; the row of `<s>` is the law
            of the first character, which is never a trigger.
    """

    bos = 0
    prefix, suffix, special = (bos,), (), frozenset({bos})

    def __init__(self, characters: str, triggers: str, cumulative: Tensor) -> None:
        self.characters = characters
        self.triggers = triggers
        self.cumulative = cumulative
        self.vocab_size = len(characters) + 1
        self._ids = {character: i for i, character in enumerate(characters, start=1)}
        self._is_trigger = torch.zeros(self.vocab_size, dtype=torch.bool)
        self._is_trigger[[self._ids[t] for t in triggers]] = True

    @classmethod
    def learn(cls, text: str, n_triggers: int = 3) -> BackCopy:
        """The law of `text`, its most frequent letters as triggers.

        Raises:
            InputError: where the text has too few different letters.
        """
        letters = Counter(c for c in text if c.isalpha())
        triggers = [c for c, _ in sorted(letters.items(), key=lambda item: (-item[1], item[0]))]
        triggers = triggers[:n_triggers]
        characters = "".join(sorted(set(text)))
        if len(triggers) < n_triggers or len(characters) <= n_triggers:
            raise InputError(
                f"the text has {len(characters)} different characters; back-copy needs "
                f"{n_triggers} letters and more; give a longer --text-file"
            )
        ids = {character: i for i, character in enumerate(characters, start=1)}
        size = len(characters) + 1
        sequence = torch.tensor([ids[c] for c in text])
        pairs = torch.bincount(sequence[:-1] * size + sequence[1:], minlength=size * size)
        counts = pairs.view(size, size).double()
        counts[0] = torch.bincount(sequence, minlength=size).double()
        counts[0, [ids[t] for t in triggers]] = 0
        # a character seen only at the very end has no successor: it takes the law of the start
        counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, counts[0])
        cumulative = counts.cumsum(1) / counts.sum(1, keepdim=True)
        return cls(characters, "".join(triggers), cumulative)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> BackCopy:
        """The inverse of `state`; `CheckpointError` where parts are missing or disagree."""
        try:
            task = cls(state["characters"], state["triggers"], state["cumulative"])
            fits = task.cumulative.shape == (task.vocab_size, task.vocab_size)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint's back-copy task is damaged: {error}") from None
        if not fits:
            raise CheckpointError(
                "the checkpoint's back-copy task is damaged: its law has no V × V"
            )
        return task

    def state(self) -> dict[str, Any]:
        """Two strings and the law."""
        return {
            "kind": "backcopy",
            "characters": self.characters,
            "triggers": self.triggers,
            "cumulative": self.cumulative,
        }

    def encode(self, text: str) -> list[int]:
        """One id per character; a character outside the alphabet is read as a space.

        Raises:
            InputError: where such a character occurs and the alphabet has no space.
        """
        space = self._ids.get(" ")
        ids = [self._ids.get(character, space) for character in text]
        if None in ids:
            unknown = text[ids.index(None)]
            raise InputError(f"the model's alphabet has neither {unknown!r} nor a space")
        return ids  # type: ignore[return-value]  # mypy does not see that None is gone

    def token(self, token_id: int) -> str:
        """The character, or `<s>`."""
        return BOS_TEXT if token_id == self.bos else self.characters[token_id - 1]

    def is_trigger(self, tokens: Tensor) -> Tensor:
        """Where `tokens` (any shape) are triggers: the queries at which copying has work to do."""
        return self._is_trigger.to(tokens.device)[tokens]

    def sample(self, n: int, length: int, seed: int) -> Tensor:
        """`n` sequences (n, length) drawn from the law, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(length, n, 1, dtype=torch.float64, generator=generator)
        tokens = torch.full((n, length), self.bos)
        for t in range(1, length):
            law = self.cumulative[tokens[:, t - 1]]  # (n, V)
            following = torch.searchsorted(law, draws[t], right=True).squeeze(1)
            # Never a trigger before a trigger: the first token is none, the bigram law rules only
            # after tokens that are none, and a copy is of the one before a trigger.
            copied = tokens[:, max(t - 2, 0)]
            tokens[:, t] = torch.where(self.is_trigger(tokens[:, t - 1]), copied, following)
        return tokens
