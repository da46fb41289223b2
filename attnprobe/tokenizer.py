"""The tokenizer that a model of transformers comes with, as the `Vocabulary` of its inputs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attnprobe.errors import CheckpointError, InputError
from attnprobe.tasks.spelling import Spelling, bytes_text, spelled

# Where none of these is, transformers would make up a tokenizer that knows no word.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "vocab.bpe"),
    *("tekken.json", "sentencepiece.model", "prophetnet.tokenizer", "vocab.model"),
)
# pieces kept free for later, which no text holds: [unused7], <|reserved_token_3|>, madeupword0001
_PLACEHOLDER = re.compile(r"[\[<]\|?(unused|reserved|extra_id)\w*\|?[\]>]|madeupword\d+")
_PROBES = ("a", "the", "hello", ".", " ", "0")


def load(
    folder_or_id: str | Path,
    *,
    revision: str | None = None,
    local_only: bool,
    trust_remote_code: bool = False,
) -> Tokenizer | None:
    """Reads the tokenizer of a model; None where the model comes without one.

    Args:
        folder_or_id: a folder, or the id of a repository on the hub.
        revision: branch, tag or commit of a repository.
        local_only: never ask the network, not even whether a file has changed.
        trust_remote_code: run a tokenizer's own Python where it brings such.

    Raises:
        CheckpointError: there are files of a tokenizer, and they cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = str(folder_or_id)
    how: dict[str, Any] = {"local_files_only": local_only or os.path.isdir(place)}
    how |= {} if revision is None else {"revision": revision}
    if not _has_any(place, FILES, how):
        return None
    try:
        inner = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **how)
    except Exception as error:  # of any kind: what reads it is code of the model's family
        if not _has_any(place, ("tokenizer.json",), how):
            raise _unreadable(place, error) from error
        try:  # a family that this transformers does not know: the file alone says it all
            inner = PreTrainedTokenizerFast.from_pretrained(place, **how)
        except Exception:
            raise _unreadable(place, error) from error
    names = [name for name in inner.vocab_files_names.values() if isinstance(name, str)]
    if names and not _has_any(place, names, how):
        return None  # only its settings are there: its vocabulary would be made up
    return Tokenizer(inner, place)


def _has_any(place: str, names: Sequence[str], how: Mapping[str, Any]) -> bool:
    if os.path.isdir(place):
        return any(os.path.isfile(os.path.join(place, name)) for name in names)
    from transformers.utils import cached_file

    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    try:
        return any(cached_file(place, name, **how, **quiet) for name in names)
    except Exception as error:
        raise _unreadable(place, error) from error


def _unreadable(place: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"the tokenizer of {place} cannot be read: {_line(error)}")


def _line(error: Exception) -> str:
    """An error of a library on one line, which may be long."""
    words = " ".join(str(error).split())
    return f"{words[:200]}…" if len(words) > 200 else words or type(error).__name__


class Tokenizer:
    """A tokenizer of transformers, fast or slow.

    Attributes:
        inner: the tokenizer itself.
        vocab_size: its largest id and one; the model's embedding may have further rows.
        bos: its start token, which it need not put anywhere: see `prefix`. None if it has none.
        prefix: ids that it puts before a text by its own rule: `[CLS]`, `<s>`, nothing.
        suffix: ids that it puts behind a text: `[SEP]`, `</s>`, nothing.
        special: ids that stand for no text, unused ones included.
    """

    def __init__(self, inner: Any, name: str = "the model") -> None:
        self.inner = inner
        self.name = name
        pieces = inner.get_vocab()
        if not pieces:
            raise CheckpointError(f"the tokenizer of {name} has no token")
        self.vocab_size = max(pieces.values()) + 1
        text = {n for p, n in pieces.items() if not _PLACEHOLDER.fullmatch(str(p))}
        self.bos: int | None = inner.bos_token_id
        added = set(getattr(inner, "added_tokens_decoder", {})) | set(inner.all_special_ids)
        self._added = frozenset(added)
        self.special = frozenset(set(range(self.vocab_size)) - (text - added))
        self.prefix, self.suffix = self._frame()

    @cached_property
    def _spelling(self) -> Spelling:
        """How its pieces are written, which its file or its class gives away."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is None:
            if hasattr(self.inner, "byte_decoder"):
                return "bytes"
            return "spaces" if hasattr(self.inner, "sp_model") else "plain"
        decoder, splitter = _json(backend.decoder), _json(backend.pre_tokenizer)
        kinds = _kinds(decoder) | _kinds(splitter)
        if "ByteLevel" in kinds:
            return "bytes"
        marked = "Metaspace" in kinds or "▁" in json.dumps(decoder, ensure_ascii=False)
        return "spaces" if marked else "plain"

    def state(self) -> dict[str, Any]:
        """What tells it from others; it is not rebuilt from this, but read from its own files."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()  # which are no part of what ids mean
            backend.no_padding()
            return {"kind": "transformers", "tokenizer": backend.to_str()}
        ids = sorted(self.inner.get_vocab().items(), key=lambda item: item[1])
        return {"kind": "transformers", "class": type(self.inner).__name__, "tokenizer": ids}

    def encode(self, text: str) -> list[int]:
        """The ids of a text, all of it, without what belongs before and behind.

        Raises:
            InputError: the tokenizer knows no token for a part of the text.
        """
        return self._ids(text, framed=False)

    def _ids(self, text: str, framed: bool) -> list[int]:
        whole = {"truncation": False, "padding": False}  # whatever its file says
        try:
            ids = self.inner(text, add_special_tokens=framed, verbose=False, **whole)["input_ids"]
        except Exception as error:  # tokenizers raises nothing narrower
            raise InputError(
                f"the tokenizer of {self.name} cannot read the text: {_line(error)}"
            ) from None
        return list(ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` has a rule to go by."""
        return bool(self.inner.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation by its chat template, which puts a start token where it wants.

        The turn of the assistant is opened where the last message is another's.

        Args:
            messages: each with `role` and `content`.

        Raises:
            InputError: it has no chat template, or the template takes no such conversation.
        """
        if not self.has_chat_template:
            raise InputError(
                f"the tokenizer of {self.name} has no chat template: leave --chat-template out"
            )
        opens = messages[-1].get("role") != "assistant"
        try:
            ids = self.inner.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=opens, return_dict=False
            )
        except Exception as error:  # templates are programs of their own
            raise InputError(f"the chat template takes no such messages: {_line(error)}") from None
        return list(ids)

    def token(self, token_id: int) -> str:
        """The raw text of one token: a space where its piece has Ġ or ▁, <0xE2> for a lone byte."""
        piece = self.inner.convert_ids_to_tokens(token_id)
        if piece is None:  # a row of the embedding beyond the tokenizer's last id
            return f"<id {token_id}>"
        if isinstance(piece, bytes):
            return bytes_text(piece)
        if token_id in self._added:
            return str(piece)
        return spelled(str(piece), self._spelling)

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What it puts before and behind a text, found by reading a text with and without it."""
        for probe in self._probes():
            try:
                bare, framed = self._ids(probe, framed=False), self._ids(probe, framed=True)
            except InputError:
                continue
            for start in range(len(framed) - len(bare) + 1) if bare else ():
                if framed[start : start + len(bare)] == bare:
                    return tuple(framed[:start]), tuple(framed[start + len(bare) :])
        raise CheckpointError(
            f"the tokenizer of {self.name} changes a text that it puts special tokens around"
        )

    def _probes(self) -> Sequence[str]:
        """Texts that give at least a token, ordinary ones first."""
        pieces = [p for p, i in self.inner.get_vocab().items() if i not in self.special]
        return [*_PROBES, *map(str, pieces[:8])]


def _json(part: Any) -> Any:
    """A part of a fast tokenizer as its file has it; None where it has none, or one in Python."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception:  # tokenizers raises nothing narrower
        return None


def _kinds(part: Any) -> set[str]:
    """The types of a part of a tokenizers file, and of all that it is made of."""
    if isinstance(part, list):
        return set().union(*map(_kinds, part)) if part else set()
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))} | set().union(*map(_kinds, part.values()))
