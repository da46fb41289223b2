"""On which line of a TOML file a key or a table stands; the parser itself does not tell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The line, from 1, on which `path` first appears; that of its nearest parent if it is inline.

    A line is it when all the lines up to it, taken as a file, parse and hold the path: comments
    and strings that look like tables fool nobody.
    """
    lines = text.splitlines()
    for length in range(len(path), 0, -1):
        found = _first(lines, path[:length])
        if found is not None:
            return found
    return 1


def _first(lines: Sequence[str], path: Sequence[str | int]) -> int | None:
    name = next(str(key) for key in reversed(path) if isinstance(key, str))
    for number, line in enumerate(lines, 1):
        may_begin_it = name in line and ("=" in line or line.lstrip().startswith("["))
        if may_begin_it:
            data = _parsed("\n".join(lines[:number]))
            if data is not None and _holds(data, path):
                return number
    return None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _holds(data: Any, path: Sequence[str | int]) -> bool:
    for key in path:
        if isinstance(data, list):
            data = dict(enumerate(data))
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
