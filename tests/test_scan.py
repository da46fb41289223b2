"""The whole scan of a decoder against figures recomputed from its weights by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from torch import Tensor

from attnprobe import InputError, NothingMeasuredError, scan
from attnprobe.models import Decoder, GateConfig, ModelConfig
from attnprobe.result import Result

VOCABULARY = 23
LENGTHS = (40, 40, 31, 12, 3)
SINK = ("f_attr", "f_attr_uniform", "alpha_first", "first4", "null_mass", "value_drain")
ENTROPY = ("entropy", "entropy_norm", "entropy_nosink")
QUANTILES = {"entropy_p05": 0.05, "entropy_p50": 0.5, "entropy_p95": 0.95}
BIN = 1 / 128


def decoder(sharp: float = 3.0, dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    """A small decoder whose attention is far from uniform and whose gates open and close."""
    torch.manual_seed(1)
    values = {"vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "n_heads": 4}
    model = Decoder(ModelConfig(**{**values, "max_length": 64, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("query.weight", "key.weight", "gate.projection.weight")):
                weight.mul_(sharp)
            elif name.endswith(("bias", "scalar")):
                weight.normal_()
    return model.to(dtype).eval()


def documents() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(0, VOCABULARY, (n,)) for n in LENGTHS]


def batch(side: str) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Tokens, attention mask, document ids (what the scan is given) and the ids by hand."""
    texts = documents()
    if side == "none":
        texts = [t for t in texts if len(t) == 40]
        tokens = torch.stack(texts)
        return tokens, None, None, torch.zeros_like(tokens)
    width = 40
    if side == "packed":
        tokens = torch.stack([texts[0], torch.cat([texts[2], texts[4], texts[3][:6]])])
        ids = torch.zeros(2, width, dtype=torch.long)
        ids[1] = torch.tensor([4] * 31 + [1] * 3 + [2] * 6)  # not in the order of their numbers
        return tokens, None, ids, ids
    tokens = torch.full((len(texts), width), 7)
    mask = torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        gap = width - len(text)
        start = {"left": gap, "right": 0, "both": gap // 2}[side]
        tokens[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
    return tokens, mask, None, mask - 1


def by_hand(model: Decoder, tokens: Tensor, ids: Tensor, **options: object) -> dict:
    config = model.config.to_dict()
    layers, logits = reference.decoder(model.state_dict(), config, tokens, ids)
    found = reference.tables(layers, logits, tokens, ids, config, **options)
    return {**found, "passes": layers, "config": config}


def run(model: Decoder, side: str, **options: object) -> Result:
    tokens, mask, packed, _ = batch(side)
    return scan(model, tokens, attention_mask=mask, document_ids=packed, max_logit=True, **options)


def assert_close(
    mine: object, theirs: object, what: object, rel: float = 1e-5, absolute: float = 1e-5
) -> None:
    theirs = math.nan if theirs is None else float(theirs)
    mine = math.nan if mine is None or mine is pd.NA or pd.isna(mine) else float(mine)
    assert math.isnan(mine) == math.isnan(theirs), (what, mine, theirs)
    if not math.isnan(theirs):
        assert abs(mine - theirs) <= absolute + rel * abs(theirs), (what, mine, theirs)


def assert_row(
    row: Mapping[str, object], want: Mapping[str, object], columns: Sequence[str], what: object
) -> None:
    for column in columns:
        assert_close(row[column], want[column], (what, column))


def assert_quantiles(row: Mapping[str, object], values: Sequence[float], what: object) -> None:
    """To the bin: no further than a bin from the samples on either side of the quantile."""
    for column, q in QUANTILES.items():
        low = np.quantile(values, q, method="lower") - BIN
        high = np.quantile(values, q, method="higher") + BIN
        assert low <= row[column] <= high, (what, column, low, row[column], high)


def assert_tables(result: Result, want: dict) -> None:
    """Every figure of heads, layers, model and samples."""
    columns = (*SINK, "sink_rate", *ENTROPY, "collapsed", *reference.RANK_COLUMNS)
    for row in result.heads.to_dict("records"):
        key = row["layer"], row["head"]
        assert_row(row, want["heads"][key], columns, key)
        assert_quantiles(row, want["heads"][key]["all"], key)
        dense = want["passes"][key[0]].dense
        ids = want["ids"]
        logits = dense.logits[:, key[1]][ids >= 0]
        assert_close(row["max_logit"], logits.max(), (key, "max_logit"))
    for row in result.layers.to_dict("records"):
        own = want["layers"][row["layer"]]
        assert_row(row, own, (*columns, "erank_head", "m_act"), row["site"])
        assert_quantiles(row, own["all"], row["site"])
    (model,) = result.model.to_dict("records")
    assert_row(model, want["model"], [c for c in want["model"] if c != "n"], "model")
    samples = result.samples[result.samples.site.notna()]
    assert len(samples) == len(want["samples"])
    for row in samples.to_dict("records"):
        key = row["layer"], row["head"], row["sample"]
        assert_row(row, want["samples"][key], (*SINK, *ENTROPY, "queries"), key)
    losses = result.samples[result.samples.site.isna()]
    for row in losses.to_dict("records"):
        assert_close(row["nll"], want["nll"][row["sample"]], ("nll", row["sample"]))
    assert len(losses) == len(want["nll"])


def assert_sinks(result: Result, want: dict, tokens: Tensor, ids: Tensor) -> None:
    """Every key above epsilon, grouped over heads and documents by position and token."""
    texts = [tokens[row, columns].tolist() for row, columns in reference.documents(ids)]
    for layer, found in want["sinks"].items():
        groups: dict[tuple[int, int], list] = {}
        for d, h, position, share in found:
            groups.setdefault((position, texts[d][position]), []).append((d, h, share))
        rows = result.sinks[result.sinks.layer == layer].to_dict("records")
        assert {(int(r["position"]), r["token_id"]) for r in rows} == set(groups)
        for row in rows:
            group = groups[int(row["position"]), row["token_id"]]
            assert row["heads"] == len({h for _, h, _ in group})
            assert row["documents"] == len({d for d, _, _ in group})
            assert row["documents_total"] == len(texts)
            assert_close(row["alpha"], np.mean([a for *_, a in group]), row)
            assert_close(row["alpha_max"], max(a for *_, a in group), row)


def assert_positions(result: Result, want: dict, ids: Tensor) -> None:
    """alpha by bin of position: the mean over keys, of all documents, that some query sees."""
    for layer, passed in enumerate(want["passes"]):
        share = reference.alpha(passed.dense, ids, ids)
        rows = result.positions[result.positions.layer == layer]
        for head, own in rows.groupby("head"):
            covered = []
            for row in own.to_dict("records"):
                keys = range(row["position_lo"], row["position_hi"] + 1)
                covered += keys
                values = [
                    float(share[r, head, columns[p]])
                    for r, columns in reference.documents(ids)
                    for p in keys
                    if p < len(columns)
                ]
                assert row["keys"] == len(values)
                assert_close(row["alpha"], np.mean(values) if values else math.nan, row)
            longest = max(len(columns) for _, columns in reference.documents(ids))
            assert covered == list(range(len(covered)))
            assert len(covered) >= longest


def assert_spectra(result: Result, want: dict) -> None:
    for (layer, head), row in want["heads"].items():
        own = result.spectra[(result.spectra.layer == layer) & (result.spectra["head"] == head)]
        sigma = np.asarray(row["sigma"])[
            : 0 if math.isnan(row["rank_bound"]) else row["rank_bound"]
        ]
        assert own["index"].tolist() == list(range(len(sigma)))
        np.testing.assert_allclose(own["sigma"], sigma, rtol=1e-5, atol=1e-5 * sigma.max(initial=1))
    for layer, row in want["layers"].items():
        own = result.spectra[(result.spectra.layer == layer) & result.spectra["head"].isna()]
        sigma = row["sigma"][: row["rank_bound"]]
        np.testing.assert_allclose(own["sigma"], sigma, rtol=1e-5, atol=1e-5 * sigma[0])


def assert_gates(result: Result, want: dict, ids: Tensor) -> None:
    """Histogram, moments and shares over valid tokens, and what skipping closed heads costs."""
    for layer, passed in enumerate(want["passes"]):
        rows = result.gates[result.gates.layer == layer].to_dict("records")
        if passed.gate is None:
            assert rows == []
            continue
        gate = passed.gate if passed.gate.dim() == 4 else passed.gate[:, :, None]
        gate = gate.expand(*ids.shape, *gate.shape[2:])  # (B, T, h, d)
        assert len(rows) == (1 + gate.shape[2] if gate.shape[2] > 1 else 1)
        for row in rows:
            part = gate if pd.isna(row["head"]) else gate[:, :, [int(row["head"])]]
            _assert_gate_row(row, part, ids)
            if want["config"]["gate"]["position"] == "G1" and not _additive(want):
                _assert_skips(row, gate, passed, ids)
            else:
                assert_close(row["skip_error_1e-1"], None, "no price")


def _additive(want: dict) -> bool:
    return want["config"]["gate"]["mode"] == "additive"


def _assert_gate_row(row: Mapping[str, object], gate: Tensor, ids: Tensor) -> None:
    valid = ids >= 0
    figures = reference.gate_figures(gate[valid])
    edges = np.asarray(row["edges"])
    median = figures.pop("median")
    assert_row(row, figures, list(figures), "gate")
    values = np.sort(gate[valid].double().flatten().numpy())
    at = int(np.clip(np.searchsorted(edges, median) - 1, 0, len(edges) - 2))
    wide = edges[at + 1] - edges[at]
    middle = values[(len(values) - 1) // 2], values[len(values) // 2]
    assert middle[0] - wide - 1e-6 <= row["median"] <= middle[1] + wide + 1e-6
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    assert sum(row["histogram"]) == len(values)
    moved = np.abs(np.cumsum(row["histogram"]) - np.cumsum(counts)).max()
    on_edge = (np.abs(values[:, None] - edges) < 1e-6).sum(0).max()
    assert moved <= on_edge  # a value within rounding of an edge may fall on its other side
    first = torch.zeros_like(valid)
    for r, columns in reference.documents(ids):
        first[r, columns[0]] = True
    assert_close(row["gate_first"], gate[first].double().mean(), "gate_first")
    assert_close(row["gate_rest"], gate[valid & ~first].double().mean(), "gate_rest")
    for name, threshold in (("1e-3", 1e-3), ("1e-2", 1e-2), ("1e-1", 1e-1)):
        closed = gate[valid].double().abs().amax(-1) < threshold
        assert_close(row[f"skippable_{name}"], closed.double().mean(), f"skippable {name}")


def _assert_skips(
    row: Mapping[str, object], gate: Tensor, passed: reference.Layer, ids: Tensor
) -> None:
    valid = ids >= 0
    heads = passed.consumed.shape[2]
    every = gate[valid].expand(-1, heads, -1)
    for name, threshold in (("1e-3", 1e-3), ("1e-2", 1e-2), ("1e-1", 1e-1)):
        _, by_head, _, whole = reference.skipping(
            every, passed.consumed[valid], passed.w_o, threshold
        )
        error = whole if pd.isna(row["head"]) else by_head[int(row["head"])]
        assert_close(row[f"skip_error_{name}"], error, f"skip_error {name}")


GATES = {
    "G1 element": GateConfig("G1"),
    "G1 head": GateConfig("G1", "head"),
    "G1 head-shared": GateConfig("G1", "head-shared"),
    "G1 input-independent": GateConfig("G1", source="input-independent"),
    "G1 half": GateConfig("G1", activation="half-sigmoid"),
    "G1 silu": GateConfig("G1", activation="silu"),
    "G1 relu head": GateConfig("G1", "head", activation="relu"),
    "G1 identity": GateConfig("G1", activation="identity"),
    "G1 gelu": GateConfig("G1", activation="gelu"),
    "G1 additive": GateConfig("G1", mode="additive"),
    "G2 element": GateConfig("G2"),
    "G2 head": GateConfig("G2", "head"),
    "G2 input-independent": GateConfig("G2", source="input-independent"),
    "G3 element": GateConfig("G3"),
    "G3 additive head": GateConfig("G3", "head", mode="additive"),
    "G4 head": GateConfig("G4", "head"),
    "G4 head-shared": GateConfig("G4", "head-shared"),
    "G5 element": GateConfig("G5"),
    "G5 head": GateConfig("G5", "head"),
    "G5 additive": GateConfig("G5", mode="additive"),
    "G5 input-independent": GateConfig("G5", source="input-independent"),
}
MODELS: dict[str, dict[str, object]] = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1, "head_dim": 8},
    "window": {"window": 6},
    "learned": {"positions": "learned", "bias": True},
    "sinusoidal post-norm": {"positions": "sinusoidal", "norm": "post", "activation": "relu"},
    "swiglu tied": {"activation": "swiglu", "tie_embeddings": True, "n_kv_heads": 2},
    "wide heads": {"head_dim": 16},  # H·d_v > d_model
    "narrow heads": {"head_dim": 4},  # H·d_v < d_model
    "one head": {"n_heads": 1},
    **{name: {"gate": gate, "n_kv_heads": 2} for name, gate in GATES.items()},
    "biased G5": {"gate": GateConfig("G5"), "bias": True},
    "biased G1": {"gate": GateConfig("G1"), "bias": True},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["none", "left"])
def test_every_figure(name: str, side: str) -> None:
    model = decoder(**MODELS[name])
    tokens, _, _, ids = batch(side)
    result = run(model, side)
    want = {**by_hand(model, tokens, ids), "ids": ids}
    assert_tables(result, want)
    assert_sinks(result, want, tokens, ids)
    assert_positions(result, want, ids)
    assert_spectra(result, want)
    assert_gates(result, want, ids)
