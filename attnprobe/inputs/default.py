"""What a model is shown where nothing was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import attnprobe
from attnprobe.errors import InputError
from attnprobe.inputs.controls import RandomTokens
from attnprobe.inputs.drawn import Drawn, shape
from attnprobe.inputs.framing import Frame
from attnprobe.inputs.options import InputOptions
from attnprobe.inputs.texts import Text, Texts
from attnprobe.subject import Subject

DEFAULT_TEXT = Path(attnprobe.__file__).with_name("data") / "moby_dick.txt"
DEFAULT_TEXT_SHARE = 0.1  # at its end: what attnprobe train holds out


@dataclass(frozen=True)
class Default:
    """What a checkpoint was trained on: draws from its task, or the packaged text."""

    def draw(self, subject: Subject, options: InputOptions) -> Drawn:
        if subject.unread is not None:  # a damaged download is not to be measured on other things
            raise InputError(f"{subject.unread}: give --tokens FILE or --random-tokens")
        if subject.vocabulary is None:
            note = (
                f"{subject.name} comes without a tokenizer: measured on random tokens "
                "(--tokens FILE gives others)"
            )
            return RandomTokens(note).draw(subject, options)
        if hasattr(subject.vocabulary, "sample"):
            return self._from_task(subject, options)
        content = DEFAULT_TEXT.read_text(encoding="utf-8")
        kept = content[int(len(content) * (1 - DEFAULT_TEXT_SHARE)) :]
        text = Text(DEFAULT_TEXT.name, kept, is_file=True)
        return Texts([text], "the last tenth of the packaged Moby-Dick").draw(subject, options)

    def _from_task(self, subject: Subject, options: InputOptions) -> Drawn:
        frame = Frame.of(subject, options, default=True)
        length, samples = shape(subject, options)
        surplus = not frame.before  # the task's sequences begin with the start token
        tokens = subject.vocabulary.sample(samples, length + surplus, options.seed)  # type: ignore[union-attr]
        sentence = f"its own task, bigram back-copy{frame.told}"
        rows = list(tokens[:, int(surplus) :])
        return Drawn(rows, sentence, "task", not surplus, is_seeded=True)
