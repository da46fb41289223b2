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
from attnprobe.forward import ForwardInputs
from attnprobe.metrics import METRICS
from attnprobe.metrics.base import Options
from attnprobe.models import Decoder, EncoderDecoder, GateConfig, ModelConfig
from attnprobe.result import KEY, TABLES, Result
from attnprobe.scanning import Scan

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
    return whole(layers, config, logits, tokens, ids, **options)


def whole(
    layers: list[reference.Layer],
    config: dict,
    logits: Tensor,
    tokens: Tensor,
    ids: Tensor,
    **options: object,
) -> dict:
    nll = reference.next_token_nll(logits, tokens, ids)
    every = [x for row in nll for x in row]
    found = reference.tables(layers, config, **options)
    found["model"]["ppl"] = math.exp(reference.mean(every)) if every else math.nan
    found["nll"] = {d: reference.mean(row) for d, row in enumerate(nll)}
    return {**found, "passes": {layer.site: layer for layer in layers}, "config": config}


def run(model: Decoder, side: str, **options: object) -> Result:
    tokens, mask, packed, _ = batch(side)
    return scan(model, tokens, attention_mask=mask, document_ids=packed, **options)


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
    """Every figure of heads, layers and samples."""
    columns = (*SINK, "sink_rate", *ENTROPY, "collapsed", "max_logit", *reference.RANK_COLUMNS)
    assert len(result.heads) == len(want["heads"])
    for row in result.heads.to_dict("records"):
        key = row["site"], row["head"]
        assert_row(row, want["heads"][key], columns, key)
        assert_quantiles(row, want["heads"][key]["all"], key)
    assert result.layers.site.tolist() == list(want["layers"])
    for row in result.layers.to_dict("records"):
        own = want["layers"][row["site"]]
        assert_row(row, own, (*columns, "erank_head"), row["site"])
        assert_close(row["m_act"], own.get("m_act"), (row["site"], "m_act"))
        assert_quantiles(row, own["all"], row["site"])
    samples = result.samples[result.samples.site.notna()]
    assert len(samples) == len(want["samples"])
    for row in samples.to_dict("records"):
        key = row["site"], row["head"], row["sample"]
        assert_row(row, want["samples"][key], (*SINK, *ENTROPY, "queries"), key)
    losses = result.samples[result.samples.site.isna()]
    known = not all(math.isnan(x) for x in want["nll"].values())
    assert len(losses) == (len(want["nll"]) if known else 0)
    for row in losses.to_dict("records"):
        assert_close(row["nll"], want["nll"][row["sample"]], ("nll", row["sample"]))


def assert_model(result: Result, want: dict) -> None:
    (model,) = result.model.to_dict("records")
    assert_row(model, want["model"], list(want["model"]), "model")


def assert_sinks(result: Result, want: dict, tokens: Tensor) -> None:
    """Every key above epsilon, grouped over heads and documents by position and token."""
    for site, found in want["sinks"].items():
        ids = want["passes"][site].key_ids
        texts = [tokens[row, columns].tolist() for row, columns in reference.documents(ids)]
        groups: dict[tuple[int, int], list] = {}
        for d, h, position, share in found:
            groups.setdefault((position, texts[d][position]), []).append((d, h, share))
        rows = result.sinks[result.sinks.site == site].to_dict("records")
        assert {(int(r["position"]), r["token_id"]) for r in rows} == set(groups)
        for row in rows:
            group = groups[int(row["position"]), row["token_id"]]
            assert row["heads"] == len({h for _, h, _ in group})
            assert row["documents"] == len({d for d, _, _ in group})
            assert row["documents_total"] == len(texts)
            assert_close(row["alpha"], np.mean([a for *_, a in group]), row)
            assert_close(row["alpha_max"], max(a for *_, a in group), row)


def assert_positions(result: Result, want: dict) -> None:
    """alpha by bin of position: the mean over keys, of all documents, that some query sees."""
    for site, passed in want["passes"].items():
        ids = passed.key_ids
        share = reference.alpha(passed.dense, passed.query_ids, ids)
        rows = result.positions[result.positions.site == site]
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
                values = [v for v in values if not math.isnan(v)]
                assert row["keys"] == len(values)
                assert_close(row["alpha"], np.mean(values) if values else math.nan, row)
            longest = max(len(columns) for _, columns in reference.documents(ids))
            assert covered == list(range(len(covered)))
            assert len(covered) >= longest


def assert_spectra(result: Result, want: dict) -> None:
    every = {**want["heads"], **{(site, None): row for site, row in want["layers"].items()}}
    for (site, head), row in every.items():
        own = result.spectra[result.spectra.site == site]
        own = own[own["head"].isna() if head is None else own["head"] == head]
        count = 0 if math.isnan(row["rank_bound"]) else row["rank_bound"]
        sigma = np.asarray(row["sigma"])[:count]
        assert own["index"].tolist() == list(range(len(sigma)))
        np.testing.assert_allclose(own["sigma"], sigma, rtol=1e-5, atol=1e-5 * sigma.max(initial=1))


def assert_gates(result: Result, want: dict) -> None:
    """Histogram, moments and shares over valid tokens, and what skipping closed heads costs."""
    place = want["config"]["gate"]["position"]
    for site, passed in want["passes"].items():
        ids = passed.key_ids if place in ("G2", "G3") else passed.query_ids
        rows = result.gates[result.gates.site == site].to_dict("records")
        if passed.gate is None:
            assert rows == []
            continue
        gate = passed.gate if passed.gate.dim() == 4 else passed.gate[:, :, None]
        gate = gate.expand(*ids.shape, *gate.shape[2:])  # (B, T, h, d)
        assert len(rows) == (1 + gate.shape[2] if gate.shape[2] > 1 else 1)
        for row in rows:
            part = gate if pd.isna(row["head"]) else gate[:, :, [int(row["head"])]]
            _assert_gate_row(row, part, ids)
            if place == "G1" and want["config"]["gate"]["mode"] == "multiplicative":
                _assert_skips(row, gate, passed, ids)
            else:
                assert_close(row["skip_error_1e-1"], None, "no price")


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
    assert_all(result, by_hand(model, tokens, ids), tokens)


def assert_all(result: Result, want: dict, tokens: Tensor) -> None:
    assert_tables(result, want)
    assert_model(result, want)
    assert_sinks(result, want, tokens)
    assert_positions(result, want)
    assert_spectra(result, want)
    assert_gates(result, want)


@pytest.mark.parametrize("name", ["plain", "grouped", "window", "learned", "G1 element", "G2 head"])
@pytest.mark.parametrize("side", ["right", "both", "packed"])
def test_padding_and_packing(name: str, side: str) -> None:
    model = decoder(**MODELS[name])
    tokens, _, _, ids = batch(side)
    assert_all(run(model, side), by_hand(model, tokens, ids), tokens)


@pytest.mark.parametrize("name", ["plain", "G1 head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 8, 130])
def test_any_length(name: str, dtype: torch.dtype, length: int) -> None:
    model = decoder(dtype=dtype, max_length=256, **MODELS[name])
    tokens = torch.randint(0, VOCABULARY, (2, length))
    result = scan(model, tokens)
    assert_all(result, by_hand(model, tokens, torch.zeros_like(tokens)), tokens)


@pytest.mark.parametrize("name", ["plain", "G1 element", "G2 element", "G5 element"])
def test_ranks_before_the_gate(name: str) -> None:
    model = decoder(**MODELS[name])
    tokens, _, _, ids = batch("left")
    result = run(model, "left", pre_gate=True)
    assert_tables(result, by_hand(model, tokens, ids, pre_gate=True))


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.9])
def test_any_epsilon(epsilon: float) -> None:
    model = decoder()
    tokens, _, _, ids = batch("left")
    result = run(model, "left", epsilon=epsilon)
    want = by_hand(model, tokens, ids, epsilon=epsilon)
    assert_tables(result, want)
    assert_sinks(result, want, tokens)


# a sink planted in the first layer


def with_sink(drained: bool, logit: float, **changes: object) -> Decoder:
    """Every head of the first layer attends to token 0 at the document's start, and to no more."""
    model = decoder(sharp=1.0, positions="learned", bias=True, n_kv_heads=2, **changes)
    first = model.layers[0]
    attention = first.attention
    with torch.no_grad():
        start = model.embedding.tokens.weight[0] + model.embedding.positions.weight[0]
        seen = first.attention_norm(start)
        toward = seen / seen.square().sum()  # 1 for the start token, about 0 for others
        # all queries are (sqrt(d), 0, …), so a logit is the key's first channel
        attention.query.weight.zero_()
        attention.query.bias.copy_(torch.eye(1, 6).repeat(1, 4).flatten() * 6**0.5)
        attention.key.weight[::6] = logit * toward
        attention.key.bias.zero_()
        if drained:
            value = attention.value.weight @ seen + attention.value.bias
            attention.value.weight -= torch.outer(value, toward) * 0.97
    return model


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_planted_sink(drained: bool, side: str) -> None:
    """F-Attr near 1, collapsed heads, and value drain, rank and entropy still right beside it."""
    model = with_sink(drained, 40.0, dtype=torch.float64)
    tokens, mask, _, ids = batch(side)
    for row, columns in reference.documents(ids):
        tokens[row, columns[0]] = 0
    result = scan(model, tokens, attention_mask=mask, token_text="t{}".format)
    want = by_hand(model, tokens, ids)
    assert_all(result, want, tokens)
    heads = result.heads[result.heads.layer == 0]
    assert bool((heads.f_attr > 0.9).all())
    assert bool((heads.sink_rate == 1).all())
    assert bool((heads.value_drain < 0.2).all()) == drained
    assert bool((heads.mean_share > 0.9).all())
    lead = result.sinks[result.sinks.layer == 0].iloc[0]
    assert (lead["position"], lead["token"], lead["token_id"]) == (0, "t0", 0)
    assert (lead["heads"], lead["documents"]) == (4, 3)  # two are too short


@pytest.mark.parametrize("logit", [150.0, 400.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_but_a_sink(logit: float, dtype: torch.dtype) -> None:
    """Rows that differ by less than float32 can tell: the centred rank is right or null."""
    model = with_sink(False, logit, dtype=dtype)
    tokens = torch.randint(1, VOCABULARY, (2, 40))
    tokens[:, 0] = 0
    result = scan(model, tokens)
    if dtype == torch.float64:
        assert_tables(result, by_hand(model, tokens, torch.zeros_like(tokens)))
    heads = result.heads[result.heads.layer == 0]
    np.testing.assert_allclose(heads.erank, 1, atol=1e-4)
    np.testing.assert_allclose(heads.mean_share, 1, atol=1e-6)
    assert bool(heads.collapsed.all())


# what must not matter


def frames(result: Result) -> dict[str, list[dict]]:
    """All tables as records, histograms as running sums so that one flipped bin is one."""
    found = {name: getattr(result, name).to_dict("records") for name in TABLES}
    for row in found["gates"]:
        row["histogram"] = np.cumsum(row["histogram"]) / max(1, sum(row["histogram"]))
    return found


def assert_same(one: Result, other: Result, absolute: float = 1e-5) -> None:
    """Equal tables, numbers to rounding."""
    for name, rows in frames(one).items():
        others = frames(other)[name]
        assert len(rows) == len(others), name
        for a, b in zip(rows, others, strict=True):
            for column, value in a.items():
                where = (name, column, a, b)
                if isinstance(value, (np.ndarray, list)):
                    np.testing.assert_allclose(value, b[column], atol=1e-3, err_msg=str(where))
                elif isinstance(value, float) or value is pd.NA:
                    to_bin = column in (*QUANTILES, "gate_median", "median")
                    assert_close(value, b[column], where, 1e-5, BIN if to_bin else absolute)
                else:
                    assert value == b[column], where


@pytest.mark.parametrize("name", ["plain", "G1 element", "G2 head", "G5 element", "window"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_batches_and_padding_do_not_matter(name: str, side: str, batch_size: int) -> None:
    model = decoder(**MODELS[name])
    tokens, mask, _, _ = batch(side)
    result = scan(model, tokens, attention_mask=mask, batch_size=batch_size)
    tokens, mask, _, _ = batch("left")
    assert_same(result, scan(model, tokens, attention_mask=mask, batch_size=7))


@pytest.mark.parametrize("name", ["plain", "G1 element", "G2 head", "G5 element"])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_two_parts_merged_are_one(name: str, cut: int) -> None:
    model = decoder(**MODELS[name])
    tokens, mask, _, _ = batch("left")
    parts = []
    for rows in (slice(0, cut), slice(cut, None)):
        part = Scan(model, list(METRICS), Options())
        part.add(ForwardInputs(tokens[rows], mask[rows], None, {}))
        parts.append(part)
    parts[0].merge(parts[1])
    merged = parts[0].result()
    assert_same(merged, scan(model, tokens, attention_mask=mask))
    assert merged.input["documents"] == 5
    assert merged.input["samples"] == 5


def test_merging_leaves_the_other_as_it_was() -> None:
    model = decoder()
    tokens, mask, _, _ = batch("left")
    empty, first, second = (Scan(model, list(METRICS), Options()) for _ in range(3))
    first.add(ForwardInputs(tokens[:2], mask[:2], None, {}))
    second.add(ForwardInputs(tokens[2:], mask[2:], None, {}))
    before = first.result()
    empty.merge(first)
    empty.merge(second)
    assert_same(empty.result(), scan(model, tokens, attention_mask=mask))
    assert_same(first.result(), before)


def test_merging_keeps_what_was_not_measured() -> None:
    class LinearAttention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = decoder(), LinearAttention()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(self.other(tokens))

    model, tokens = Mixed().eval(), batch("left")[0]
    empty, fed = (Scan(model, ["sink"], Options()) for _ in range(2))
    fed.add(ForwardInputs(tokens, None, None, {}))
    empty.merge(fed)
    told = fed.result().not_measured
    assert "other" in set(told["site"])
    pd.testing.assert_frame_equal(empty.result().not_measured, told)


def test_feeding_in_parts_is_feeding_once() -> None:
    model = decoder(**MODELS["G1 element"])
    tokens, mask, _, _ = batch("left")
    part = Scan(model, list(METRICS), Options())
    part.add(ForwardInputs(tokens[:3], mask[:3], None, {}))
    part.add(ForwardInputs(tokens[3:], mask[3:], None, {}))
    assert_same(part.result(), scan(model, tokens, attention_mask=mask))


# the choice of layers, heads and metrics


@pytest.mark.parametrize(
    ("chosen", "there"), [([1], [1]), ([0, 2], [0, 2]), ([-1], [2]), ([-3, 1], [0, 1])]
)
def test_layers_are_chosen(chosen: list[int], there: list[int]) -> None:
    model = decoder(n_layers=3)
    tokens, mask, _, _ = batch("left")
    result = scan(model, tokens, attention_mask=mask, layers=chosen)
    assert result.layers.layer.tolist() == there
    assert sorted(set(result.heads.layer)) == there
    assert not result.model.drop(columns="kind").notna().to_numpy().any()
    assert "model" in set(result.not_measured.metric)
    every = scan(model, tokens, attention_mask=mask)
    for column in ("f_attr", "entropy", "erank", "m_act"):
        theirs = every.layers[every.layers.layer.isin(there)][column]
        np.testing.assert_allclose(result.layers[column], theirs, rtol=1e-9)


@pytest.mark.parametrize("chosen", [[3], [99], [-4], [0, 7]])
def test_a_layer_that_is_not_there(chosen: list[int]) -> None:
    model, (tokens, _, _, _) = decoder(n_layers=3), batch("none")
    with pytest.raises(InputError, match=r"no attention layer .*0-2"):
        scan(model, tokens, layers=chosen)


def test_heads_are_chosen_and_the_layer_stays_whole() -> None:
    model, (tokens, _, _, _) = decoder(**MODELS["G1 element"]), batch("none")
    result, every = scan(model, tokens, heads=[1, 3]), scan(model, tokens)
    assert sorted(set(result.heads["head"])) == [1, 3]
    assert set(result.gates["head"].dropna()) == {1, 3}
    assert set(result.samples["head"].dropna()) == {1, 3}
    pd.testing.assert_frame_equal(result.layers, every.layers)
    pd.testing.assert_frame_equal(result.model, every.model)
    with pytest.raises(InputError, match=r"no head 4: .*0-3"):
        scan(model, tokens, heads=[4])


@pytest.mark.parametrize("name", METRICS)
def test_one_metric_alone_is_as_among_all(name: str) -> None:
    model = decoder(**MODELS["G1 element"])
    tokens, mask, _, _ = batch("left")
    alone = scan(model, tokens, attention_mask=mask, metrics=[name])
    every = scan(model, tokens, attention_mask=mask)
    for table in ("model", "layers", "heads", "gates", "spectra", "positions"):
        mine, theirs = getattr(alone, table), getattr(every, table)
        assert len(mine) in (0, len(theirs)), table
        for column in mine:
            if mine[column].notna().any():
                pd.testing.assert_series_equal(mine[column], theirs[column])
    assert alone.run["metrics"] == [name]


def test_wrong_inputs_are_told_apart() -> None:
    model, (tokens, mask, _, _) = decoder(), batch("left")
    for options, told in (
        ({"metrics": ["entropie"]}, "unknown metric entropie"),
        ({"metrics": []}, "unknown metric"),
        ({"attention_mask": mask[:2]}, "attention_mask has shape"),
        ({"document_ids": mask[:, :3]}, "document_ids has shape"),
        ({"attention_mask": torch.zeros_like(mask)}, "no token"),
        ({"document_ids": -torch.ones_like(mask)}, "no token: its document_ids"),
        ({"epsilon": 0.0}, "epsilon must lie between 0 and 1"),
        ({"epsilon": float("nan")}, "epsilon must lie between 0 and 1"),
    ):
        with pytest.raises(InputError, match=told):
            scan(model, tokens, **options)
    for empty in (tokens[:0], tokens[:, :0], tokens[0]):
        with pytest.raises(InputError, match="tokens must be"):
            scan(model, empty)


# single figures


def test_the_floor_of_length_alone() -> None:
    """H_T / T under a plain causal mask."""
    model = decoder(sharp=0.0, n_layers=1, n_heads=1, d_model=8, d_ff=8)
    for length, floor in ((8, 0.340), (64, 0.074), (512, 0.013), (4096, 0.0022)):
        tokens = torch.randint(0, VOCABULARY, (1, length))
        result = scan(model, tokens, metrics=["sink", "entropy"])
        harmonic = sum(1 / n for n in range(1, length + 1)) / length
        assert abs(result.figure("f_attr_uniform") - floor) < 6e-4 if length < 4096 else 6e-5
        assert_close(result.figure("f_attr_uniform"), harmonic, length, 1e-6, 0)
        # attention is uniform here, so it is at its floor and as wide as it can be
        assert_close(result.figure("f_attr"), harmonic, length, 1e-5, 0)
        assert_close(result.figure("alpha_first"), harmonic, length, 1e-5, 0)
        assert_close(result.figure("entropy_norm"), 1.0, length, 1e-5, 0)
        nats = sum(math.log(n) for n in range(1, length + 1)) / length
        assert_close(result.figure("entropy"), nats, length, 1e-5, 0)


def test_short_documents_have_no_sink_rate_but_a_reason() -> None:
    model = decoder()
    tokens = torch.randint(0, VOCABULARY, (2, 20))
    result = scan(model, tokens)
    assert result.heads.sink_rate.isna().all()
    assert result.figure("sink_rate") is None
    missing = result.not_measured[result.not_measured.metric == "sink_rate"]
    assert set(missing.site) == set(result.layers.site)
    windowed = scan(decoder(window=8), torch.randint(0, VOCABULARY, (2, 60)))
    assert windowed.heads.sink_rate.isna().all()


def test_perplexity_by_hand_and_null_where_there_is_none() -> None:
    model = decoder()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        logp = model(tokens).double().log_softmax(-1)
    nll = -sum(float(logp[0, t, tokens[0, t + 1]]) for t in range(4)) / 4
    for given in (tokens, tokens.int()):
        assert_close(scan(model, given).figure("ppl"), math.exp(nll), "ppl")
    single = scan(model, tokens[:, :1])
    assert single.figure("ppl") is None
    assert "ppl" in set(single.not_measured.metric)


def test_massive_activations_are_listed() -> None:
    """Two planted numbers: one above a thousand medians, one that is only large."""
    model = decoder(sharp=1.0)
    with torch.no_grad():
        model.embedding.tokens.weight[5, 7] = 4000.0
        model.embedding.tokens.weight[6, 2] = -90.0
    tokens = torch.randint(8, VOCABULARY, (3, 12))
    mask = torch.ones_like(tokens)
    mask[2, :4] = 0
    tokens[0, 3], tokens[2, 6], tokens[2, 1], tokens[1, 5] = 5, 5, 5, 6
    result = scan(model, tokens, attention_mask=mask, token_text=str, batch_size=2)
    want = by_hand(model, tokens, mask - 1)
    expected = [
        (site, *found)
        for site, layer in want["passes"].items()
        for found in reference.massive(layer.block, mask - 1)
    ]
    assert {(d, t) for _, d, t, _, _ in expected} == {(0, 3), (2, 2)}
    rows = result.massive.to_dict("records")
    assert [(r["site"], r["document"], r["position"], r["dimension"]) for r in rows] == [
        found[:-1] for found in expected
    ]
    for row, (site, d, _, _, value) in zip(rows, expected, strict=True):
        assert_close(row["value"], value, row)
        assert (row["token"], row["token_id"]) == ("5", 5)
        r, columns = reference.documents(mask - 1)[d]
        own = want["passes"][site].block[r, columns].abs().numpy()
        assert_close(row["ratio"], abs(value) / np.median(own), row)
    assert_model(result, {"model": {"m_act": want["model"]["m_act"]}})


@pytest.mark.parametrize("length", [1, 2, 5])
def test_every_missing_figure_has_a_reason(length: int) -> None:
    """Null is never silent, and 0 never stands for it."""
    for name in ("plain", "G1 element", "G1 head-shared", "G5 element", "G3 element"):
        model = decoder(**MODELS[name])
        result = scan(model, torch.randint(0, VOCABULARY, (1, length)))
        assert_explained(result)


def test_a_head_that_adds_nothing_has_no_drain_but_a_reason() -> None:
    model = decoder()
    with torch.no_grad():
        model.layers[1].attention.output.weight[:, :6] = 0
    result = scan(model, torch.randint(0, VOCABULARY, (1, 8)))
    assert result.heads.value_drain.isna().sum() == 1
    assert_explained(result)


FAMILIES = {
    "rank": (*reference.RANK_COLUMNS, "erank_head"),
    "rank of heads": (*reference.RANK_COLUMNS, "erank_head"),
    "gate": ("gate_mean", "gate_std", "gate_median"),
    "gate of heads": ("gate_mean", "gate_std", "gate_median"),
    "skip_error": (),
}


def assert_explained(result: Result) -> None:
    reasons = result.not_measured
    everywhere = set(reasons[reasons.site.isna()].metric)
    for table in ("heads", "layers"):
        frame = getattr(result, table)
        for row in frame.to_dict("records"):
            told = set(reasons[reasons.site == row["site"]].metric) | everywhere
            told |= {column for m in told for column in FAMILIES.get(m, ())}
            told |= {*KEY, "first_token"}  # no figures
            silent = [c for c, v in row.items() if c not in told and pd.isna(v)]
            assert not silent, (table, row["site"], row["head"], silent)


# encoder and decoder


def pairs(side: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source and target tokens with their ids by hand."""
    torch.manual_seed(5)
    found = []
    for lengths, width in (((30, 18, 5), 30), ((33, 7, 33), 33)):
        tokens = torch.randint(0, VOCABULARY, (3, width))
        ids = torch.full((3, width), -1)
        for row, length in enumerate(lengths):
            own = slice(width - length, None) if side == "left" else slice(0, length)
            ids[row, own] = 0
        found += [tokens, ids]
    return found[0], found[1], found[2], found[3]


def test_a_target_without_a_token_is_refused() -> None:
    model, (tokens, _, target, _) = decoder(), pairs("left")
    nothing = torch.zeros_like(target)
    with pytest.raises(InputError, match="no token: its decoder_attention_mask"):
        scan(model, tokens, decoder_tokens=target, decoder_attention_mask=nothing)


@pytest.mark.parametrize("gate", ["none", "G1 element", "G2 head", "G4 head", "G5 element"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_encoder_decoder(gate: str, side: str) -> None:
    """Both stacks and the attention across, padded on either side of either sequence."""
    torch.manual_seed(4)
    config = ModelConfig(
        architecture="encoder-decoder",
        vocab_size=VOCABULARY,
        d_model=16,
        n_layers=2,
        n_heads=2,
        max_length=64,
        positions="sinusoidal",
        bias=True,
        gate=GATES.get(gate, GateConfig()),
    )
    model = EncoderDecoder(config).eval()
    tokens, ids, target, target_ids = pairs(side)
    result = scan(
        model,
        tokens,
        attention_mask=ids + 1,
        decoder_tokens=target,
        decoder_attention_mask=target_ids + 1,
        batch_size=2,
    )
    plain = config.to_dict()
    layers, logits = reference.encoder_decoder(
        model.state_dict(), plain, tokens, ids, target, target_ids
    )
    order = result.layers.site.tolist()
    layers.sort(key=lambda layer: order.index(layer.site))
    want = whole(layers, plain, logits, target, target_ids)
    assert_tables(result, want)
    assert_positions(result, want)
    assert_spectra(result, want)
    assert_gates(result, want)
    assert_explained_kinds(result, want, layers, plain)
    kinds = {row.site: (row.stack, row.kind, row.layer) for row in result.layers.itertuples()}
    assert kinds == {
        **{f"encoder.layers.{i}.attention": ("encoder", "self", i) for i in (0, 1)},
        **{f"decoder.layers.{i}.attention": ("decoder", "self", i) for i in (0, 1)},
        **{f"decoder.layers.{i}.cross_attention": ("decoder", "cross", i) for i in (0, 1)},
    }


def assert_explained_kinds(
    result: Result, want: dict, layers: list[reference.Layer], config: dict
) -> None:
    """The model has a row a kind: self attention of both stacks, and cross attention."""
    assert result.model.kind.tolist() == ["self", "cross"]
    for row in result.model.to_dict("records"):
        own = [x for x in layers if ("cross" in x.site) == (row["kind"] == "cross")]
        model = reference.tables(own, config)["model"]
        assert_row(row, model, [c for c in model if c != "m_act"], row["kind"])
        assert_close(row["ppl"], want["model"]["ppl"], row["kind"])


# what is not computed where nobody asks


class Asked(torch.nn.Module):
    """A model that keeps of how many tokens it was asked for logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.kept = decoder(), []

    def forward(self, tokens: Tensor, logits_to_keep: int = 0) -> Tensor:
        self.kept.append(logits_to_keep)
        return self.model(tokens, logits_to_keep=logits_to_keep)


class AskedAsItWas(Asked):
    def forward(self, tokens: Tensor, num_logits_to_keep: int = 0) -> Tensor:
        return super().forward(tokens, num_logits_to_keep)


@pytest.mark.parametrize("kind", [Asked, AskedAsItWas])
@pytest.mark.parametrize("layers", [None, [-1]])
def test_logits_are_asked_for_where_perplexity_is(
    kind: type[Asked], layers: list[int] | None
) -> None:
    tokens = torch.randint(VOCABULARY, (2, 30))
    for metrics in (["sink"], ["sink", "perplexity"]):
        model = kind()
        result = scan(model, tokens, metrics=metrics, layers=layers)
        wanted = "perplexity" in metrics and layers is None
        assert set(model.kept) == {0 if wanted else 1}
        assert bool(result.model.ppl.notna().all()) is wanted


def test_the_figures_need_no_logits() -> None:
    model, tokens = decoder(), torch.randint(VOCABULARY, (2, 30))
    few = model(tokens, logits_to_keep=1)
    torch.testing.assert_close(few, model(tokens)[:, -1:])
    columns = ["f_attr", "entropy", "max_logit"]
    alone = scan(model, tokens, metrics=("sink", "entropy")).layers[columns]
    pd.testing.assert_frame_equal(alone, scan(model, tokens).layers[columns])


# the edges of the library's own function


def test_a_single_name_or_number_is_a_collection_of_one() -> None:
    model, tokens = decoder(), torch.randint(18, (2, 32))
    result = scan(model, tokens, metrics="sink", layers=1, heads=0)
    assert set(result.layers.layer) == {1}
    assert set(result.heads["head"]) == {0}
    assert result.run["metrics"] == ["sink"]


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="batch_size must be at least 1"):
        scan(decoder(), torch.randint(18, (2, 32)), batch_size=size)


class NoMask(torch.nn.Module):
    """Gives its logits in a dict and takes no attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(tokens)}


def test_a_mask_of_ones_needs_no_model_that_takes_one() -> None:
    tokens = torch.randint(18, (2, 32))
    result = scan(NoMask(), tokens, attention_mask=torch.ones_like(tokens))
    assert result.figure("ppl") is not None
    padded = torch.ones_like(tokens)
    padded[0, -3:] = 0
    with pytest.raises(InputError, match="takes no attention_mask"):
        scan(NoMask(), tokens, attention_mask=padded)


class UnknownGate(torch.nn.Module):
    """One attention layer with a gate that can only be read by comparison; token 0 has value 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.inputs = torch.nn.Linear(16, 48, bias=False)
        self.gate = torch.nn.Parameter(torch.randn(16))  # no map that a gate could be read from
        self.output = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(self.embedding.weight[0])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        heads = [x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.inputs(hidden).chunk(3, -1)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2) * (self.gate * hidden).sigmoid())


@pytest.mark.parametrize("unreadable", [0, 2])
def test_a_gate_that_one_batch_hides_has_no_figure_of_the_others(unreadable: int) -> None:
    torch.manual_seed(4)
    tokens = torch.randint(1, VOCABULARY, (3, 20))
    model = UnknownGate()
    assert scan(model, tokens, batch_size=1).figure("gate_mean") is not None
    tokens[unreadable, 0] = 0  # its attention output is 0
    parts = [Scan(model, ["gate"]) for _ in range(2)]
    parts[0].add(ForwardInputs(tokens[:1], None, None, {}))
    parts[1].add(ForwardInputs(tokens[1:], None, None, {}))
    parts[0].merge(parts[1])
    with pytest.raises(NothingMeasuredError, match="the attention output is 0 somewhere"):
        parts[0].result()
    for size in (1, 2, 3):
        with pytest.raises(NothingMeasuredError, match="the attention output is 0 somewhere"):
            scan(model, tokens, metrics="gate", batch_size=size)


@pytest.mark.parametrize("tokens", ["hello", [[1, 2, 3]], None])
def test_what_is_no_tensor_is_told_how_to_become_one(tokens: object) -> None:
    with pytest.raises(InputError, match=r'tokenizer\(text, return_tensors="pt"\)'):
        scan(torch.nn.Linear(3, 3), tokens)  # type: ignore[arg-type]
