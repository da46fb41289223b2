"""What a run measures, on what and how, and all else that its figures depend on. Needs no torch."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnprobe.errors import InputError
from attnprobe.files import file_sha256
from attnprobe.loading.identity import beside_sha256

STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """What is measured, on what, and how; as the options of `attnprobe scan`.

    Attributes:
        metrics: names for `attnprobe.scan`, None for all.
        text: texts; at most one of `text` with `text_file`, `tokens`, `random_tokens`,
            `repeated_token` is given.
        text_file: `.txt` or `.jsonl` files, `-` for stdin.
        chat_template: whether texts are conversations, by the model's own template.
        tokens: a file of token ids, or of floats.
        repeated_token: an id, a token's text, or "random".
        image: image files.
        model_config: a JSON file with the shape of bare state dicts.
        revision: of models of the hub; offline, whether these come from the cache alone.
        trust_remote_code: whether a model's own code is run.
        device_map: how accelerate spreads a model.
        batch_size: samples a pass; no figure depends on it, so the cache takes no notice of it.
    """

    metrics: Sequence[str] | None = None
    length: int | None = None
    samples: int | None = None
    seed: int = 0
    batch_size: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    text: Sequence[str] = ()
    text_file: Sequence[str] = ()
    chat_template: bool = False
    tokens: str | None = None
    random_tokens: bool = False
    repeated_token: str | None = None
    image: Sequence[str] = ()
    bos: bool | None = None
    model_config: str | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    device_map: str | None = None
    epsilon: float = 0.3
    pre_gate: bool = False


class Asked:
    """The options, the hash of what they depend on, and stdin in a file that processes can read."""

    def __init__(self, options: GatherOptions) -> None:
        self.options = options
        self.stdin: str | None = None
        files = {name: _hash(name) for name in options.text_file if name != STDIN}
        if STDIN in options.text_file:
            files[STDIN] = self._keep_stdin()
        try:
            for name in (options.tokens, options.model_config, *options.image):
                if name is not None:
                    files[str(name)] = _hash(str(name))
        except InputError:
            self.close()
            raise
        self.files = files

    def _keep_stdin(self) -> str:
        handle, self.stdin = tempfile.mkstemp(prefix="attnprobe-stdin-")
        with os.fdopen(handle, "wb") as file:
            file.write(sys.stdin.buffer.read())
        return _hash(self.stdin)

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.stdin is not None:
            with suppress(OSError):
                os.unlink(self.stdin)

    def identity(self, checkpoint: Path) -> dict[str, Any]:
        """All that figures depend on beside the weights' own bytes."""
        options = asdict(self.options)
        for name in ("batch_size", "revision", "offline"):  # which say how, or where to find it
            del options[name]
        beside = beside_sha256(checkpoint, offline=self.options.offline)
        return {**options, "files": self.files, "beside": beside}

    def job(self) -> dict[str, Any]:
        """What a worker is told of them."""
        return {"options": asdict(self.options), "stdin": self.stdin}


def _hash(path: str) -> str:
    try:
        return file_sha256(Path(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
