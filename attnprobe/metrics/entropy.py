"""Attention entropy: how widely a query spreads its attention, with and without the sink."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall, Site
from attnprobe.engine.stats import AttentionStats
from attnprobe.metrics.base import Metric, Row, Tables, mean, model_means, numbers, site_key
from attnprobe.metrics.histogram import Histogram
from attnprobe.metrics.pooling import DocumentMeans

MEANS = ("entropy", "entropy_norm", "entropy_nosink")
QUANTILES = {"entropy_p05": 0.05, "entropy_p50": 0.5, "entropy_p95": 0.95}
BIN_WIDTH = 1 / 128  # nats
MAX_ENTROPY = 16  # nats, the entropy of nine million equal keys
COLLAPSED = 0.03
FEW_KEYS = "no query sees enough keys: one besides the first, or two of any"


@dataclass
class _Site:
    histogram: Histogram
    max_logit: Tensor  # (H,)
    means: DocumentMeans = field(default_factory=DocumentMeans)

    @classmethod
    def empty(cls, heads: int) -> _Site:
        edges = torch.arange(0, MAX_ENTROPY + BIN_WIDTH, BIN_WIDTH, dtype=torch.double)
        least = torch.full((heads,), -torch.inf, dtype=torch.double)
        return cls(Histogram(heads, edges), least)


class Entropy(Metric):
    """H[i] = -sum_j A[i, j] ln A[i, j] in nats, the row renormalised where a sink logit takes part.

    - `entropy` = mean H over valid queries; `entropy_norm` = mean of H[i] / ln n(i) over queries
      with n(i) >= 2, n(i) the keys that i sees;
    - `entropy_nosink` = the same mean with the first key left out of the row, over queries that
      see another key;
    - `entropy_p05/p50/p95`: quantiles over queries, to a bin of 1/128 nats;
    - `max_logit`: largest logit over visible pairs;
    - `collapsed`: entropy_norm < 0.03.
    """

    name = "entropy"
    uses_stats = uses_entropy = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sites: dict[Site, _Site] = {}

    def attention(self, call: AttentionCall, stats: AttentionStats | None) -> None:
        assert stats is not None
        site = self._sites.setdefault(call.site, _Site.empty(call.heads))
        documents = call.queries
        valid = stats.valid.expand_as(stats.entropy)
        several = stats.visible >= 2
        norm = stats.entropy / stats.visible.clamp_min(2).log()
        site.means.add("entropy", stats.entropy, stats.valid, documents)
        site.means.add("entropy_norm", norm, stats.valid & several, documents)
        site.means.add("entropy_nosink", stats.entropy_nosink, stats.sees_other, documents)
        by_head = (stats.entropy, valid)  # (B, H, Tq) to (H, B·Tq)
        site.histogram.add(*(x.transpose(0, 1).flatten(1) for x in by_head))
        largest = stats.max_logit.amax(0).double().cpu()
        site.max_logit = torch.maximum(site.max_logit, largest)

    def forget(self, site: Site) -> None:
        self._sites.pop(site, None)

    def merge(self, other: Entropy) -> None:
        for key, theirs in other._sites.items():
            ours = self._sites.setdefault(key, _Site.empty(len(theirs.max_logit)))
            ours.histogram.merge(theirs.histogram)
            ours.means.merge(theirs.means)
            ours.max_logit = torch.maximum(ours.max_logit, theirs.max_logit)

    def tables(self) -> Tables:
        tables = Tables()
        for key, site in self._sites.items():
            heads = self._heads(key, site)
            layer = {**site_key(key), **{c: mean(h[c] for h in heads) for c in MEANS}}
            pooled = site.histogram.counts.sum(0)
            for column, q in QUANTILES.items():
                layer[column] = numbers(site.histogram.quantile(q, pooled)[None])[0]
            layer["max_logit"] = max(
                (h["max_logit"] for h in heads if h["max_logit"] is not None), default=None
            )
            layer["collapsed"] = _total(h["collapsed"] for h in heads)
            tables.add("heads", heads)
            tables.add("layers", [layer])
            tables.add("samples", self._samples(key, site))
            for column in (*MEANS, "max_logit", "collapsed"):
                if any(h[column] is None for h in heads):
                    tables.missing(column, FEW_KEYS, key)
        layers = tables.rows.get("layers", [])
        model = model_means(layers, (*MEANS, *QUANTILES))
        for row in model:
            own = [layer for layer in layers if layer["kind"] == row["kind"]]
            row["max_logit"] = max(
                (r["max_logit"] for r in own if r["max_logit"] is not None), default=None
            )
            row["collapsed"] = _total(r["collapsed"] for r in own)
        tables.add("model", model)
        return tables

    def _heads(self, key: Site, site: _Site) -> list[Row]:
        columns = {c: numbers(site.means.pooled(c)) for c in MEANS}
        columns |= {c: numbers(site.histogram.quantile(q)) for c, q in QUANTILES.items()}
        largest = site.max_logit.masked_fill(site.max_logit.isinf(), torch.nan)
        columns["max_logit"] = numbers(largest)
        columns["collapsed"] = [
            None if norm is None else norm < COLLAPSED for norm in columns["entropy_norm"]
        ]
        return [
            {**site_key(key, h), **{c: values[h] for c, values in columns.items()}}
            for h in range(len(largest))
        ]

    def _samples(self, key: Site, site: _Site) -> list[Row]:
        columns = {c: site.means.by_document(c).tolist() for c in MEANS}
        documents = len(columns["entropy"])
        return [
            {**site_key(key, h), "sample": d, **{c: columns[c][d][h] for c in MEANS}}
            for d in range(documents)
            for h in range(len(site.max_logit))
        ]


def _total(counts: Iterable[float | None]) -> float | None:
    """The sum of what is known, None where nothing is."""
    known = [c for c in counts if c is not None]
    return sum(known) if known else None
