"""Figures of a result under samples drawn again with replacement: what a bootstrap rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from attnprobe.result import Result

#: The figures that are kept by sample, and the queries of a document that do not count in each
#: where attention is causal: the first sees no choice of keys, the last predicts no token.
FIGURES = {"f_attr": 0, "sink_rate": 0, "entropy_norm": 1, "gate_mean": 0, "ppl": 1}
AGREES = 0.01  # what samples add up to, relative to the figure, where no head or layer is left out
_BLOCK = 1 << 21  # resampling weights held at a time


@dataclass(frozen=True)
class _Sums:
    """What a figure is pooled from: (S, L) numerators and denominators by sample and layer."""

    over: np.ndarray
    under: np.ndarray
    sites: list[str]


class Draws:
    """The figures of a result under every draw of its samples.

    Args:
        result: with `samples`.
    """

    def __init__(self, result: Result) -> None:
        numbers = result.samples["sample"]
        self.samples = int(numbers.max()) + 1 if len(numbers) else 0
        self.sums: dict[tuple[str, str], _Sums] = {}
        kinds = [str(kind) for kind in result.model["kind"]]
        for metric in FIGURES:
            for kind in kinds:
                sums = _sums(result, self.samples, metric, kind)
                if sums is not None:
                    self.sums[metric, kind] = sums
        self.drawn: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}  # (R, L) each

    @property
    def columns(self) -> np.ndarray:
        """(S, n) all that is summed over samples."""
        parts = [part for sums in self.sums.values() for part in (sums.over, sums.under)]
        return np.concatenate(parts, axis=1) if parts else np.empty((self.samples, 0))

    def take(self, summed: np.ndarray) -> None:
        """Hands over (R, n), the sums of `columns` over each draw."""
        at = 0
        for place, sums in self.sums.items():
            width = sums.over.shape[1]
            over, under = summed[:, at : at + width], summed[:, at + width : at + 2 * width]
            self.drawn[place], at = (over, under), at + 2 * width

    def figure(self, metric: str, kind: str, site: str, value: float) -> np.ndarray | None:
        """(R,) a figure of a layer, or where `site` is "" of the model, under every draw.

        With w the times that each document was drawn, a layer's figure is sum(w q x) / sum(w q), x
        its mean over heads in a document and q the document's queries; the model's is the mean over
        layers, `sink_rate` the share of all (document, layer, head), `ppl` = exp of the pooled NLL.

        Args:
            metric: of `FIGURES`; others are not kept by sample.
            kind: of attention.
            site: of the layer.
            value: the figure itself.

        Returns:
            None if the figure was not kept by sample, or not for every head or layer that is in it.
        """
        if (metric, kind) not in self.sums:
            return None
        sums = self.sums[metric, kind]
        if site and site not in sums.sites:
            return None
        whole = _pooled(metric, site, sums, sums.over.sum(0)[None], sums.under.sum(0)[None])
        if not math.isclose(float(whole[0]), value, rel_tol=AGREES, abs_tol=1e-9):
            return None
        return _pooled(metric, site, sums, *self.drawn[metric, kind])


def _pooled(metric: str, site: str, sums: _Sums, over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """(R,) a figure from (R, L) sums."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if site:
            layer = sums.sites.index(site)
            return over[:, layer] / under[:, layer]
        if metric == "ppl":
            return np.exp(over[:, 0] / under[:, 0])
        if metric == "sink_rate":
            return over.sum(1) / under.sum(1)
        return (over / under).mean(1)


def draw(draws: Sequence[Draws], paired: Sequence[bool], resamples: int, seed: int) -> None:
    """Draws samples again and again; results that are paired share every draw."""
    together = [own for own, is_paired in zip(draws, paired, strict=True) if is_paired]
    alone = [[own] for own, is_paired in zip(draws, paired, strict=True) if not is_paired]
    for stream, group in enumerate([together, *alone]):
        columns = np.concatenate([own.columns for own in group], axis=1)
        summed = _resampled(columns, resamples, [seed, stream])
        ends = np.cumsum([own.columns.shape[1] for own in group])
        for own, part in zip(group, np.split(summed, ends[:-1], axis=1), strict=True):
            own.take(part)


def _resampled(columns: np.ndarray, resamples: int, seed: Sequence[int]) -> np.ndarray:
    """(R, n) the sums of (S, n) columns over draws of S samples with replacement."""
    samples = len(columns)
    if samples == 0:
        return np.empty((resamples, columns.shape[1]))
    generator = np.random.default_rng(list(seed))
    size = max(1, _BLOCK // samples)
    sizes = [min(size, resamples - start) for start in range(0, resamples, size)]
    even = np.full(samples, 1 / samples)
    return np.concatenate(
        [generator.multinomial(samples, even, size=count) @ columns for count in sizes]
    )


def _sums(result: Result, samples: int, metric: str, kind: str) -> _Sums | None:
    """What a figure of one kind of attention is pooled from, None if that was not kept."""
    if samples == 0:
        return None
    if metric == "ppl":
        return _of_text(result, samples)
    rows = result.samples[result.samples["kind"] == kind]
    if metric == "sink_rate":
        rows = _sinking(rows, float(result.run.get("epsilon") or 0.3))
        grouped = rows.groupby(["sample", "site"])[["over", "under"]].sum()
    else:
        rows = rows[rows[metric].notna()]
        rows = rows.assign(over=rows[metric], under=_weights(rows, FIGURES[metric]))
        grouped = rows.groupby(["sample", "site"])[["over", "under"]].mean()  # over heads
        grouped["over"] *= grouped["under"]
    if rows.empty:
        return None
    sites = [site for site in result.layers["site"] if (rows["site"] == site).any()]
    over, under = (_matrix(grouped[c], samples, sites) for c in ("over", "under"))
    return _Sums(over, under, sites)


def _weights(rows: pd.DataFrame, uncounted: int) -> pd.Series:
    """The queries that count in each row; one each where they were not counted."""
    is_causal = (rows["kind"] == "self") & (rows["stack"] != "encoder")
    queries = rows["queries"].astype("float64") - np.where(is_causal, uncounted, 0)
    return queries.clip(lower=0).fillna(1.0)


def _matrix(values: pd.Series, samples: int, sites: Sequence[str]) -> np.ndarray:
    """(S, L) values by sample and site, 0 where there is none."""
    table = values.unstack("site").reindex(index=range(samples), columns=list(sites))
    return table.to_numpy(float, na_value=0.0)


def _sinking(rows: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """A row a (document, layer, head) that counts: whether its first key is a sink.

    The floor among the queries that see the first key is that among all queries times
    alpha_first / f_attr: both pairs differ by the queries that count. That ratio is the same for
    all heads, so one that gives the first key nothing takes it from the others.
    """
    rows = rows[rows["alpha_first"].notna()]
    ratio = (rows["alpha_first"] / rows["f_attr"]).where(rows["f_attr"] > 0)
    ratio = ratio.groupby([rows["site"], rows["sample"]]).transform("max").fillna(1.0)
    rows = rows[rows["f_attr_uniform"] * ratio <= epsilon / 2]
    return rows.assign(over=(rows["alpha_first"] > epsilon).astype(float), under=1.0)


def _of_text(result: Result, samples: int) -> _Sums | None:
    """Of the perplexity: the NLL of each document, weighted by the tokens predicted in it."""
    table = result.samples
    rows = table[table["nll"].notna()].set_index("sample")["nll"]
    if rows.empty:
        return None
    reading = table[(table["kind"] == "self") & (table["stack"] != "encoder")]
    queries = reading.groupby("sample")["queries"].max().astype("float64")
    weight = (queries.reindex(range(samples)) - FIGURES["ppl"]).clip(lower=0)
    weight = weight.where(weight.notna(), 1.0)
    nll = rows.reindex(range(samples))
    weight = weight.where(nll.notna(), 0.0)
    over = (nll.fillna(0.0) * weight).to_numpy()[:, None]  # (S, 1)
    return _Sums(over, weight.to_numpy()[:, None], [""])
