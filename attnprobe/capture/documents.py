"""Which document every token of a batch belongs to, and where it stands in it.

A document is a sample without its padding, or one of several packed into a sample. Positions and
the first key count from the document's first token: no figure depends on the side of the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LEADING = 4  # StreamingLLM keeps the first four keys; `first4` is the mass on them


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch of B rows and T tokens.

    Attributes:
        ids: (B, T) integer, the same within a document of a row, -1 at padding.
    """

    ids: Tensor

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device | str = "cpu") -> Documents:
        """One unpadded document a row."""
        return cls(torch.zeros(batch, length, dtype=torch.long, device=device))

    @classmethod
    def from_mask(cls, attention_mask: Tensor, document_ids: Tensor | None = None) -> Documents:
        """From a (B, T) mask, non-zero at real tokens, and optional (B, T) ids of packed ones."""
        ids = torch.zeros_like(attention_mask, dtype=torch.long)
        if document_ids is not None:
            ids = document_ids.to(device=ids.device, dtype=torch.long)
        return cls(ids.masked_fill(attention_mask == 0, -1))

    @property
    def valid(self) -> Tensor:
        """(B, T) True at real tokens."""
        return self.ids >= 0

    @cached_property
    def are_whole(self) -> bool:
        """Whether every row is one document without padding."""
        return bool((self.ids == self.ids[:, :1]).all()) and bool(self.valid[:, 0].all())

    @cached_property
    def has_pairs(self) -> bool:
        """Whether some document has two tokens, so that one could see the other."""
        return bool((self.lengths > 1).any())

    def tokens_of(self, values: Tensor) -> Tensor:
        """(B, T, …) figures of all tokens as (N, …) of the real ones; no copy without padding."""
        return values.flatten(0, 1) if bool(self.valid.all()) else values[self.valid]

    @cached_property
    def _numbered(self) -> tuple[Tensor, Tensor]:
        """(B, T) number of each token's document in the batch, -1 at padding; (D, 2) row and id."""
        rows = torch.arange(self.ids.shape[0], device=self.ids.device)[:, None].expand_as(self.ids)
        pairs = torch.stack([rows[self.valid], self.ids[self.valid]], dim=-1)  # (N, 2)
        names, inverse = torch.unique(pairs, dim=0, return_inverse=True)  # sorted: row by row
        index = torch.full_like(self.ids, -1)
        index[self.valid] = inverse
        return index, names

    @property
    def index(self) -> Tensor:
        """(B, T) number of the token's document within the batch, -1 at padding."""
        return self._numbered[0]

    @property
    def names(self) -> Tensor:
        """(D, 2) batch row and id of every document."""
        return self._numbered[1]

    def __len__(self) -> int:
        return self.names.shape[0]

    @cached_property
    def lengths(self) -> Tensor:
        """(D,) tokens in every document."""
        return torch.bincount(self.index[self.valid], minlength=len(self))

    @cached_property
    def position(self) -> Tensor:
        """(B, T) tokens since the document's first, -1 at padding."""
        index = self.index[self.valid]
        order = torch.argsort(index, stable=True)
        starts = self.lengths.cumsum(0) - self.lengths
        ranks = torch.empty_like(index)
        ranks[order] = torch.arange(len(index), device=index.device) - starts[index[order]]
        position = torch.full_like(self.ids, -1)
        position[self.valid] = ranks
        return position

    @cached_property
    def leading(self) -> Tensor:
        """(D, 4) where along T a document's first four tokens stand, -1 where it is shorter."""
        table = torch.full((len(self), LEADING), -1, dtype=torch.long, device=self.ids.device)
        row, column = torch.nonzero(self.valid & (self.position < LEADING), as_tuple=True)
        table[self.index[row, column], self.position[row, column]] = column
        return table

    def leading_for(self, queries: Documents) -> Tensor:
        """(B, Tq, 4) where each query's own document begins among these keys, -1 where nowhere.

        Queries and keys of one document carry the same id in the same row, also in cross
        attention, where they are different tokens.
        """
        nowhere = self.leading.new_full((1, LEADING), -1)
        table = torch.cat([self.leading, nowhere])
        if queries is not self:
            ours = {tuple(name): d for d, name in enumerate(self.names.tolist())}
            match = [ours.get(tuple(name), -1) for name in queries.names.tolist()]
            table = torch.cat([table[match], nowhere])
        return table[queries.index]  # (B, Tq, 4); -1 at padding picks the last row, `nowhere`

    def to(self, device: torch.device | str) -> Documents:
        """The same documents on another device."""
        return self if self.ids.device == torch.device(device) else Documents(self.ids.to(device))
