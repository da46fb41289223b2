"""What the project's own models learn and are probed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnprobe.errors import CheckpointError
from attnprobe.tasks.backcopy import BackCopy
from attnprobe.tasks.text import BytePairs, Bytes
from attnprobe.tasks.vocabulary import Vocabulary

__all__ = ["BackCopy", "BytePairs", "Bytes", "Vocabulary", "load"]


def load(inputs: Mapping[str, Any]) -> Vocabulary:
    """The task or tokenizer a checkpoint was trained with, from its `inputs`.

    Raises:
        CheckpointError: for a kind this version does not know, or a damaged state.
    """
    kind = inputs.get("kind")
    if kind == "backcopy":
        return BackCopy.from_state(inputs)
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return BytePairs.from_state(inputs)
    raise CheckpointError(
        f"the checkpoint's inputs are of unknown kind {kind!r}; upgrade attnprobe"
    )
