"""What stands around every sample: a start token, [CLS] and [SEP], nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.options import InputOptions
from attnprobe.subject import Subject
from attnprobe.tasks import Vocabulary


@dataclass(frozen=True)
class Frame:
    """Ids that stand before and behind every sample, and the half-sentence that says so."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    told: str = ""

    @classmethod
    def of(cls, subject: Subject, options: InputOptions, *, default: bool) -> Frame:
        """What a model's vocabulary puts around a text, as far as --bos/--no-bos lets it.

        --no-bos takes away what stands before a text, and leaves what stands behind it.

        Args:
            subject: the model.
            options: with `bos`.
            default: whether the vocabulary's rule holds where `bos` says nothing.

        Raises:
            InputError: --bos for a model that has no start token.
        """
        vocabulary = subject.vocabulary
        if vocabulary is None or not (default or options.bos):
            if options.bos:
                raise InputError(f"--bos: {subject.name} has no start token")
            return cls()
        before = vocabulary.prefix
        if options.bos is False:
            before = ()
        elif options.bos and not before:
            if vocabulary.bos is None:
                raise InputError(f"--bos: {subject.name} has no start token")
            before = (vocabulary.bos,)
        return cls(before, vocabulary.suffix, _told(vocabulary, before, vocabulary.suffix))

    def __len__(self) -> int:
        return len(self.before) + len(self.behind)

    def around(self, ids: Tensor) -> Tensor:
        """(T,) ids with what belongs before and behind them."""
        return torch.cat((ids.new_tensor(self.before), ids, ids.new_tensor(self.behind)))

    def room(self, length: int) -> int:
        """Tokens of a sample's own in `length`.

        Raises:
            InputError: there is none.
        """
        room = length - len(self)
        if room < 1:
            what = "behind the start token" if len(self) == 1 else "beside the special tokens"
            raise InputError(
                f"--length {length} leaves no room {what}: use {len(self) + 1} or more"
            )
        return room

    def windows(
        self, ids: Tensor, length: int | None, name: str, *, may_be_short: bool = False
    ) -> list[Tensor]:
        """Windows of `length` tokens, the frame included; all of it where no length is asked.

        Args:
            ids: (T,) of a text called `name`.
            length: of a window.
            name: for messages.
            may_be_short: whether a text shorter than that has no window, rather than an error.

        Raises:
            InputError: the text is shorter than a window.
        """
        if length is None:
            return [self.around(ids)]
        room = self.room(length)
        if len(ids) < room:
            if may_be_short:
                return []
            raise InputError(
                f"{name} has {len(ids) + len(self)} tokens{self._counted()}, "
                f"--length asks for {length}: shorten it, or leave it out to measure the text as "
                "it is"
            )
        return [self.around(window) for window in ids[: len(ids) // room * room].view(-1, room)]

    def _counted(self) -> str:
        if not len(self):
            return ""
        is_start = len(self.before) == 1 and not self.behind
        return f" with the {'start token' if is_start else 'special tokens'}"


def _told(vocabulary: Vocabulary, before: tuple[int, ...], behind: tuple[int, ...]) -> str:
    def names(ids: tuple[int, ...]) -> str:
        return " ".join(map(vocabulary.token, ids))

    if before and behind:
        return f", between {names(before)} and {names(behind)}"
    if before:
        what = "the start token " if len(before) == 1 else ""
        return f", behind {what}{names(before)}"
    return ", without a start token" + (f", before {names(behind)}" if behind else "")
