"""The text that a piece of a vocabulary stands for, in the ways that pieces are written."""

from __future__ import annotations

from typing import Literal

Spelling = Literal["bytes", "spaces", "plain"]


def spelled(piece: str, how: Spelling) -> str:
    """The raw text of a piece.

    Args:
        piece: as its vocabulary has it.
        how: "bytes": a letter for every byte, Ġ for a space (Radford et al. 2019); "spaces": ▁ for
            a space, <0x0A> for a byte (SentencePiece); "plain": as it is.
    """
    if how == "bytes":
        known = [_BYTES[c] for c in piece if c in _BYTES]
        return bytes_text(bytes(known)) if len(known) == len(piece) else piece
    if how == "spaces":
        byte = _fallback_byte(piece)
        return piece.replace("▁", " ") if byte is None else bytes_text(bytes([byte]))
    return piece


def bytes_text(raw: bytes) -> str:
    """UTF-8 as text; a byte of a character that is not all there as <0xE2>."""
    whole = raw.decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in whole)


def _fallback_byte(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or piece[-1] != ">":
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _letters() -> dict[str, int]:
    """The letter for every byte: its own where it can be seen, one above 0xFF where it cannot."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _letters()
