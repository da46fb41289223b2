"""Reads what was asked for, before any model is."""

from __future__ import annotations

from pathlib import Path

from attnprobe.errors import InputError
from attnprobe.inputs.controls import RandomTokens, RepeatedToken
from attnprobe.inputs.drawn import Source, TokenSource
from attnprobe.inputs.images import read_images
from attnprobe.inputs.options import InputOptions
from attnprobe.inputs.texts import Texts, given_texts, read_texts
from attnprobe.inputs.token_files import read_numbers


def read(options: InputOptions) -> Source:
    """Reads the files and texts that were asked for.

    Raises:
        InputError: they cannot be read, are empty, or are several kinds at once.
    """
    has_text = bool(options.texts or options.text_files)
    _exclusive(
        {
            "--text": has_text,
            "--tokens": options.tokens is not None,
            "--random-tokens": options.random_tokens,
            "--repeated-token": options.repeated_token is not None,
        }
    )
    _exclusive({"--tokens": options.tokens is not None, "--image": bool(options.images)})
    if options.chat_template and not has_text:
        raise InputError("--chat-template goes with --text or --text-file: give one")
    if options.tokens is not None:
        return read_numbers(Path(options.tokens))
    images = read_images(options.images) if options.images else None
    return Source(_tokens(options), images)


def _tokens(options: InputOptions) -> TokenSource | None:
    if options.random_tokens:
        return RandomTokens()
    if options.repeated_token is not None:
        return RepeatedToken(options.repeated_token)
    files = [
        text
        for file in options.text_files
        for text in read_texts(file, chats=options.chat_template)
    ]
    texts = [*given_texts(options.texts), *files]
    return Texts(texts) if texts else None


def _exclusive(given: dict[str, bool]) -> None:
    asked = [name for name, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} exclude each other: choose one")
