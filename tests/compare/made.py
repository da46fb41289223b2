"""Results made by hand whose samples add up to their figures, as those of a scan do."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnprobe.result import Result

MEANS = ("f_attr", "entropy_norm")
FLOOR = 0.05


def made(
    name: str = "first",
    *,
    layers: int = 2,
    heads: int = 2,
    samples: int = 40,
    seed: int = 0,
    shift: float = 0.0,
    gate: bool = False,
    queries: tuple[int, ...] = (32,),
    **changes: Any,
) -> Result:
    """A decoder whose figures differ from those of another seed by chance, and by `shift`.

    Args:
        queries: of the documents, in turn; an entropy counts one less, as does the perplexity.
        changes: of `checkpoint`, `input` and `run`, by name.
    """
    draw = np.random.default_rng(seed)
    counts = np.resize(np.array(queries, float), samples)
    rows: dict[str, list[dict[str, Any]]] = {t: [] for t in ("heads", "layers", "samples", "gates")}
    rows["not_measured"] = []
    for layer in range(layers):
        site = {"site": f"h.{layer}", "stack": "decoder", "kind": "self", "layer": layer}
        own = [_head(site, h, draw, samples, shift, gate, counts, rows) for h in range(heads)]
        means = {c: float(np.mean([h[c] for h in own])) for c in (*MEANS, "sink_rate")}
        if gate:
            means["gate_mean"] = float(np.mean([h["gate_mean"] for h in own]))
            rows["gates"].append({**site, "position": "G1", "below_0.1": 0.25 + layer / 100})
        else:
            told = {"metric": "gate", "reason": "no gate at this attention layer"}
            rows["not_measured"].append({**site, **told})
        ranks = {"erank": 20.0 + layer - 30 * shift, "rank_bound": 64, "erank_head": 6.0}
        rows["layers"].append(
            {**site, **means, **ranks, "f_attr_uniform": FLOOR, "m_act": 100.0 * (1 + layer)}
        )
        rows["heads"] += [{**h, "rank_bound": 16} for h in own]
    nll = draw.normal(2 + shift, 0.2, samples)
    rows["samples"] += [{"sample": s, "nll": float(nll[s])} for s in range(samples)]
    pooled = float((nll * (counts - 1)).sum() / (counts - 1).sum())
    columns = (*MEANS, "sink_rate", "erank", "erank_head", "m_act", *(["gate_mean"] * gate))
    model = {c: float(np.mean([row[c] for row in rows["layers"]])) for c in columns}
    model |= {"f_attr_uniform": FLOOR, "rank_bound": 64, "ppl": float(np.exp(pooled))}
    rows["model"] = [{"kind": "self", **model, "nll": pooled}]
    about = {
        "checkpoint": {"name": name, "task": "bytes", "config": {"vocab_size": 257}},
        "input": {
            "source": "a book",
            "samples": samples,
            "documents": samples,
            "length": 32,
            "tokens": int(counts.sum()),
            "sha256": "5e" * 32,
        },
        "run": {"epsilon": 0.3, "pre_gate": False, "device": "cpu", "dtype": "float32"},
    }
    for key, value in changes.items():
        about[key] = {**about[key], **value}
    return Result.from_rows(
        rows, architecture={"layers": layers, "heads": heads, "gate": "none"}, **about
    )


def _head(
    site: dict[str, Any],
    head: int,
    draw: np.random.Generator,
    samples: int,
    shift: float,
    gate: bool,
    counts: np.ndarray,
    rows: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    share = np.clip(draw.normal(0.3 + shift, 0.05, samples), 0.01, 0.99)
    entropy = np.clip(draw.normal(0.6, 0.05, samples), 0.01, 1)
    opening = np.clip(draw.normal(0.2, 0.05, samples), 0.01, 1)
    for s in range(samples):
        row = {"f_attr": share[s], "alpha_first": share[s], "entropy_norm": entropy[s]}
        row |= {"gate_mean": opening[s]} if gate else {}
        figures = {k: float(v) for k, v in row.items()}
        about = {"head": head, "sample": s, "queries": int(counts[s]), "f_attr_uniform": FLOOR}
        rows["samples"].append({**site, **about, **figures})
    return {
        **site,
        "head": head,
        "f_attr": float((share * counts).sum() / counts.sum()),
        "entropy_norm": float((entropy * (counts - 1)).sum() / (counts - 1).sum()),
        "sink_rate": float((share > 0.3).mean()),
        **({"gate_mean": float((opening * counts).sum() / counts.sum())} if gate else {}),
    }
