"""Whose tokens a call's queries and keys are: the sequences that the model was given, by stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.call import Site
from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask
from attnprobe.capture.raw import RawCall

MORE_KEYS = "it has more keys than tokens, and which of them stand for none cannot be told"
MERGED = "its queries see two sequences in one softmax, each of which has a first token of its own"
NO_TEXT = ("vision", "audio")  # stacks that read no tokens


class Streams:
    """The documents of every sequence of a pass.

    Args:
        by_stack: by stack; "" is the sequence that the model reads first.

    Attributes:
        reads_more: the model is given images or sound too, of which there may be as many positions
            as there are tokens.
    """

    def __init__(self, by_stack: Mapping[str, Documents]) -> None:
        self.by_stack = by_stack
        self.reads_more = False

    @property
    def lengths(self) -> set[int]:
        """T of every stream."""
        return {stream.ids.shape[1] for stream in self.by_stack.values()}

    def documents(self, site: Site, raw: RawCall) -> tuple[Documents, Documents]:
        """The documents on both sides; unpadded ones where the shape is not that of a stream."""
        batch, _, n_queries, _ = raw.query.shape
        n_keys = raw.key.shape[2]
        if raw.documents is not None:
            pieces = Documents(raw.documents)
            return pieces, pieces
        if raw.mask.causal and raw.mask.offset > 0 and n_keys != n_queries:
            return _cached(raw)
        queries = self._of(site.base, batch, n_queries, raw.query)
        may_be_other = self.reads_more and not site.causal and site.kind == "self"
        may_be_other |= site.stack.startswith(NO_TEXT)
        if may_be_other and n_keys == n_queries and _sees_padding(raw.mask, queries, queries):
            queries = Documents.whole(batch, n_queries, raw.query.device)  # as long by chance
        is_own = site.kind == "self" and n_keys == n_queries
        if is_own and "" not in self.by_stack and not self.has(queries):
            padding = raw.mask.unseen_keys()  # of sound, or of patches
            if padding is not None:
                own = Documents.from_mask(~padding.expand(batch, -1))
                return own, own
        if raw.mask.causal and n_keys > n_queries and not raw.learned_keys:
            if not self.has(queries):
                return _cached(raw)
            return queries, Documents(F.pad(queries.ids, (0, n_keys - n_queries), value=-1))
        if is_own:
            return queries, queries
        if raw.learned_keys and site.kind == "self":  # of no document
            return queries, Documents(F.pad(queries.ids, (0, raw.learned_keys), value=-1))
        keys = self._of("encoder", batch, n_keys, raw.query)
        may_be_other = self.reads_more and "encoder" not in self.by_stack
        if may_be_other and _sees_padding(raw.mask, queries, keys):
            keys = Documents.whole(batch, n_keys, raw.query.device)  # as long by chance
        return queries, keys

    def do_not_tell(self, site: Site, own: Documents) -> bool:
        """Whether a call of text is in no stream, though there are padding or packed documents."""
        if site.stack.startswith(NO_TEXT):
            return False
        if "" not in self.by_stack and site.stack.startswith("encoder"):
            return False  # what it reads is no text: nothing of it is padded
        return not self.has(own) and not self.are_whole

    def has(self, own: Documents) -> bool:
        """Whether documents are those of one of them."""
        return any(_are_same(stream, own) for stream in self.by_stack.values())

    def are_other_rows(self, raw: RawCall) -> bool:
        """Whether rows of one head are no samples of the text: heads of one sample, maybe.

        As many heads as there are tokens, over no text, are tokens whose heads see each other.
        """
        text, (rows, heads) = self.by_stack.get(""), raw.query.shape[:2]
        if text is None or raw.documents is not None or raw.problem:
            return False
        if heads > 1:
            own = {raw.query.shape[2], raw.key.shape[2]}
            return heads == text.ids.shape[1] == raw.key.shape[1] and not own & self.lengths
        return rows not in (1, len(text.ids)) and raw.query.shape[2] == text.ids.shape[1]

    def are_pieces(self, site: Site, raw: RawCall) -> bool:
        """Whether rows are windows of the text, whose first tokens are none of a document."""
        text, (rows, _, length) = self.by_stack.get(""), raw.query.shape[:3]
        if text is None or raw.documents is not None or self.reads_more:
            return False
        is_text = not site.stack.startswith(NO_TEXT)
        return is_text and rows not in (1, len(text.ids)) and length not in self.lengths

    def beside_others(self, raw: RawCall) -> RawCall:
        """A call whose queries see their own tokens and more: the further keys are of no document.

        Where they stand in front they may be of a cache, or of a prompt, and where they are as many
        as the tokens of a sequence they may be that: neither is guessed.
        """
        mask, length = raw.mask, raw.mask.n_queries
        more = mask.n_keys - length
        if raw.learned_keys or mask.causal or more <= 0 or length not in self.lengths:
            return raw
        start = mask.own_keys()
        if start is None:
            return raw
        problem = raw.problem or (MORE_KEYS if start else None)
        problem = MERGED if more in self.lengths else problem
        return replace(raw, learned_keys=more, problem=problem)

    @property
    def are_whole(self) -> bool:
        """Whether nothing is padded or packed in any."""
        return all(stream.are_whole for stream in self.by_stack.values())

    def without_padding(self, input: Tensor, raw: RawCall) -> Tensor:
        """What a linear map is given, as (N, d) where the call was of packed tokens without it."""
        if raw.documents is None or input.dim() != 3:
            return input
        for stream in self.by_stack.values():
            valid = stream.valid.to(input.device)
            if input.shape[:2] == valid.shape and int(valid.sum()) == raw.documents.numel():
                return input[valid]
        return input

    def _of(self, stack: str, batch: int, length: int, like: Tensor) -> Documents:
        for name in (stack, ""):
            stream = self.by_stack.get(name)
            if stream is not None and stream.ids.shape == (batch, length):
                return stream.to(like.device)
        return Documents.whole(batch, length, like.device)


def _are_same(stream: Documents, own: Documents) -> bool:
    """Whether documents are those of a stream, be it without its padding and in one row."""
    if stream.ids.shape == own.ids.shape:
        return True
    return stream.lengths.tolist() == own.lengths.tolist()


def _sees_padding(mask: Mask, queries: Documents, keys: Documents) -> bool:
    """Whether the padding of a stream is none to an attention: what it reads is no such stream."""
    if bool(keys.valid.all()):
        return False
    every, padding = slice(None), ~keys.valid[:, None, None]  # (B, 1, 1, Tk)
    for rows in mask.row_blocks():
        real = queries.valid[:, None, rows, None]
        visible = mask.visible(rows, slice(0, mask.n_keys), every, every)
        seen = real & padding if visible is None else visible & real & padding
        if bool(seen.any()):
            return True
    return False


def _cached(raw: RawCall) -> tuple[Documents, Documents]:
    """The documents of queries whose earlier keys come from a cache, and of all keys."""
    batch, _, n_queries, _ = raw.query.shape
    mask = raw.mask
    real = mask.key_padding
    if real is None:
        real = torch.ones(batch, mask.n_keys, dtype=torch.bool, device=raw.query.device)
    filled = torch.arange(mask.n_keys, device=real.device) < mask.offset + n_queries
    keys = Documents.from_mask(real & filled)
    return Documents(keys.ids[:, mask.offset : mask.offset + n_queries]), keys
