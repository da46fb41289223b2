"""Means over queries, kept per document and pooled by counting queries.

Pooling sums rather than means makes every figure independent of how documents were batched, and
merging is appending.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.capture.documents import Documents
from attnprobe.metrics.base import float64


class DocumentMeans:
    """Named sums over the queries of each document, (documents, heads) in float64 on the CPU."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[Tensor]] = {}

    def add(self, name: str, values: Tensor, where: Tensor, documents: Documents) -> None:
        """Adds a batch.

        Args:
            name: what the figure is called.
            values: (B, H, T) one figure a query, in any real or boolean type.
            where: (B, h, T), h = 1 or H, the queries that count.
            documents: those of the queries.
        """
        if values.device.type == "mps":  # which has no float64
            values, where, documents = values.cpu(), where.cpu(), documents.to("cpu")
        values, where = torch.broadcast_tensors(values, where)
        counted = torch.where(where, float64(values), 0.0)
        self._sums.setdefault(name, []).append(_by_document(counted, documents))
        self._counts.setdefault(name, []).append(_by_document(where.double(), documents))

    def put(self, name: str, values: Tensor) -> None:
        """Adds (D, H) figures of whole documents, NaN where there is none; each counts once."""
        known = ~values.isnan()
        self._sums.setdefault(name, []).append(values.nan_to_num(0).double().cpu())
        self._counts.setdefault(name, []).append(known.double().cpu())

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def by_document(self, name: str) -> Tensor:
        """(D, H) the mean in every document, NaN where no query counts."""
        return torch.cat(self._sums[name]) / torch.cat(self._counts[name])

    def counts(self, name: str) -> Tensor:
        """(D, H) how many queries counted."""
        return torch.cat(self._counts[name])

    def pooled(self, name: str) -> Tensor:
        """(H,) the mean over all queries of all documents, NaN where none counts."""
        return torch.cat(self._sums[name]).sum(0) / torch.cat(self._counts[name]).sum(0)

    def merge(self, other: DocumentMeans) -> None:
        """Appends the documents of another."""
        for name in other._sums:
            self._sums.setdefault(name, []).extend(other._sums[name])
            self._counts.setdefault(name, []).extend(other._counts[name])


def _by_document(values: Tensor, documents: Documents) -> Tensor:
    """(B, H, T) summed to (D, H)."""
    if documents.are_whole:
        return values.sum(-1).cpu()
    rows = documents.tokens_of(values.transpose(1, 2))  # (N, H)
    sums = rows.new_zeros(len(documents), rows.shape[1])
    return sums.index_add_(0, documents.tokens_of(documents.index), rows).cpu()
