"""The gate: its histogram, how sparse it is, and what skipping its closed heads would cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall, Gate, Site
from attnprobe.capture.documents import Documents
from attnprobe.engine.stats import AttentionStats
from attnprobe.metrics.base import (
    Metric,
    Row,
    Tables,
    float64,
    model_means,
    numbers,
    site_key,
)
from attnprobe.metrics.histogram import Histogram
from attnprobe.metrics.pooling import DocumentMeans

SHARES = {
    "below_0.1": (-torch.inf, 0.1),
    "from_0.1_to_0.3": (0.1, 0.3),
    "from_0.4_to_0.6": (0.4, 0.6),
    "from_0.7_to_0.9": (0.7, 0.9),
    "above_0.9": (0.9, torch.inf),
}
THRESHOLDS = {"1e-3": 1e-3, "1e-2": 1e-2, "1e-1": 1e-1}
BOUNDED = ("sigmoid", "half-sigmoid")
BINS, FINE = 50, 20  # bins that are shown over [0, 1], and how many finer ones each is kept in
NO_GATE = "no gate at this attention layer"
NOT_BY_HEAD = "the query heads have no gates of their own: the layer's figures hold for all"
NOT_G1 = "skipping is priced for a multiplicative gate at G1 only"


def edges(activation: str) -> Tensor:
    """Where the fine bins of an activation end: [0, 1] evenly, else symmetric-logarithmic."""
    if activation in BOUNDED:
        return torch.linspace(0, 1, BINS * FINE + 1, dtype=torch.double)
    size = 10 ** torch.linspace(-3, 3, 49, dtype=torch.double)  # eight to a decade
    return torch.cat([-size.flip(0), size.new_zeros(1), size])


@dataclass
class _Site:
    gate: Gate  # of the first call; only what it is, never its values
    heads: int  # rows that the gate has, 1 where heads share it
    query_heads: int
    histogram: Histogram
    means: DocumentMeans = field(default_factory=DocumentMeans)
    energy: Tensor | None = None  # (4, heads + 1) ‖M‖², and what each threshold would skip of it


class Gates(Metric):
    """g is the value that multiplies (or adds), after its activation, over valid tokens.

    Histogram (50 bins over [0, 1] for sigmoids, symmetric-log ones for unbounded gates), mean,
    population std, median (to a bin of 0.001), the shares of elements in five ranges, `gate_first`
    (mean on the first token of a document) against `gate_rest`, and `skippable_τ`: the share of
    (token, head) whose whole gate is below τ in size, with `skip_error_τ` = ‖M - M skipped‖_F /
    ‖M‖_F of the layer's (or head's) output.
    """

    name = "gate"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sites: dict[Site, _Site] = {}
        self._ungated: dict[Site, str] = {}

    def attention(self, call: AttentionCall, stats: AttentionStats | None) -> None:
        gate = call.gate
        if call.site in self._ungated:
            return  # figures of some batches would depend on how samples were batched
        if gate is None:
            reason = call.reasons.get("gate") or call.reasons.get("projection") or NO_GATE
            self._sites.pop(call.site, None)
            self._ungated[call.site] = reason
            return
        values, documents = gate_values(call, gate)  # (B, T, h, d)
        heads = values.shape[2]
        if call.site not in self._sites:
            histogram = Histogram(heads, edges(gate.activation))
            about = Gate(torch.empty(0), *_about(gate))
            self._sites[call.site] = _Site(about, heads, call.heads, histogram)
        site = self._sites[call.site]
        valid = documents.valid[:, None]  # (B, 1, T)
        self._add_means(site, values, valid, documents)
        by_head = values.permute(2, 0, 1, 3)  # (h, B, T, d)
        where = documents.valid[None, :, :, None].expand_as(by_head)
        site.histogram.add(by_head.flatten(1), where.flatten(1))
        largest = values.abs().amax(-1)  # (B, T, h)
        for name, threshold in THRESHOLDS.items():
            site.means.add(
                f"skippable_{name}", (largest < threshold).transpose(1, 2), valid, documents
            )
        if _priced(gate) and call.projection is not None:
            energy = _energy(call, largest)
            site.energy = energy if site.energy is None else site.energy + energy

    @staticmethod
    def _add_means(site: _Site, values: Tensor, valid: Tensor, documents: Documents) -> None:
        first = (documents.position == 0)[:, None]  # (B, 1, T)
        exact = float64(values)  # a gate that hardly moves has no float32 digits left in its spread
        mean = exact.mean(-1).transpose(1, 2)  # (B, h, T)
        site.means.add("mean", mean, valid, documents)
        site.means.add("square", exact.square().mean(-1).transpose(1, 2), valid, documents)
        site.means.add("gate_first", mean, valid & first, documents)
        site.means.add("gate_rest", mean, valid & ~first, documents)
        for name, (low, high) in SHARES.items():
            above = values > low if name.startswith("above") else values >= low
            inside = above & (values < high)
            site.means.add(name, inside.double().mean(-1).transpose(1, 2), valid, documents)

    def forget(self, site: Site) -> None:
        self._sites.pop(site, None)
        self._ungated.pop(site, None)

    def merge(self, other: Gates) -> None:
        self._ungated = other._ungated | self._ungated
        for key in self._ungated:
            self._sites.pop(key, None)
        for key, theirs in other._sites.items():
            if key in self._ungated:
                continue
            none = Histogram(theirs.heads, theirs.histogram.edges)
            fresh = replace(theirs, histogram=none, means=DocumentMeans(), energy=None)
            ours = self._sites.setdefault(key, fresh)
            ours.means.merge(theirs.means)
            ours.histogram.merge(theirs.histogram)
            if theirs.energy is not None:
                ours.energy = theirs.energy if ours.energy is None else ours.energy + theirs.energy

    def tables(self) -> Tables:
        tables = Tables()
        layers: list[Row] = []
        for key, site in self._sites.items():
            layer, heads = _gate_rows(key, site)
            tables.add("gates", [layer, *heads])
            layers.append({**site_key(key), **_columns(layer)})
            if site.heads == site.query_heads:
                tables.add(
                    "heads",
                    [
                        {**site_key(key, r["head"]), **_columns(r)}
                        for r in heads or [layer | {"head": 0}]
                    ],
                )
                tables.add("samples", _samples(key, site))
            else:
                tables.missing("gate of heads", NOT_BY_HEAD, key)
            if not _priced(site.gate):
                tables.missing("skip_error", NOT_G1, key)
        for key, reason in self._ungated.items():
            tables.missing("gate", reason, key)
            layers.append(
                {**site_key(key), **dict.fromkeys(("gate_mean", "gate_std", "gate_median"))}
            )
        tables.add("layers", layers)
        tables.add("model", model_means(layers, ("gate_mean", "gate_std", "gate_median")))
        return tables


def gate_values(call: AttentionCall, gate: Gate) -> tuple[Tensor, Documents]:
    """(B, T, h, d) the values over all tokens of their side, and that side's documents."""
    documents = call.keys if gate.position in ("G2", "G3") else call.queries
    batch, length = documents.ids.shape
    values = gate.values.float()
    if gate.position == "G5":  # (B, T, d_model): no heads behind W_O
        values = values[:, :, None] if values.dim() == 3 else values
    return values.expand(batch, length, *values.shape[2:]), documents


def _about(gate: Gate) -> tuple[str, str, str, str, str]:
    return gate.position, gate.granularity, gate.source, gate.activation, gate.mode


def _priced(gate: Gate) -> bool:
    return gate.position == "G1" and gate.mode == "multiplicative"


def _energy(call: AttentionCall, largest: Tensor) -> Tensor:
    """(4, H + 1) squared norms, of each head's M_h and last of the layer's M: all of it, then what
    each threshold skips.

    Args:
        largest: (B, T, h) the size of the largest gate value of a head.
    """
    assert call.projection is not None
    assert call.consumed is not None
    valid = call.queries.valid
    rows = call.consumed[valid].float()  # (N, H, d_v)
    size = largest[valid].expand(-1, rows.shape[1])  # (N, H)
    factors = call.projection.factors.to(rows)
    squares = torch.stack(
        [(rows[:, h] @ factors[h].mT).square().sum(-1) for h in range(rows.shape[1])], -1
    ).double()  # (N, H)
    weight = call.projection.weight.to(rows)

    def of_layer(part: Tensor) -> Tensor:
        return (part.flatten(1) @ weight.mT).square().sum(dtype=torch.double)

    parts = [torch.cat([squares.sum(0), of_layer(rows)[None]])]
    for threshold in THRESHOLDS.values():
        small = size < threshold
        skipped = of_layer(rows * small[..., None]) if bool(small.any()) else squares.new_zeros(())
        parts.append(torch.cat([(squares * small).sum(0), skipped[None]]))
    return torch.stack(parts).cpu()


def _gate_rows(key: Site, site: _Site) -> tuple[Row, list[Row]]:
    """The layer's row, and one a head where heads have gates of their own."""
    names = ("mean", "square", "gate_first", "gate_rest", *SHARES)
    names += tuple(f"skippable_{t}" for t in THRESHOLDS)
    pooled = {name: site.means.pooled(name) for name in names}  # (h,) each
    heads = [
        _row(key, h, site, {n: v[h] for n, v in pooled.items()}, site.histogram.counts[h])
        for h in range(site.heads if site.heads > 1 else 0)
    ]
    whole = {name: values.mean() for name, values in pooled.items()}
    return _row(key, None, site, whole, site.histogram.counts.sum(0)), heads


def _row(
    key: Site, head: int | None, site: _Site, pooled: dict[str, Tensor], counts: Tensor
) -> Row:
    values = {name: numbers(value[None])[0] for name, value in pooled.items()}
    center, square = values["mean"], values.pop("square")
    spread = None
    if center is not None and square is not None:
        spread = max(0.0, square - center**2) ** 0.5
    fine = site.histogram.edges
    bounded = site.gate.activation in BOUNDED
    row = {
        **site_key(key, head),
        "position": site.gate.position,
        "granularity": site.gate.granularity,
        "activation": site.gate.activation,
        "source": site.gate.source,
        "mode": site.gate.mode,
        **values,
        "std": spread,
        "median": numbers(site.histogram.quantile(0.5, counts)[None])[0],
        "histogram": (counts.view(BINS, FINE).sum(-1) if bounded else counts).tolist(),
        "edges": (fine[::FINE] if bounded else fine).tolist(),
    }
    for i, name in enumerate(THRESHOLDS, start=1):
        row[f"skip_error_{name}"] = _skip_error(site.energy, i, head)
    return row


def _skip_error(energy: Tensor | None, threshold: int, head: int | None) -> float | None:
    if energy is None:
        return None
    column = -1 if head is None else head
    whole, skipped = energy[0, column], energy[threshold, column]
    return float((skipped / whole).sqrt()) if whole > 0 else None


def _columns(row: Row) -> Row:
    return {"gate_mean": row["mean"], "gate_std": row["std"], "gate_median": row["median"]}


def _samples(key: Site, site: _Site) -> list[Row]:
    means = site.means.by_document("mean").tolist()
    return [
        {**site_key(key, h), "sample": d, "gate_mean": value}
        for d, row in enumerate(means)
        for h, value in enumerate(row)
    ]
