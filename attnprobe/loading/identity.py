"""Who a checkpoint is: hashes of all that its figures depend on. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from attnprobe.files import file_sha256
from attnprobe.loading.base import find_base
from attnprobe.loading.folder import read
from attnprobe.loading.places import CONFIG, foreign


def place_of(path: Path) -> tuple[Path, ...]:
    """The files whose content makes a checkpoint what it is: one, or the weights of a folder."""
    place = foreign(path)
    return (path,) if place is None else read(place).weights


def sha256_of(path: Path) -> str:
    """Of a checkpoint's bytes; of several files that of the lines that `sha256sum` prints.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: the folder is not whole.
    """
    files = place_of(path)
    if len(files) == 1:
        return file_sha256(files[0])
    lines = (f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def beside_sha256(path: Path, *, offline: bool = False) -> str | None:
    """Of all else that figures depend on: the small files beside the weights, an adapter's base.

    Raises:
        OSError, CheckpointError: as for `sha256_of`.
    """
    place = foreign(path)
    if place is None:
        config = path.with_name(CONFIG)
        files = [config] if path.suffix == ".safetensors" and config.is_file() else []
        return _joint(f"{file_sha256(file)}  {file.name}\n" for file in files)
    found = read(place)
    lines = [f"{file_sha256(file)}  {file.name}\n" for file in found.beside()]
    if found.is_adapter:
        base = find_base(found, offline=offline).path
        lines += [sha256_of(base), str(beside_sha256(base))]
    return _joint(lines)


def _joint(lines: Iterable[str]) -> str | None:
    text = "".join(lines)
    return hashlib.sha256(text.encode()).hexdigest() if text else None
