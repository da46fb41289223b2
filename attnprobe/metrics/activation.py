"""Massive activations: the few huge numbers in the residual stream that live on sink tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import Site
from attnprobe.capture.documents import Documents
from attnprobe.metrics.base import Metric, Row, Tables, model_means, site_key

LARGE = 100.0
TIMES_MEDIAN = 1000.0
NOT_FINITE = "the block's output holds NaN or infinity"


@dataclass
class _Site:
    largest: float = 0.0
    documents: int = 0
    massive: list[Row] = field(default_factory=list)


class Activation(Metric):
    """`m_act` of a layer = max |h| over valid tokens of the block output; of the model, their mean.

    The block output is the residual stream before any final norm. A massive activation has
    |x| > 100 and |x| >= 1000 × median |h| of that layer over the document's valid tokens
    (Sun et al. 2024).
    """

    name = "activation"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sites: dict[Site, _Site] = {}

    def block(self, site: Site, hidden: Tensor, documents: Documents) -> None:
        state = self._sites.setdefault(site, _Site())
        valid = documents.valid
        if bool(valid.any()):
            low, high = hidden[valid].float().aminmax()
            either = torch.maximum(-low, high)
            largest = float(either.nan_to_num(nan=math.inf, posinf=math.inf))  # max() loses a NaN
            state.largest = max(state.largest, largest)
            if LARGE < largest < math.inf:
                state.massive += _massive(site, hidden, documents, state.documents)
        state.documents += len(documents)

    def merge(self, other: Activation) -> None:
        for key, theirs in other._sites.items():
            ours = self._sites.setdefault(key, _Site())
            ours.largest = max(ours.largest, theirs.largest)
            for row in theirs.massive:
                ours.massive.append({**row, "document": row["document"] + ours.documents})
            ours.documents += theirs.documents

    def tables(self) -> Tables:
        tables = Tables()
        layers = []
        for key, site in self._sites.items():
            known = site.largest < math.inf
            layers.append({**site_key(key), "m_act": site.largest if known else None})
            if not known:
                tables.missing("m_act", NOT_FINITE, key)
        tables.add("layers", layers)
        tables.add("model", model_means(layers, ("m_act",)))
        for site in self._sites.values():
            tables.add("massive", site.massive)
        return tables


def _massive(site: Site, hidden: Tensor, documents: Documents, before: int) -> list[Row]:
    """The massive activations of a batch, largest first in every document.

    Args:
        hidden: (B, T, d_model) block output.
        before: documents of earlier batches.
    """
    rows: list[Row] = []
    for d, (row, _) in enumerate(documents.names.tolist()):
        own = documents.index[row] == d
        values = hidden[row][own].float()  # (tokens, d_model)
        size = values.abs()
        median = _median(size)
        found = ((size > LARGE) & (size >= TIMES_MEDIAN * median)).nonzero().tolist()
        positions = documents.position[row][own].tolist()
        rows += sorted(
            (
                {
                    **site_key(site),
                    "document": before + d,
                    "position": positions[t],
                    "dimension": c,
                    "value": float(values[t, c]),
                    "ratio": float(size[t, c]) / median if median else None,
                }
                for t, c in found
            ),
            key=lambda r: -abs(r["value"]),
        )
    return rows


def _median(values: Tensor) -> float:
    """The mean of the two middle ones where their number is even; torch takes the lower."""
    flat, n = values.flatten(), values.numel()
    low, high = flat.kthvalue((n + 1) // 2).values, flat.kthvalue(n // 2 + 1).values
    return (float(low) + float(high)) / 2
