"""Effective rank of what attention adds to the residual stream: the spectrum of (A·V)·W_O.

Nothing of tokens × d_model is formed for a head. With Z (tokens × d_v) what W_O is given, and W a
head's part of W_O, the spectrum of Z·Wᵀ is that of R·ZᵀZ·Rᵀ, R the QR factor of W: a d_v × d_v
matrix that streams. ZᵀZ is kept in float64 as mean and scatter, so that taking out the mean row
loses nothing where a sink makes the rows nearly equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall, Projection, Site
from attnprobe.engine.stats import AttentionStats
from attnprobe.metrics.base import Metric, Row, Tables, float64, mean, model_means, site_key
from attnprobe.metrics.scatter import Scatter, Scratch, add_lower

FIGURES = (
    "erank",
    "erank_centered",
    "stable_rank",
    "participation",
    "num_rank",
    "mean_share",
    "rank_bound",
    "utilisation",
)
FLAT = 1e-12  # 1 - mean_share below this leaves no rows to speak of once the mean is gone
EPS = torch.finfo(torch.float32).eps
NO_SPREAD = "all rows are equal: nothing is left of them without their mean"
ALL_ZERO = "what is added to the residual stream is zero"
AFTER_OUTPUT = "a gate after W_O (G5) mixes the heads: only the layer's figure exists"
NO_NUMBERS = "W_O holds NaN or infinity"
LEFT_OUT = "ranks of layers were left out (--no-layer-rank)"


@dataclass
class _Site:
    heads: int
    width: int  # d_v
    rows: Scatter = field(default_factory=Scatter)  # of Z, heads side by side; of M itself at G5
    projection: Projection | None = None
    gated_output: bool = False
    reason: str | None = None


class Rank(Metric):
    """Ranks of M_h = (A·V)_h·W_Oʰ per head and of M = sum_h M_h per layer.

    All valid query tokens of all samples are stacked, the bias is left out, and a gate at G1–G4 is
    part of M (`pre_gate` leaves one at G1 out). With σ the singular values and p = σ / sum σ:

    - `erank` = exp(-sum p ln p) (Roy & Vetterli 2007); `stable_rank` = sum σ² / σ1²;
      `participation` = (sum σ²)² / sum σ⁴;
    - `num_rank` = how many σ > σ1 · min(tokens, d_model) · eps(float32);
    - `mean_share` = the share of ‖M‖_F² in the mean row; `erank_centered` = erank of M less it;
    - `rank_bound` = min(tokens, d_v) a head, min(tokens, H·d_v, d_model) a layer; `utilisation` =
      erank / rank_bound.
    """

    name = "rank"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sites: dict[Site, _Site] = {}
        self._scratch = Scratch()

    def attention(self, call: AttentionCall, stats: AttentionStats | None) -> None:
        width = call.value.shape[-1]
        site = self._sites.setdefault(call.site, _Site(call.heads, width))
        if call.projection is None or call.consumed is None:
            site.reason = call.reasons.get("projection", "W_O is not known")
        elif call.projection is not site.projection and not call.projection.is_finite:
            site.reason = NO_NUMBERS
        if site.reason or call.projection is None or call.consumed is None:
            return  # ranks of some of the tokens would pass for those of all
        site.projection = call.projection
        before = self.options.pre_gate
        given = call.output.transpose(1, 2) if before else call.consumed  # (B, T, H, d_v)
        tokens = query_tokens(call, stats)
        rows = given.flatten(0, 1) if bool(tokens.all()) else given[tokens]  # (N, H, d_v)
        site.gated_output = call.gate is not None and call.gate.position == "G5" and not before
        if not self.options.layer_rank and site.rows.count == 0:
            site.rows = Scatter(1 if site.gated_output else site.heads)
        if site.gated_output:
            site.rows.add(_gated_output(call, rows, tokens), self._scratch)
        else:
            site.rows.add(rows.flatten(1), self._scratch)

    def forget(self, site: Site) -> None:
        self._sites.pop(site, None)

    def merge(self, other: Rank) -> None:
        for key, theirs in other._sites.items():
            ours = self._sites.setdefault(key, replace(theirs, rows=Scatter(theirs.rows.groups)))
            ours.reason = ours.reason or theirs.reason
            ours.rows.merge(theirs.rows)

    def tables(self) -> Tables:
        tables = Tables()
        for key, site in self._sites.items():
            if site.reason or site.rows.count == 0:
                tables.missing("rank", site.reason or "no valid token", key)
                tables.add("heads", [_empty(key, h) for h in range(site.heads)])
                tables.add("layers", [_empty(key)])
            elif site.gated_output:
                tables.missing("rank of heads", AFTER_OUTPUT, key)
                tables.add("heads", [_empty(key, h) for h in range(site.heads)])
            elif site.rows.groups > 1:
                tables.missing("rank of layers", LEFT_OUT, key)
        measured = [
            (key, site) for key, site in self._sites.items() if not site.reason and site.rows.count
        ]
        for part in _in_parallel(_site_tables, measured):
            for name, rows in part.rows.items():
                tables.add(name, rows)
        tables.add("model", model_means(tables.rows.get("layers", []), (*FIGURES, "erank_head")))
        return tables


def _in_parallel(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Maps over items on as many threads as torch has, one thread each.

    LAPACK's eigenvalues gain little from threads and stall badly where cores are contended.
    """
    threads = torch.get_num_threads()

    def alone(item: Any) -> Any:
        torch.set_num_threads(1)
        return function(item)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)


def _site_tables(item: tuple[Site, _Site]) -> Tables:
    key, site = item
    tables = Tables()
    heads, spectra = _head_rows(key, site)
    layer, spectrum = _layer_row(key, site)
    layer["erank_head"] = mean(row["erank"] for row in heads)
    measured = heads if site.rows.groups > 1 else [layer, *heads]
    if any(row["erank"] is None for row in measured):
        tables.missing("rank", ALL_ZERO, key)
    elif any(row["erank_centered"] is None for row in measured):
        tables.missing("erank_centered", NO_SPREAD, key)
    tables.add("heads", heads)
    tables.add("layers", [layer])
    tables.add("spectra", [*spectrum, *spectra])
    return tables


def query_tokens(call: AttentionCall, stats: AttentionStats | None) -> Tensor:
    """(B, Tq) the valid query tokens: real ones that see a key in any head."""
    if stats is not None:
        return stats.valid.any(1)
    return call.queries.valid & call.mask.sees_any()


def _gated_output(call: AttentionCall, rows: Tensor, tokens: Tensor) -> Tensor:
    """(N, d_model) what the module adds behind a gate at G5, W_O's bias left out."""
    assert call.gate is not None
    assert call.projection is not None
    output = rows.flatten(1).double() @ call.projection.weight.double().mT
    batch, _, length, _ = call.query.shape
    values = call.gate.values.double().expand(batch, length, -1)[tokens]
    return output + values if call.gate.mode == "additive" else output * values


def _head_rows(key: Site, site: _Site) -> tuple[list[Row], list[Row]]:
    assert site.projection is not None
    if site.gated_output:
        return [], []
    factors = site.projection.factors.cpu()  # (H, r, d_v)
    means, scatters = site.rows.by_group(site.heads)
    d_model = site.projection.weight.shape[0]
    count = site.rows.count
    figures, spectra = _figures(count, means, scatters, factors, bound=site.width, d_model=d_model)
    rows = [{**site_key(key, h), **row} for h, row in enumerate(figures)]
    return rows, [row for h, sigma in enumerate(spectra) for row in _spectrum(key, h, sigma)]


def _layer_row(key: Site, site: _Site) -> tuple[Row, list[Row]]:
    assert site.projection is not None
    if site.rows.groups > 1:
        return _empty(key), []
    weight = float64(site.projection.weight).cpu()  # (d_model, H·d_v)
    d_model, joined = weight.shape
    if site.gated_output:  # the rows are already M itself
        factor = torch.eye(d_model, dtype=torch.double)
    else:
        factor = torch.linalg.qr(weight, mode="r").R if d_model > joined else weight
    (row,), (sigma,) = _figures(
        site.rows.count,
        *site.rows.by_group(1),
        factor[None],
        bound=min(joined, d_model),
        d_model=d_model,
    )
    return {**site_key(key), **row}, _spectrum(key, None, sigma)


def _figures(
    count: int, means: Tensor, scatters: Tensor, factors: Tensor, bound: int, d_model: int
) -> tuple[list[Row], Tensor]:
    """Rank figures of n matrices Z·factorᵀ, and their (n, bound) singular values, largest first.

    Args:
        count: rows of Z, the tokens.
        means: (n, w) mean row of every Z.  scatters: (n, w, w) its scatter about the mean.
        factors: (n, r, w).
        bound: the largest rank that can be.
        d_model: width of the matrix that the factor stands for.
    """
    bound = min(bound, count)
    mean_row = (factors @ means[..., :, None]).reshape(len(factors), -1)  # (n, r)
    of_mean = count * mean_row.square().sum(-1)  # (n,)
    gram = torch.zeros(len(factors), *2 * factors.shape[1:2], dtype=torch.double)  # (n, r, r)
    for own, product, factor in zip(gram, factors @ scatters, factors, strict=True):
        add_lower(own, product, factor.mT)
    around = _singular(gram, min(bound, max(count - 1, 1)))  # of rows less their mean
    gram.baddbmm_(mean_row[:, :, None], mean_row[:, None, :], alpha=count)
    sigma = _singular(gram, bound)
    rows = []
    for s, c, mean_square in zip(sigma, around, of_mean.tolist(), strict=True):
        total = float(s.square().sum())
        share = min(1.0, mean_square / total) if total > 0 else None
        flat = share is None or float(c.square().sum()) / total < FLAT
        erank = effective_rank(s)
        rows.append(
            {
                "erank": erank,
                "erank_centered": None if flat else effective_rank(c),
                "stable_rank": float(s.square().sum() / s[0] ** 2) if total > 0 else None,
                "participation": (
                    float(s.square().sum() ** 2 / s.pow(4).sum()) if total > 0 else None
                ),
                "num_rank": int((s > s[0] * min(count, d_model) * EPS).sum()),
                "mean_share": share,
                "rank_bound": bound,
                "utilisation": None if erank is None else erank / bound,
            }
        )
    return rows, sigma


def _singular(gram: Tensor, bound: int) -> Tensor:
    """(n, bound) singular values of matrices with these Gram matrices, the largest first.

    Of the Gram matrices the lower half is read. Only `bound` values can differ from 0; the others
    are rounding and are left out.
    """
    return torch.linalg.eigvalsh(gram).flip(-1)[:, :bound].clamp_min(0).sqrt()


def effective_rank(sigma: Tensor) -> float | None:
    """exp(-sum p ln p), p = σ / sum σ; None for a zero matrix. Between 1 and the rank."""
    total = sigma.sum()
    if not total > 0:
        return None
    p = sigma / total
    return float(torch.special.entr(p).sum().exp())


def _spectrum(key: Site, head: int | None, sigma: Tensor) -> list[Row]:
    return [
        {**site_key(key, head), "index": i, "sigma": value}
        for i, value in enumerate(sigma.tolist())
    ]


def _empty(key: Site, head: int | None = None) -> Row:
    return {**site_key(key, head), **dict.fromkeys((*FIGURES, "erank_head"))}
