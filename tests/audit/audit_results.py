"""Results made by hand, for the tests of the audit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnprobe.result import Result

Row = Mapping[str, Any]
INPUT = {"samples": 4, "length": 64, "tokens": 256, "sha256": "ab" * 32}
RUN = {
    "metrics": ["sink", "entropy", "rank", "gate", "activation", "perplexity"],
    "device": "cpu",
    "dtype": "float32",
    "epsilon": 0.3,
    "pre_gate": False,
}
FIGURES: dict[str, Any] = {
    "kind": "self",
    "f_attr": 0.05,
    "sink_rate": 0.0,
    "first4": 0.2,
    "entropy_norm": 0.7,
    "collapsed": 0,
    "erank": 12.0,
    "erank_head": 6.0,
    "mean_share": 0.2,
    "gate_mean": 0.2,
    "m_act": 20.0,
    "ppl": 6.0,
}


def site(layer: int) -> dict[str, Any]:
    """The key of a layer."""
    return {
        "site": f"layers.{layer}.attention",
        "stack": "decoder",
        "kind": "self",
        "layer": layer,
    }


def make(
    name: str = "model",
    heads: Sequence[Sequence[Any]] = ((0.05, 0.04), (0.06, 0.05)),
    *,
    step: int | None = None,
    path: str | None = None,
    rows: Mapping[str, Sequence[Row]] | None = None,
    about: Mapping[str, Any] | None = None,
    **figures: Any,
) -> Result:
    """A result whose heads have some f_attr by layer, and whose model has some figures."""
    layers = [
        {**site(n), "f_attr": 0.05, "entropy_norm": 0.7, "utilisation": 0.5, "m_act": 20.0}
        for n in range(len(heads))
    ]
    tables: dict[str, Sequence[Row]] = {
        "model": [{**FIGURES, **figures}],
        "layers": layers,
        "heads": [
            {**site(n), "head": h, "f_attr": value, "entropy_norm": 0.7, "collapsed": False}
            for n, values in enumerate(heads)
            for h, value in enumerate(values)
        ],
        "gates": [{**site(n), "mean": 0.2, "position": "G1"} for n in range(len(heads))],
        **(rows or {}),
    }
    return Result.from_rows(
        tables,
        checkpoint={"name": name, "path": path or f"runs/{name}.pt", "step": step, "seed": 0},
        architecture={"class": "Decoder", "layers": len(heads), "gate": "element gate at G1"},
        input={**INPUT, **(about or {})},
        run={**RUN, **(about or {})},
    )


def massive(layer: int, value: float = 500.0) -> Row:
    """A massive activation on the first token."""
    return {
        **site(layer),
        "document": 0,
        "position": 0,
        "token": "<s>",
        "dimension": 3,
        "value": value,
    }


def sink(layer: int, position: int, token: str = ".") -> Row:
    """A sink at a position."""
    return {**site(layer), "position": position, "token": token, "alpha": 0.6, "heads": 2}
