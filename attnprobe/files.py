"""Files that are there whole or not at all, and names for their content."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attnprobe.errors import InputError

_BLOCK = 1 << 20
_HASHED_NAME = re.compile(r"[0-9a-f]{64}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to, renamed to `path` when the block ends well.

    Raises:
        InputError: the file cannot be written; nothing is left behind.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
        )
        os.close(handle)
        yield Path(temporary)
        mode = 0o666 & ~_umask()
        os.chmod(temporary, mode)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def write_text(path: Path, text: str) -> None:
    """Writes text in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def file_sha256(path: Path) -> str:
    """Of a file's content. In the hub's cache large files are named by it.

    Raises:
        OSError: it cannot be read.
    """
    name = os.path.basename(os.path.realpath(path))
    if os.path.islink(path) and _HASHED_NAME.fullmatch(name):
        return name
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()
