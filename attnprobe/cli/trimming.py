"""Lines that end where their text ends, in whatever is printed for people to a pipe or a file."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_COLOUR = r"\x1b\[[0-9;]*m"
_END = re.compile(rf"(?:[ \t]|{_COLOUR})+$", re.MULTILINE)


class _Kept(io.StringIO):
    """What is printed, for a console to take for the stdout that it will go to."""

    encoding = "utf-8"


@contextmanager
def trimmed() -> Iterator[None]:
    """Takes blanks off the ends of the lines printed within, unless a terminal shows them.

    Tables pad their cells, which nobody sees but a diff, an editor or a commit hook.
    """
    if sys.stdout.isatty():
        yield
        return
    kept = _Kept()
    kept.encoding = sys.stdout.encoding
    try:
        with redirect_stdout(kept):
            yield
    finally:
        sys.stdout.write(trim(kept.getvalue()))
        sys.stdout.flush()


def trim(text: str) -> str:
    """Text without blanks at its line ends; colours are switched off where they were."""
    return _END.sub(lambda end: "".join(re.findall(_COLOUR, end[0])), text)
