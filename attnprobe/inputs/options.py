"""How the input is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How the input is chosen; `docs/cli.md` says what each option means.

    At most one of `texts` with `text_files`, `tokens`, `random_tokens` and `repeated_token` is
    given, and at most one of `tokens` and `images`; without any of them a checkpoint is measured
    on what it was trained on, or on something like it.
    """

    texts: Sequence[str] = ()
    text_files: Sequence[str] = ()
    chat_template: bool = False
    tokens: str | None = None
    random_tokens: bool = False
    repeated_token: str | None = None
    images: Sequence[str] = ()
    length: int | None = None
    samples: int | None = None
    seed: int = 0
    bos: bool | None = None
