"""Texts, files of texts and conversations, as windows of tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.drawn import Drawn, chosen, default_length, default_samples, share
from attnprobe.inputs.framing import Frame
from attnprobe.inputs.options import InputOptions
from attnprobe.subject import Subject
from attnprobe.tasks import Vocabulary
from attnprobe.tokenizer import Tokenizer

STDIN = "-"


@dataclass(frozen=True)
class Text:
    """A text or conversation, and what to call it. Of a *collection*, short ones may be left out.

    Attributes:
        name: for messages.
        content: the text; of a conversation, all that is said in it.
        is_file: whether it may be long: it is cut where a model's samples are shorter.
        of_collection: whether it is one of many.
        messages: of a conversation, each with `role` and `content`.
    """

    name: str
    content: str
    is_file: bool = False
    of_collection: bool = False
    messages: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not self.content:
            raise InputError(f"{self.name} is empty: there is nothing to measure")
        try:
            self.content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{self.name} is not valid text: character {error.start} stands for no character"
            ) from None


@dataclass(frozen=True)
class Texts:
    """Texts as they are, or in windows where a length is asked for or a file is long."""

    texts: Sequence[Text]
    described: str | None = None

    def draw(self, subject: Subject, options: InputOptions) -> Drawn:
        vocabulary = subject.vocabulary
        if vocabulary is None:
            reason = subject.unread or (
                f"{subject.name} comes without a tokenizer, so it cannot read text"
            )
            raise InputError(f"{reason}: give --tokens FILE or --random-tokens")
        if options.chat_template:
            return self._chats(subject, vocabulary, options)
        frame = Frame.of(subject, options, default=True)
        pieces: list[Tensor] = []
        passed_over = 0
        for text in self.texts:
            ids = torch.tensor(vocabulary.encode(text.content), dtype=torch.int64)
            if not len(ids):
                raise InputError(f"{text.name} has no token: there is nothing to measure")
            length = options.length
            if text.is_file and length is None:
                usual = default_length(subject)
                length = usual if len(ids) + len(frame) > usual else None
            cut = frame.windows(ids, length, text.name, may_be_short=text.of_collection)
            passed_over += not cut
            pieces += cut
        if not pieces:
            raise InputError(
                f"none of the {len(self.texts)} texts has the {options.length} tokens that "
                "--length asks for: shorten it"
            )
        note = None
        if passed_over:
            note = f"{passed_over} of {len(self.texts)} texts are shorter than --length: left out"
        return self._chosen(pieces, frame.told, bool(frame.before), note, options)

    def _chats(self, subject: Subject, vocabulary: Vocabulary, options: InputOptions) -> Drawn:
        """Conversations from their beginning: a window of one would have no template around it."""
        if not isinstance(vocabulary, Tokenizer) or not vocabulary.has_chat_template:
            raise InputError(f"{subject.name} has no chat template: leave --chat-template out")
        if options.bos is not None:
            raise InputError(
                "--chat-template says itself what a conversation begins with: "
                "leave --bos and --no-bos out"
            )
        rows: list[Tensor] = []
        shortened = 0
        for text in self.texts:
            longest = options.length or (default_length(subject) if text.is_file else None)
            said = text.messages or [{"role": "user", "content": text.content}]
            try:
                ids = vocabulary.chat(said)
            except InputError as error:
                raise InputError(f"{text.name}: {error}") from None
            shortened += longest is not None and len(ids) > longest
            rows.append(torch.tensor(ids[:longest], dtype=torch.int64))
        starts = {vocabulary.bos, *vocabulary.prefix[:1]}
        bos = all(int(row[0]) in starts for row in rows)
        note = None
        if shortened:
            most = options.length or default_length(subject)
            note = f"{shortened} of {len(rows)} conversations were cut to {most} tokens"
        return self._chosen(rows, ", by the chat template", bos, note, options)

    def _chosen(
        self, pieces: list[Tensor], told: str, bos: bool, note: str | None, options: InputOptions
    ) -> Drawn:
        has_files = any(text.is_file for text in self.texts)
        most = default_samples(max(len(piece) for piece in pieces))
        rows = chosen(pieces, options, most if has_files else None)
        names = self.described or _named([text.name for text in self.texts])
        return Drawn(rows, f"{share(rows, pieces)}{names}{told}", "text", bos, note)


def given_texts(texts: Sequence[str]) -> list[Text]:
    """Texts of the command line."""
    names = [f"--text {n}" for n in range(1, len(texts) + 1)] if len(texts) > 1 else ["--text"]
    return [Text(name, text) for name, text in zip(names, texts, strict=False)]


def read_texts(file: str, *, chats: bool) -> list[Text]:
    """The text of a file or of stdin, or those of every line of a .jsonl.

    Args:
        file: its path, - for stdin.
        chats: whether lines with conversations are wanted.

    Raises:
        InputError: it cannot be read, or holds no text.
    """
    name = "stdin" if file == STDIN else file
    if file == STDIN:
        raw = sys.stdin.buffer.read()
    else:
        try:
            raw = Path(file).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    try:
        content = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert it first"
        ) from None
    if Path(file).suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(name, content, chats)
    return [Text(name, content, is_file=True)]


def _read_jsonl(name: str, content: str, chats: bool) -> list[Text]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise InputError(f"line {number} of {name} is not JSON") from None
        texts.append(_entry(f"line {number} of {name}", entry, chats))
    if not texts:
        raise InputError(f"{name} is empty: there is nothing to measure")
    return texts


def _entry(name: str, entry: Any, chats: bool) -> Text:
    """A line of a .jsonl: its "text", or its "messages" or "prompt" where chats are wanted."""
    found = entry if isinstance(entry, dict) else {}
    said = next((found[key] for key in ("messages", "prompt") if key in found), None)
    if chats and said is not None:
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not _are_messages(said):
            raise InputError(
                f"{name} has messages that are no list of objects with 'role' and 'content'"
            )
        content = "\n".join(message["content"] for message in said)
        return Text(name, content, is_file=True, of_collection=True, messages=said)
    if not isinstance(found.get("text"), str):
        hint = ", but a conversation: add --chat-template" if said is not None else ""
        raise InputError(f"{name} has no 'text' that is a string{hint}")
    return Text(name, found["text"], is_file=True, of_collection=True)


def _are_messages(said: Any) -> bool:
    return (
        isinstance(said, list)
        and bool(said)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in said)
        and all(isinstance(m.get("content"), str) for m in said)
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, … {names[-1]}"
