"""What tokens, checkpoints and layers are called in a table: safe to print, one line each."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from attnprobe.result import Result

_LETTERS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_HIDDEN = ("C", "Z", "M")  # controls, separators, marks that join the character before


def token_text(text: object, token_id: object = None) -> str:
    r"""A token so that nothing in it can move the cursor: a space is ␣, a newline \n.

    Every character takes one cell, but for letters of scripts that are written two cells wide.
    """
    if not isinstance(text, str):
        return "–" if token_id is None or token_id != token_id else f"id {token_id}"
    if not text:
        return "(empty)"
    return "".join("␣" if c == " " else r"\\" if c == "\\" else _visible(c) for c in text)


def token_alone(text: object, token_id: object = None) -> str:
    """`token_text` where no other token stands beside it: a space between words is a space."""
    if isinstance(text, str) and all(word.isalnum() for word in text.split(" ")):
        return printable(text)
    return token_text(text, token_id)


def printable(text: object) -> str:
    """A name on one line, with what cannot be seen escaped."""
    return "".join(c if c == " " else _visible(c) for c in str(text))


def _visible(character: str) -> str:
    if character in _LETTERS:
        return _LETTERS[character]
    category, cells = unicodedata.category(character)[0], cell_len(character)
    if category not in _HIDDEN and (cells == 1 or (cells == 2 and category == "L")):
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def labels(results: Sequence[Result]) -> list[str]:
    """A name for every result, told apart by a number where two are called the same."""
    names = [printable(result.name) or "model" for result in results]
    counts, seen = Counter(names), Counter[str]()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(f"{name} #{seen[name]}" if counts[name] > 1 else name)
    return unique


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def layers_text(numbers: Iterable[int]) -> str:
    """ "layer 3" or "layers 0-2, 5"."""
    numbers = set(numbers)
    return f"layer{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def plural(count: int, noun: str) -> str:
    """ "1 head", "3 heads"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
