"""Perplexity on the very input that is probed, so that a sink is seen beside what it costs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.documents import Documents
from attnprobe.logits import Logits
from attnprobe.metrics.base import Metric, Tables, numbers
from attnprobe.metrics.pooling import DocumentMeans

NOT_FINITE = "the model's logits hold NaN or infinity"


class Perplexity(Metric):
    """`ppl` = exp(mean NLL), the next token of the same document given those before it."""

    name = "perplexity"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._means = DocumentMeans()

    def logits(self, logits: Logits, tokens: Tensor, documents: Documents) -> None:
        nll, where = next_token_nll(logits, tokens, documents)
        self._means.add("nll", nll[:, None], where[:, None], documents)

    def merge(self, other: Perplexity) -> None:
        self._means.merge(other._means)

    def tables(self) -> Tables:
        tables = Tables()
        if "nll" not in self._means:
            return tables
        nll = float(self._means.pooled("nll"))
        if not math.isfinite(nll):
            empty = not float(self._means.counts("nll").sum())
            tables.missing("ppl", "no document has two tokens" if empty else NOT_FINITE)
            return tables
        tables.add("whole", [{"ppl": math.exp(nll) if nll < 700 else None, "nll": nll}])
        by_document = numbers(self._means.by_document("nll")[:, 0])
        tables.add("samples", [{"sample": d, "nll": value} for d, value in enumerate(by_document)])
        return tables


def next_token_nll(logits: Logits, tokens: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """(B, T) -ln p(next token), 0 where there is none, and (B, T) where there is one."""
    target = tokens.roll(-1, dims=1).long().flatten()
    where = documents.valid & (documents.index == documents.index.roll(-1, dims=1))
    where[:, -1] = False
    found = []
    for rows, part in logits.parts():
        own = part.to(torch.promote_types(part.dtype, torch.float32))
        found.append(F.cross_entropy(own, target[rows].to(own.device), reduction="none"))
    nll = torch.cat(found).to(tokens.device)
    return nll.view_as(tokens), where
