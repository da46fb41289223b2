"""Attention sinks: how much attention the first key gets, against what length alone gives it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall, Site
from attnprobe.capture.documents import Documents
from attnprobe.engine.stats import AttentionStats
from attnprobe.metrics.base import (
    Metric,
    Row,
    Tables,
    float64,
    mean,
    model_means,
    numbers,
    site_key,
)
from attnprobe.metrics.pooling import DocumentMeans

NO_MEDIAN = "the median of ‖v[t]·W_Oʰ‖ is zero in a head, or no number"
MIN_QUERIES = 16  # the last keys of a local head pass any threshold
MEANS = ("f_attr", "f_attr_uniform", "alpha_first", "first4", "null_mass", "value_drain")
SINGLE_POSITIONS = 16  # up to here a bin of `positions` holds one position, then a quarter octave


@dataclass
class _Site:
    means: DocumentMeans = field(default_factory=DocumentMeans)
    heads: int = 0
    documents: int = 0
    entries: list[Tensor] = field(default_factory=list)  # (N, 4) document, head, position, alpha
    bins: Tensor | None = None  # (2, H, bins) sum of alpha and keys by position
    drain_reason: str | None = None


class Sink(Metric):
    """F-Attr and where the sinks are.

    With A[i, j] the attention of query i on key j, n(i) the keys that i sees, and means taken over
    valid queries, the first one included:

    - `f_attr` = mean A[i, first], a share of attention in 0..1 (F-Attn of the gated-attention
      paper); `f_attr_uniform` the same under A[i, j] = 1 / n(i), the floor of length and mask;
    - `alpha[k]` = mean of A[i, k] over the queries that see k (Gu et al., ICLR 2025);
      `alpha_first` is that of the first key, equal to `f_attr` where every query sees it;
    - `sink_rate` = share of (document, layer, head) with alpha[first] > epsilon, documents whose
      floor is above epsilon / 2 left out;
    - `first4` = mean mass on the first four keys (StreamingLLM); `null_mass` = mean of
      1 - sum_j A[i, j];
    - `value_drain` = ‖v[first]·W_Oʰ‖ over the median over the document's tokens of ‖v[t]·W_Oʰ‖;
    - `sinks`: every position with alpha > epsilon and at least 16 queries that see it.
    """

    name = "sink"
    uses_stats = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sites: dict[Site, _Site] = {}

    def attention(self, call: AttentionCall, stats: AttentionStats | None) -> None:
        assert stats is not None
        site = self._sites.setdefault(call.site, _Site(heads=call.heads))
        documents, means = call.queries, site.means
        means.add("f_attr", stats.first, stats.valid, documents)
        uniform = stats.sees_first / stats.visible.clamp_min(1)
        uniform = uniform.expand_as(stats.first)
        means.add("f_attr_uniform", uniform, stats.valid, documents)
        means.add("alpha_first", stats.first, stats.sees_first, documents)
        means.add("alpha_uniform", uniform, stats.sees_first, documents)
        means.add("first4", stats.first4, stats.valid, documents)
        means.add("null_mass", stats.null, stats.valid, documents)
        self._drain(site, call)
        self._positions(site, call, stats)
        site.documents += len(documents)

    def _drain(self, site: _Site, call: AttentionCall) -> None:
        if call.projection is None:
            site.drain_reason = call.reasons.get("projection", "W_O is not known")
            nothing = torch.full((len(call.keys), call.heads), torch.nan)
            site.means.put("value_drain", nothing)  # a row a document, as for every other figure
            return
        norms = value_norms(call)  # (B, H, Tk)
        site.means.put("value_drain", drain(norms, call.keys))

    def _positions(self, site: _Site, call: AttentionCall, stats: AttentionStats) -> None:
        keys = call.keys
        seen = stats.seen.expand_as(stats.mass)
        alpha = float64(stats.mass) / seen  # (B, H, Tk), NaN where nobody sees the key
        real = keys.valid[:, None] & (seen > 0)
        strong = (real & (alpha > self.options.epsilon) & (seen >= MIN_QUERIES)).nonzero()
        row, head, column = strong.unbind(-1)
        found = [keys.index[row, column] + site.documents, head, keys.position[row, column]]
        site.entries.append(
            torch.stack([*(f.double() for f in found), alpha[row, head, column].double()], -1).cpu()
        )
        bins = position_bins(keys.position.clamp_min(0)).flatten()  # (B·Tk,)
        parts = torch.stack([torch.where(real, alpha, 0.0), real.double()])  # (2, B, H, Tk)
        sums = parts.new_zeros(2, site.heads, int(bins.max()) + 1)
        sums.index_add_(2, bins, parts.transpose(1, 2).flatten(2))
        site.bins = _added(site.bins, sums.cpu())

    def forget(self, site: Site) -> None:
        self._sites.pop(site, None)

    def merge(self, other: Sink) -> None:
        for key, theirs in other._sites.items():
            ours = self._sites.setdefault(key, _Site(heads=theirs.heads))
            ours.means.merge(theirs.means)
            shift = torch.tensor([ours.documents, 0, 0, 0], dtype=torch.double)
            ours.entries += [entries + shift for entries in theirs.entries]
            ours.documents += theirs.documents
            if theirs.bins is not None:
                ours.bins = _added(ours.bins, theirs.bins)
            ours.drain_reason = ours.drain_reason or theirs.drain_reason

    def tables(self) -> Tables:
        tables = Tables()
        sinking: dict[str, list[Tensor]] = defaultdict(list)  # by kind
        for key, site in self._sites.items():
            heads, rates = self._heads(key, site)
            sinking[key.kind].append(rates.flatten())
            layer = {**site_key(key), **{c: mean(h[c] for h in heads) for c in MEANS}}
            layer["sink_rate"] = _rate(rates)
            tables.add("heads", heads)
            tables.add("layers", [layer])
            tables.add("samples", self._samples(key, site))
            tables.add("positions", _position_rows(key, site))
            tables.add("sinks", _sink_rows(key, site))
            if site.drain_reason or any(head["value_drain"] is None for head in heads):
                tables.missing("value_drain", site.drain_reason or NO_MEDIAN, key)
            if layer["sink_rate"] is None:
                tables.missing("sink_rate", self._short(), key)
        model = model_means(tables.rows.get("layers", []), MEANS)
        for row in model:
            row["sink_rate"] = _rate(torch.cat(sinking[row["kind"]]))
        tables.add("model", model)
        return tables

    def _short(self) -> str:
        return (
            "documents or windows too short: the floor of length alone is above epsilon / 2 = "
            f"{self.options.epsilon / 2:g}"
        )

    def _heads(self, key: Site, site: _Site) -> tuple[list[Row], Tensor]:
        """The rows of the heads, and (D, H) 1 where a head sinks, NaN where it cannot be said."""
        alpha = site.means.by_document("alpha_first")
        floor = site.means.by_document("alpha_uniform")
        rates = (alpha > self.options.epsilon).double()
        rates = rates.masked_fill(alpha.isnan() | (floor > self.options.epsilon / 2), torch.nan)
        columns = {c: numbers(site.means.pooled(c)) for c in MEANS if c in site.means}
        rows = []
        for h in range(site.heads):
            row = {
                **site_key(key, h),
                **{c: columns[c][h] if c in columns else None for c in MEANS},
            }
            row["sink_rate"] = _rate(rates[:, h])
            rows.append(row)
        return rows, rates

    def _samples(self, key: Site, site: _Site) -> list[Row]:
        columns = {c: site.means.by_document(c).tolist() for c in MEANS if c in site.means}
        counts = site.means.counts("f_attr").tolist()
        return [
            {
                **site_key(key, h),
                "sample": d,
                "queries": int(counts[d][h]),
                **{c: columns[c][d][h] for c in columns},
            }
            for d in range(site.documents)
            for h in range(site.heads)
        ]


def value_norms(call: AttentionCall) -> Tensor:
    """(B, H, Tk) ‖v[t]·W_Oʰ‖, a grouped value through each head of its group."""
    assert call.projection is not None
    group = call.heads // call.value.shape[1]
    factors = call.projection.factors.to(torch.promote_types(call.value.dtype, torch.float32))
    norms = [
        (call.value[:, h // group].to(factors) @ factors[h].mT).norm(dim=-1)  # (B, Tk)
        for h in range(call.heads)
    ]
    return torch.stack(norms, 1)


def drain(norms: Tensor, keys: Documents) -> Tensor:
    """(D, H) the first token's norm over the median of its document's, from (B, H, Tk) norms."""
    rows = []
    for d, (row, _) in enumerate(keys.names.tolist()):
        own = norms[row][:, keys.index[row] == d].double().sort(-1).values  # (H, tokens)
        middle = (own[:, (own.shape[1] - 1) // 2] + own[:, own.shape[1] // 2]) / 2
        rows.append(norms[row, :, keys.leading[d, 0]].double() / middle)
    drained = torch.stack(rows).cpu()
    return drained.masked_fill(drained.isinf(), torch.nan)


def position_bins(position: Tensor) -> Tensor:
    """The bin of every position: one each up to 16, then four to an octave."""
    octaves = torch.log2(position.clamp_min(1).double() / SINGLE_POSITIONS)
    return torch.where(
        position < SINGLE_POSITIONS,
        position,
        SINGLE_POSITIONS + (octaves * 4 + 1e-9).floor().long(),
    )


def bin_range(number: int) -> tuple[int, int]:
    """The first and last position of a bin."""
    if number < SINGLE_POSITIONS:
        return number, number

    def start(quarter: int) -> int:
        return math.ceil(SINGLE_POSITIONS * 2 ** (quarter / 4) - 1e-9)

    quarter = number - SINGLE_POSITIONS
    return start(quarter), start(quarter + 1) - 1


def _added(sums: Tensor | None, more: Tensor) -> Tensor:
    """The sum of two (2, H, bins), the shorter one filled up with zeros."""
    if sums is None:
        return more
    if sums.shape[-1] < more.shape[-1]:
        sums, more = more, sums
    total = sums.clone()
    total[..., : more.shape[-1]] += more
    return total


def _position_rows(key: Site, site: _Site) -> list[Row]:
    assert site.bins is not None
    alpha, keys = site.bins.tolist()
    return [
        {
            **site_key(key, h),
            "position_lo": low,
            "position_hi": high,
            "alpha": alpha[h][number] / keys[h][number] if keys[h][number] else None,
            "keys": int(keys[h][number]),
        }
        for h in range(site.heads)
        for number in range(site.bins.shape[-1])
        for low, high in [bin_range(number)]
    ]


def _sink_rows(key: Site, site: _Site) -> list[Row]:
    """One row a sink of one head in one document; the scan knows the tokens and groups them."""
    return [
        {
            **site_key(key, int(head)),
            "document": int(document),
            "position": int(position),
            "alpha": alpha,
        }
        for document, head, position, alpha in torch.cat(site.entries).tolist()
    ]


def _rate(values: Tensor) -> float | None:
    return numbers(values.nanmean()[None])[0]
