"""Plain text as tokens: bytes, or byte-pair encoding learned from a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnprobe.errors import CheckpointError, InputError
from attnprobe.tasks.spelling import bytes_text, spelled
from attnprobe.tasks.vocabulary import BOS_TEXT


class Bytes:
    """One token per byte of UTF-8, and a start token after them."""

    vocab_size = 257
    bos = 256
    prefix, suffix, special = (bos,), (), frozenset({bos})

    def state(self) -> dict[str, Any]:
        """Only the kind: bytes need nothing else."""
        return {"kind": "bytes"}

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode("utf-8"))

    def token(self, token_id: int) -> str:
        """The character of an ASCII byte, `<0xE2>` and the like for part of a longer one."""
        if token_id == self.bos:
            return BOS_TEXT
        return bytes_text(bytes([token_id]))


class BytePairs:
    """Byte-level byte-pair encoding (Sennrich et al. 2016), as GPT-2 has it."""

    bos = 0
    prefix, suffix, special = (bos,), (), frozenset({bos})

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # a literal "<s>" in a text is text
        self.vocab_size = tokenizer.get_vocab_size()

    @classmethod
    def learn(cls, text: str, vocab_size: int = 512) -> BytePairs:
        """Merges learned from `text`; 256 bytes and the start token are always in.

        Raises:
            InputError: for a vocabulary too small to hold the bytes.
        """
        if vocab_size < 257:
            raise InputError(f"a byte-pair vocabulary needs at least 257 tokens, not {vocab_size}")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        return cls(tokenizer)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> BytePairs:
        """The inverse of `state`; `CheckpointError` where it is not a tokenizer's JSON."""
        try:
            return cls(Tokenizer.from_str(state["tokenizer"]))
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(f"the checkpoint's tokenizer cannot be read: {error}") from None

    def state(self) -> dict[str, Any]:
        """The tokenizer as its own JSON."""
        return {"kind": "bpe", "tokenizer": self.tokenizer.to_str()}

    def encode(self, text: str) -> list[int]:
        """The ids of the text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def token(self, token_id: int) -> str:
        """The token's text; bytes that are no whole character come as `<0xE2>`."""
        if token_id == self.bos:
            return BOS_TEXT
        return spelled(self.tokenizer.id_to_token(token_id) or "", "bytes")
