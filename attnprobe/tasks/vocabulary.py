"""What stands between text and token ids, in every task."""

from __future__ import annotations

from typing import Any, Protocol

BOS_TEXT = "<s>"


class Vocabulary(Protocol):
    """Text to ids and back. `state()` of a task rebuilds it through `attnprobe.tasks.load`.

    Attributes:
        vocab_size: ids run from 0 to this, exclusive.
        bos: id of the start token, which `encode` does not add; None where there is none.
        prefix: ids that belong before a text, for most the start token alone.
        suffix: ids that belong behind it.
        special: ids that stand for no text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def prefix(self) -> tuple[int, ...]: ...

    @property
    def suffix(self) -> tuple[int, ...]: ...

    @property
    def special(self) -> frozenset[int]: ...

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, with the task's name under `kind`."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a start token."""

    def token(self, token_id: int) -> str:
        """The raw text of one token."""
