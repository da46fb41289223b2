"""Which checkpoints a pattern means."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath

from attnprobe.result import Result


def fits(patterns: Sequence[str] | None, name: str, path: str | None = None) -> bool:
    """Whether a glob fits a checkpoint's name, its path or its file's name; None fits all."""
    if patterns is None:
        return True
    path = (path or "").replace("\\", "/")
    names = [n for n in (name, path, PurePath(path).name) if n]
    return any(fnmatchcase(n, pattern) for n in names for pattern in patterns)


def fits_result(patterns: Sequence[str] | None, result: Result) -> bool:
    """`fits`, for what a result says of its checkpoint."""
    path = result.checkpoint.get("path")
    return fits(patterns, result.name, None if path is None else str(path))
