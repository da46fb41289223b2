"""Results to render: real scans of small models, and hand-made ones of any shape."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

import attnprobe
from attnprobe.models import GateConfig, ModelConfig, build
from attnprobe.render.table import show
from attnprobe.result import Result

TEXT = ["<s>", " the", "\n", "|", "$x_1$", "[red]", "‮", "中", "a&b", "\\", "*", "~"]


@pytest.fixture(scope="session")
def scanned() -> dict[str, Result]:
    """Scans of untrained models: a pair, one gated by heads with SiLU, an encoder–decoder."""

    def scan(name: str, gate: GateConfig, **changes: Any) -> Result:
        torch.manual_seed(0)
        shape = {"vocab_size": 12, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_length": 48}
        model = build(ModelConfig(**{**shape, **changes}, gate=gate)).eval()
        tokens = torch.randint(0, 12, (3, 48))
        extra = {"decoder_tokens": tokens[:, :40]} if "architecture" in changes else {}
        result = attnprobe.scan(model, tokens, token_text=TEXT.__getitem__, epsilon=0.1, **extra)
        result.checkpoint["name"] = name
        result.input["source"] = "random tokens"
        return result

    return {
        "ungated": scan("ungated", GateConfig()),
        "gated": scan("gated", GateConfig(position="G1")),
        "silu": scan("silu", GateConfig(position="G1", granularity="head", activation="silu")),
        "both": scan("both", GateConfig(), architecture="encoder-decoder", n_layers=2),
    }


@pytest.fixture(scope="session")
def handmade() -> Callable[..., Result]:
    """A maker of results of any size, with a sink that fades with depth."""
    return make_result


def make_result(
    name: str = "ungated",
    layers: int = 4,
    heads: int = 4,
    gate: bool = False,
    strength: float = 0.8,
    token: str | None = "<s>",
) -> Result:
    rows: dict[str, list[dict[str, Any]]] = {}
    for layer in range(layers):
        _add_layer(rows, layer, heads, gate, strength, token)
    means = {
        column: sum(row[column] for row in rows["layers"]) / layers
        for column in rows["layers"][0]
        if isinstance(rows["layers"][0][column], float)
    }
    rows["model"] = [
        {"kind": "self", **means, "collapsed": 1, "ppl": 7.25, "nll": 1.981, "rank_bound": 64}
    ]
    return Result.from_rows(
        rows,
        checkpoint={"name": name},
        architecture={
            "parameters": 1_234_567,
            "layers": layers,
            "heads": heads,
            "gate": "element gate at G1" if gate else "none",
        },
        input={"source": "back-copy", "samples": 64, "documents": 64, "length": 64, "tokens": 4096},
        run={"epsilon": 0.3, "device": "cpu", "dtype": "float32", "seconds": 1.25, "layers": None},
    )


def _add_layer(
    rows: dict[str, list[dict[str, Any]]],
    layer: int,
    heads: int,
    gate: bool,
    strength: float,
    token: str | None,
) -> None:
    site = {"site": f"layers.{layer}.attention", "stack": "decoder", "kind": "self", "layer": layer}
    own = []
    for head in range(heads):
        share = strength * (0.4 + 0.6 * ((head * 7 + layer * 3) % 5) / 4) / (1 + layer / 2)
        own.append({**site, "head": head, **_figures(share, bound=16)})
        rows.setdefault("positions", []).extend(
            {
                **site,
                "head": head,
                "position_lo": k,
                "position_hi": k,
                "keys": 64,
                "alpha": share if k == 0 else (1 - share) / 63,
            }
            for k in range(16)
        )
    whole = {
        column: sum(row[column] for row in own) / heads
        for column in own[0]
        if isinstance(own[0][column], float)
    }
    whole |= {"erank": 40.0, "rank_bound": 64, "utilisation": 0.625, "num_rank": 64, "m_act": 120.0}
    whole |= {"erank_head": 10.0, "collapsed": sum(row["collapsed"] for row in own)}
    if gate:
        whole["gate_mean"] = 0.25
        rows.setdefault("gates", []).append({**site, **_gate()})
    else:
        reason = "no gate at this attention layer"
        rows.setdefault("not_measured", []).append({**site, "metric": "gate", "reason": reason})
    rows.setdefault("heads", []).extend(own)
    rows.setdefault("layers", []).append({**site, **whole})
    rows.setdefault("spectra", []).extend(
        {**site, "head": head, "index": i, "sigma": 100 * 0.8**i}
        for head, count in ((None, 64), *((h, 16) for h in range(heads)))
        for i in range(count)
    )
    if strength > 0.3:
        place = {"position": 0, "token": token, "token_id": 0, "alpha": 0.6, "alpha_max": 0.9}
        counts = {"heads": heads, "documents": 60, "documents_total": 64}
        rows.setdefault("sinks", []).append({**site, **place, **counts})


def _figures(share: float, bound: int) -> dict[str, Any]:
    return {
        "f_attr": share,
        "f_attr_uniform": 0.0741,
        "alpha_first": share,
        "sink_rate": float(share > 0.3),
        "first4": min(1.0, share + 0.1),
        "null_mass": 0.0,
        "value_drain": 0.25,
        "entropy": 2.0 * (1 - share),
        "entropy_norm": 0.02 if share > 0.79 else 0.8 * (1 - share),
        "entropy_nosink": 2.2,
        "max_logit": 12.0,
        "collapsed": share > 0.79,
        "erank": 10.0,
        "erank_centered": 11.0,
        "stable_rank": 3.0,
        "participation": 4.0,
        "num_rank": bound,
        "mean_share": 0.3,
        "rank_bound": bound,
        "utilisation": 10.0 / bound,
    }


def _gate() -> dict[str, Any]:
    about = {"position": "G1", "granularity": "element", "activation": "sigmoid"}
    about |= {"source": "query", "mode": "multiplicative"}
    means = {"mean": 0.25, "std": 0.2, "median": 0.2, "gate_first": 0.3, "gate_rest": 0.25}
    shares = {"below_0.1": 0.4, "from_0.1_to_0.3": 0.3, "above_0.9": 0.05}
    skips = {"skippable_1e-3": 0.0, "skippable_1e-2": 0.1, "skippable_1e-1": 0.3}
    errors = {"skip_error_1e-3": 0.0, "skip_error_1e-2": 0.004, "skip_error_1e-1": 0.05}
    counts = [max(0, 100 - 5 * i) for i in range(50)]
    bins = {"histogram": counts, "edges": [i / 50 for i in range(51)]}
    return {**about, **means, **shares, **skips, **errors, **bins}


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """What `show` prints on a console that is no terminal."""

    def printed_(
        results: list[Result], view: str, width: int = 80, layer: int | None = None, **options: Any
    ) -> str:
        stream = io.StringIO()
        show(results, view, Console(file=stream, width=width, **options), layer=layer)
        return stream.getvalue()

    return printed_
