"""Which keys a query sees, and what is added to its logits: a rule evaluated block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.documents import Documents

# An additive mask at or below this hides the key. User code writes -1e9 for -inf, which is less in
# half precision, or with a bias on top.
HIDDEN = -1e8
FEW = 64  # queries and keys at a time where only those at the same place matter


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
        adds_only: the dense part is only added; which keys are seen the other parts say.
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
    adds_only: bool = False
    rule: Callable[[slice, slice], Tensor] | None = None
    rule_heads: int = 1
    device: torch.device | str = "cpu"

    @property
    def heads(self) -> int:
        """H where heads may have different masks, else 1."""
        return max(self.rule_heads, 1 if self.dense is None else self.dense.shape[1])

    @property
    def is_by_pair(self) -> bool:
        """Whether only a look at every pair tells which keys are seen."""
        return self.rule is not None or (self.dense is not None and not self.adds_only)

    @property
    def is_ruled(self) -> bool:
        """Whether a part beside the dense one says which keys are seen."""
        parts = (self.window, self.ahead, self.key_padding, self.documents, self.rule)
        return self.causal or any(part is not None for part in parts)

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
        if self.documents is None and not self.is_by_pair:
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
        if learned_keys not in self._futures:
            self._futures[learned_keys] = self._sees_future(self.n_keys - learned_keys)
        return self._futures[learned_keys]

    @cached_property
    def _futures(self) -> dict[int, bool]:
        """What `sees_future` found, by the number of learned keys."""
        return {}

    def _sees_future(self, n_keys: int) -> bool:
        if self.causal:
            return False
        for rows in self.row_blocks():
            first = max(0, rows.start + self.offset + 1)  # the first key after the first query
            if first >= n_keys:
                return False
            visible = self.visible(rows, slice(first, n_keys), slice(None), slice(None))
            if visible is None:
                return True
            if bool(torch.triu(visible, diagonal=rows.start + self.offset + 1 - first).any()):
                return True
        return False

    def own_keys(self) -> int | None:
        """Where among more keys than queries the queries' own begin, None where they are others'.

        Queries that see themselves and nothing behind do so among the first keys, or the last. Two
        of them are asked.
        """
        length, every = self.n_queries, slice(None)
        for start in (0, self.n_keys - length) if length > 1 else ():
            are_own = torch.ones((), dtype=torch.bool, device=self.device)
            for row in (length // 2 - 1, length - 1):
                keys = slice(start + row, start + length)
                seen = self.visible(slice(row, row + 1), keys, every, every)  # (b, h, 1, n)
                if seen is None:
                    return None
                are_own = are_own & seen[..., 0, 0] & ~seen[..., 0, 1:].any(-1)
            if bool(are_own.any()):
                return start
        return None

    def unseen_keys(self) -> Tensor | None:
        """(B | 1, Tk) keys that no query sees, not even the one at the key's own place, or None.

        Of as many keys as queries, which stand at the same places.
        """
        every, keys = slice(None), slice(0, self.n_keys)
        if all(
            own is None or bool(own.diagonal(dim1=-2, dim2=-1).all())
            for own in (
                self.visible(part, part, every, every)
                for start in range(0, self.n_keys, FEW)
                for part in (slice(start, min(start + FEW, self.n_keys)),)
            )
        ):
            return None
        seen = None
        for rows in self.row_blocks():
            visible = self.visible(rows, keys, every, every)
            assert visible is not None
            own = visible.any(-2).any(1)  # (b, Tk)
            seen = own if seen is None else seen | own
        return None if seen is None or bool(seen.all()) else ~seen

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
        if self.dense is None or self.adds_only:
            return None
        part = _cut(self.dense, (batch, heads, rows, keys))
        if part.dtype == torch.bool:
            return part
        return part > max(HIDDEN, torch.finfo(part.dtype).min / 2)


def as_rule(mask: Mask, queries: Documents, keys: Documents | None = None) -> Mask:
    """A dense mask with its visibility as the rule that it spells out, where it is a known one.

    Known are causal and full attention, within documents and without the padding; rows of padding
    may hold anything, for they are not measured. What the mask adds to the logits stays.

    Args:
        mask: the mask.
        queries, keys: the documents on both sides, the same ones by default.
    """
    keys = queries if keys is None else keys
    if mask.dense is None or mask.adds_only:
        return mask
    spelled = (spelled_out(mask, rule, queries.valid) for rule in _candidates(mask, queries, keys))
    return next((rule for rule in spelled if rule is not None), mask)


def _candidates(mask: Mask, queries: Documents, keys: Documents) -> Iterator[Mask]:
    """The rules that a dense mask may spell out."""
    if mask.is_ruled:
        yield replace(mask, dense=None)
    packed = None
    if len(queries) > len(queries.ids) or len(keys) > len(keys.ids):
        packed = (queries.ids, keys.ids)
    for causal in (True, False) if mask.n_queries == mask.n_keys else (False,):
        for documents in {packed, None}:
            yield Mask(
                mask.n_queries,
                mask.n_keys,
                causal=causal,
                key_padding=None if bool(keys.valid.all()) else keys.valid,
                documents=documents,
                device=mask.device,
            )


def spelled_out(mask: Mask, rule: Mask, real: Tensor) -> Mask | None:
    """A mask with its visibility as the rule says it; None where it says another.

    Args:
        mask: with a dense part.
        rule: without.
        real: (B, Tq) the queries that must see the same keys under both.
    """
    every, keys = slice(None), slice(0, mask.n_keys)
    adds, lacks = False, False
    for rows in mask.row_blocks():
        seen, expected = (m.visible(rows, keys, every, every) for m in (mask, rule))
        assert seen is not None
        own = real[:, None, rows, None]
        expected = torch.ones_like(seen) if expected is None else expected
        differs = seen != expected
        if bool(differs.any()):
            if bool((differs & own).any()):
                return None
            lacks |= bool((differs & expected).any())
        bias = None if adds else mask.bias(rows, keys, every, every)
        adds |= bias is not None and bool((own & seen & (bias != 0)).any())
    if not adds:
        return rule
    # what is added where padding sees less than the rule lets it need not be a number
    return None if lacks else replace(rule, dense=mask.dense, adds_only=True)


def _cut(tensor: Tensor, slices: tuple[slice, ...]) -> Tensor:
    """Slices that leave a broadcast dimension of size 1 as it is."""
    sizes = zip(tensor.shape, slices, strict=True)
    return tensor[tuple(slice(None) if size == 1 else part for size, part in sizes)]
