"""Who a checkpoint is: hashes of all that its figures depend on. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from attnprobe.files import file_sha256
from attnprobe.loading.base import find_base
from attnprobe.loading.folder import read
from attnprobe.loading.places import CONFIG, foreign


def sha256_of(path: Path) -> str:
    """Of the bytes of a checkpoint: of a file, or of the weights in a folder.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: the folder is not whole.
    """
    place = foreign(path)
    return joint_sha256((path,) if place is None else read(place).weights)


def joint_sha256(files: Sequence[Path]) -> str:
    """Of one file's bytes; of several files that of the lines that `sha256sum` prints of them."""
    if len(files) == 1:
        return file_sha256(files[0])
    return _joint(files) or ""


def beside_sha256(path: Path, *, offline: bool = False) -> str | None:
    """Of all else that figures depend on: the small files beside the weights, an adapter's base.

    Raises:
        OSError, CheckpointError: as for `sha256_of`.
    """
    place = foreign(path)
    if place is None:
        config = path.with_name(CONFIG)
        files = [config] if path.suffix == ".safetensors" and config.is_file() else []
        return _joint(files)
    found = read(place)
    if not found.is_adapter:
        return _joint(found.beside())
    base = find_base(found, offline=offline).path
    return _joint(found.beside(), sha256_of(base), str(beside_sha256(base)))


def _joint(files: Sequence[Path], *more: str) -> str | None:
    lines = [f"{file_sha256(file)}  {file.name}\n" for file in files]
    text = "".join([*lines, *more])
    return hashlib.sha256(text.encode()).hexdigest() if text else None
