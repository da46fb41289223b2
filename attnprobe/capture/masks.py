"""Which keys a query sees, and what is added to its logits: a rule evaluated block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.documents import Documents

# An additive mask at or below this hides the key. User code writes -1e9 for -inf, which is less in
# half precision, or with a bias on top.
HIDDEN = -1e8


@dataclass(frozen=True, eq=False)
class Mask:
    """The mask of one attention call. All parts given must agree for a key to be visible.

    Attributes:
        n_queries, n_keys: Tq and Tk.
        causal: a query sees no key after its own position.
        offset: the key that stands at query 0's own position; 0 aligns the upper left corners,
            Tk - Tq the lower right ones.
        window: how many keys back a query sees, its own included.
        ahead: how many keys after its own a query sees; None is all of them.
        key_padding: (B, Tk) True at real keys.
        documents: (B, Tq) and (B, Tk) ids; a query sees keys of its own id only.
        dense: the mask that the model made itself, 4-D and broadcastable to (B, H, Tq, Tk); boolean
            (True is visible) or real-valued (added to the logits, very negative hides the key).
        rule: any other visibility, of runs of queries and keys; boolean, broadcastable to
            (B, H, Tq', Tk').
        rule_heads: H where the rule may differ by head.
        device: where blocks of the mask are made.
    """

    n_queries: int
    n_keys: int
    causal: bool = False
    offset: int = 0
    window: int | None = None
    ahead: int | None = None
    key_padding: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None
    rule: Callable[[slice, slice], Tensor] | None = None
    rule_heads: int = 1
    device: torch.device | str = "cpu"

    @property
    def heads(self) -> int:
        """H where heads may see different keys, else 1."""
        return max(self.rule_heads, 1 if self.dense is None else self.dense.shape[1])

    def span(self, rows: slice) -> slice:
        """The keys that any of these queries can see; all others need not be looked at."""
        low, high = 0, self.n_keys
        if self.causal:
            high = min(high, rows.stop + self.offset)
        if self.window is not None:
            low = max(low, rows.start + self.offset - self.window + 1)
        if self.ahead is not None:
            high = min(high, rows.stop + self.offset + self.ahead)
        return slice(min(low, self.n_keys), max(min(low, self.n_keys), high))

    def visible(self, rows: slice, keys: slice, batch: slice, heads: slice) -> Tensor | None:
        """(b, h, Tq', Tk') True where the key is seen, b and h possibly 1; None where all are."""
        parts = [
            part
            for part in (
                self._by_position(rows, keys),
                self._by_padding(keys, batch),
                self._by_document(rows, keys, batch),
                self._by_dense(rows, keys, batch, heads),
                self._by_rule(rows, keys, batch, heads),
            )
            if part is not None
        ]
        if not parts:
            return None
        visible = parts[0]
        for part in parts[1:]:
            visible = visible & part
        return visible.expand(*visible.shape[:2], rows.stop - rows.start, keys.stop - keys.start)

    def bias(self, rows: slice, keys: slice, batch: slice, heads: slice) -> Tensor | None:
        """(b, h, Tq', Tk') what is added to the logits, or None. Hidden keys hold any value."""
        if self.dense is None or self.dense.dtype == torch.bool:
            return None
        return _cut(self.dense, (batch, heads, rows, keys))

    def sees_any(self) -> Tensor:
        """(B | 1, Tq) whether a query sees a key at all, in any head."""
        if self.empty is not None:
            return ~self.empty
        return torch.ones(1, self.n_queries, dtype=torch.bool, device=self.device)

    @cached_property
    def empty(self) -> Tensor | None:
        """(B | 1, Tq) True where a query sees no key in any head, None where there is none."""
        if (self.documents, self.dense, self.rule) == (None,) * 3:
            seen = self._count_by_position() > 0
        else:
            every, parts = slice(None), []
            for rows in self.row_blocks():
                visible = self.visible(rows, slice(0, self.n_keys), every, every)
                assert visible is not None
                parts.append(visible.any(-1).any(1))
            seen = torch.cat(parts, dim=1)
        return None if bool(seen.all()) else ~seen

    def _count_by_position(self) -> Tensor:
        """(B | 1, Tq) how many keys each query sees, by position and padding alone."""
        query = torch.arange(self.n_queries, device=self.device) + self.offset
        low, high = torch.zeros_like(query), torch.full_like(query, self.n_keys)
        if self.causal:
            high = query + 1
        if self.ahead is not None:
            high = torch.minimum(high, query + self.ahead + 1)
        if self.window is not None:
            low = query - self.window + 1
        low, high = low.clamp(0, self.n_keys), high.clamp(0, self.n_keys)
        real = self.key_padding
        if real is None:
            return (high - low)[None]
        before = F.pad(real.long().cumsum(-1), (1, 0))  # (B, Tk + 1)
        return (before[:, high] - before[:, low]).masked_fill(high <= low, 0)

    def sees_future(self, learned_keys: int = 0) -> bool:
        """Whether any query sees a key after its own position, so that it is not a causal mask.

        Args:
            learned_keys: how many of the last keys stand at no position.
        """
        if self.causal:
            return False
        n_keys = self.n_keys - learned_keys
        for rows in self.row_blocks():
            visible = self.visible(rows, slice(0, n_keys), slice(None), slice(None))
            if visible is None:
                return n_keys > 1
            if bool(torch.triu(visible, diagonal=rows.start + self.offset + 1).any()):
                return True
        return False

    def row_blocks(self) -> Iterator[slice]:
        """Queries in runs whose mask is small."""
        step = max(1, (1 << 22) // max(1, self.n_keys * self.heads))
        for start in range(0, self.n_queries, step):
            yield slice(start, min(start + step, self.n_queries))

    def _by_position(self, rows: slice, keys: slice) -> Tensor | None:
        if not self.causal and self.window is None and self.ahead is None:
            return None
        query = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=self.device)[None, :]
        back = query + self.offset - key  # (Tq', Tk') how far before the query the key stands
        visible = torch.ones_like(back, dtype=torch.bool)
        if self.causal:
            visible &= back >= 0
        if self.window is not None:
            visible &= back < self.window
        if self.ahead is not None:
            visible &= back >= -self.ahead
        return visible[None, None]

    def _by_rule(self, rows: slice, keys: slice, batch: slice, heads: slice) -> Tensor | None:
        if self.rule is None:
            return None
        every = slice(None)
        return _cut(self.rule(rows, keys), (batch, heads, every, every))  # (b, h, Tq', Tk')

    def _by_padding(self, keys: slice, batch: slice) -> Tensor | None:
        if self.key_padding is None:
            return None
        return self.key_padding[batch, None, None, keys].bool()  # (b, 1, 1, Tk')

    def _by_document(self, rows: slice, keys: slice, batch: slice) -> Tensor | None:
        if self.documents is None:
            return None
        query, key = self.documents
        return (query[batch, rows, None] == key[batch, None, keys])[:, None]  # (b, 1, Tq', Tk')

    def _by_dense(self, rows: slice, keys: slice, batch: slice, heads: slice) -> Tensor | None:
        if self.dense is None:
            return None
        part = _cut(self.dense, (batch, heads, rows, keys))
        if part.dtype == torch.bool:
            return part
        return part > max(HIDDEN, torch.finfo(part.dtype).min / 2)


def as_rule(mask: Mask, keys: Documents) -> Mask:
    """A dense mask of self-attention as the rule it spells out, where it is a known one.

    Known are causal and full attention, within documents and without the padding; rows of padding
    may hold anything, for they are not measured. A mask that adds a real bias stays dense.

    Args:
        mask: with as many queries as keys.
        keys: the documents on both sides.
    """
    if mask.dense is None or mask.heads != 1 or mask.n_queries != mask.n_keys:
        return mask
    length = mask.n_keys
    padding = None if bool(keys.valid.all()) else keys.valid
    packed = None if len(keys) == keys.ids.shape[0] else (keys.ids, keys.ids)
    for causal in (True, False):
        for documents in {packed, None}:
            rule = Mask(
                length,
                length,
                causal=causal,
                key_padding=padding,
                documents=documents,
                device=mask.device,
            )
            if _agree(mask, rule, keys.valid):
                return rule
    return mask


def _agree(dense: Mask, rule: Mask, real: Tensor) -> bool:
    """Whether both let the real queries (B, T) see the same keys, and nothing is added there."""
    every = slice(None)
    for rows in dense.row_blocks():
        keys = slice(0, dense.n_keys)
        seen = dense.visible(rows, keys, every, every)
        bias = dense.bias(rows, keys, every, every)
        expected = rule.visible(rows, keys, every, every)
        assert seen is not None
        wrong = ~seen if expected is None else seen != expected
        if bias is not None:
            wrong = wrong | (seen & (bias != 0))
        if bool((wrong & real[:, None, rows, None]).any()):
            return False
    return True


def _cut(tensor: Tensor, slices: tuple[slice, ...]) -> Tensor:
    """Slices that leave a broadcast dimension of size 1 as it is."""
    sizes = zip(tensor.shape, slices, strict=True)
    return tensor[tuple(slice(None) if size == 1 else part for size, part in sizes)]
