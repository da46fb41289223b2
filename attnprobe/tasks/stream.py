"""Training sequences: whatever a task draws them from, in one shape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attnprobe.errors import InputError


class Source(Protocol):
    """Something that draws token sequences, the same ones for the same seed."""

    def sample(self, n: int, length: int, seed: int) -> Tensor:
        """`n` sequences (n, length) of token ids, int64."""


class TextWindows:
    """Windows cut at random from one long text, each behind a start token."""

    def __init__(self, ids: Tensor, bos: int) -> None:
        self.ids = ids  # (N,)
        self.bos = bos

    def sample(self, n: int, length: int, seed: int) -> Tensor:
        """`n` windows (n, length), the start token included.

        Raises:
            InputError: where the text is shorter than one window.
        """
        room = len(self.ids) - (length - 1)
        if room < 0:
            raise InputError(
                f"the text has {len(self.ids)} tokens where {length - 1} are needed; "
                "give a longer --text-file or a shorter --length"
            )
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(room + 1, (n, 1), generator=generator)
        windows = self.ids[starts + torch.arange(length - 1)]  # (n, length - 1)
        return torch.cat((torch.full((n, 1), self.bos), windows), dim=1)
