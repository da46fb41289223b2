"""What was found, in sentences: one a kind of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from attnprobe.render.names import layers_text, plural, printable
from attnprobe.render.numbers import known, percent, significant, whole
from attnprobe.render.parts import Part, Row, is_partial, parts, records, where
from attnprobe.result import Result

EPSILON = 0.3
COLLAPSED = 0.03
NEAR, FAR = 0.8, 1.25  # between these a share is "at" its floor


@dataclass(frozen=True)
class Head:
    """A head and a figure of it."""

    part: Part
    layer: int
    number: int
    value: float

    @property
    def place(self) -> tuple[str, str, int, int]:
        return (self.part.stack, self.part.kind, self.layer, self.number)

    @property
    def name(self) -> str:
        return where(self.part, self.layer, self.number)


def identity(result: Result) -> str:
    """ "4 layers × 4 heads · element gate at G1 · 0.22 M parameters", of what is known."""
    about = result.architecture
    facts = []
    if about.get("layers") and about.get("heads"):
        facts.append(f"{_layers(result)} × {plural(about['heads'], 'head')}")
    if about.get("gate"):
        gate = str(about["gate"])
        facts.append("no gate" if gate == "none" else printable(gate))
    if about.get("parameters"):
        facts.append(f"{_count(about['parameters'])} parameters")
    if is_partial(result) and result.run["layers"]:
        facts.append(f"{layers_text(result.run['layers'])} only")
    return " · ".join(facts)


def _layers(result: Result) -> str:
    """ "4 layers", or "2 of 16 layers" where the others have no attention to be measured."""
    count = int(result.architecture["layers"])
    others = len(_places(result.not_measured) - _places(result.layers))
    return f"{count} of {count + others} layers" if others else plural(count, "layer")


def _places(frame: pd.DataFrame) -> set[tuple[str, int]]:
    rows = records(frame[["stack", "layer"]].dropna())
    return {(str(row["stack"]), int(row["layer"])) for row in rows}


def sink(result: Result) -> list[str]:
    """F-Attr against its floor, and how many heads sink."""
    return _by_kind(result, "f_attr", _sink)


def entropy(result: Result) -> list[str]:
    """Mean entropy, the sharpest head, and which heads collapsed."""
    return _by_kind(result, "entropy_norm", _entropy)


def rank(result: Result) -> list[str]:
    """Effective rank of heads and layers against what they could have."""
    return _by_kind(result, "erank", _rank)


def gate(result: Result) -> list[str]:
    """What the gate is and how far it is closed."""
    return _by_kind(result, None, _gate)


def around(result: Result) -> list[str]:
    """Perplexity and the largest activations."""
    facts = []
    if (ppl := result.figure("ppl")) is not None:
        facts.append(f"perplexity {significant(ppl)}")
    if (largest := result.figure("m_act")) is not None:
        facts.append(f"largest activation of a layer {significant(largest)} on average")
    return [", ".join(facts)] if facts else []


def floor_text(value: float, floor: float | None) -> str:
    """ ", 2.9× the floor of 0.074"."""
    if not floor:
        return ""
    ratio, base = value / floor, f"the floor of {significant(floor, 2)}"
    if ratio < NEAR:
        return f", below {base}"
    if ratio <= FAR:
        return f", at {base}"
    return f", {ratio:.1f}× {base}" if ratio < 9.95 else f", {ratio:.0f}× {base}"


def epsilon(result: Result) -> float:
    """The share above which a key counted as a sink."""
    return float(result.run.get("epsilon") or EPSILON)


def _by_kind(
    result: Result, column: str | None, sentence: Callable[[Result, Sequence[Part]], str | None]
) -> list[str]:
    """A sentence for each kind of attention with the figure, named where there are several."""
    kinds: dict[str, list[Part]] = {}
    for part in parts(result):
        if column is None or any(v is not None for v in part.figures(column).values()):
            kinds.setdefault(part.kind, []).append(part)
    found = []
    for kind, own in kinds.items():
        text = sentence(result, own)
        if text is not None:
            several = len({part.kind for part in parts(result)}) > 1
            found.append((f"{kind}-attention: " if several else "") + _scope(result, own) + text)
    return found


def _scope(result: Result, own: Sequence[Part]) -> str:
    layers = {layer for part in own for layer in part.layers}
    if not is_partial(result) or not layers:
        return ""
    return f"{layers_text(layers)}{', on average' if len(layers) > 1 else ''}: "


def _mean(result: Result, own: Sequence[Part], column: str) -> float | None:
    """The model's figure, or the mean over the layers that were measured where there is none."""
    whole = result.figure(column, own[0].kind)
    if whole is not None:
        return whole
    return _average(v for part in own for v in part.figures(column).values())


def _average(values: Iterator[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def heads_of(own: Sequence[Part], column: str) -> list[Head]:
    """All heads in which a figure is known."""
    return [
        Head(part, layer, number, value)
        for part in own
        for layer, heads in part.heads(column).items()
        for number, value in heads
        if value is not None
    ]


def _sink(result: Result, own: Sequence[Part]) -> str | None:
    value = _mean(result, own, "f_attr")
    if value is None:
        return None
    text = f"F-Attr {significant(value, 2)}"
    text += floor_text(value, _mean(result, own, "f_attr_uniform"))
    heads = heads_of(own, "alpha_first")
    if not heads:
        return text
    judged = {head.place for head in heads_of(own, "sink_rate")}
    if not judged and _mean(result, own, "sink_rate") is None:
        return f"{text}; too short to tell which heads sink (highest: {_highest(heads)})"
    short = sum(head.place not in judged for head in heads) if judged else 0
    heads = [head for head in heads if not judged or head.place in judged]
    count = sum(head.value > epsilon(result) for head in heads)
    verb, listed = "sinks" if count == 1 else "sink", _listed(result)
    told = (
        f"{count} of {plural(len(heads), 'head')}{listed} {verb} on the first token (worst"
        if count
        else f"no head{listed} sinks on the first token on average (highest"
    )
    text = f"{text}: {told}: {_highest(heads)})"
    return f"{text}; too short to tell for {plural(short, 'head')} more" if short else text


def _listed(result: Result) -> str:
    """What is said behind "head" where the model has more than are in the tables (--head)."""
    most = result.heads.groupby("site").size().max() if len(result.heads) else 0
    return " listed" if 0 < most < (result.architecture.get("heads") or 0) else ""


def _highest(heads: Sequence[Head]) -> str:
    top = max(heads, key=lambda head: head.value)
    return f"{top.name}, {significant(top.value, 2)}"


def _entropy(result: Result, own: Sequence[Part]) -> str | None:
    nats, share = _mean(result, own, "entropy"), _mean(result, own, "entropy_norm")
    if nats is None or share is None:
        return None
    text = (
        f"entropy {significant(nats)} nats, {significant(share, 2)} of what the visible keys allow"
    )
    without = _mean(result, own, "entropy_nosink")
    if without is not None:
        text += f"; {significant(without)} nats without the first key"
    heads = heads_of(own, "entropy_norm")
    if not heads:
        return text
    low = min(heads, key=lambda h: h.value)
    listed = _listed(result)
    text += f"; sharpest{listed and f'{listed}:'} {low.name} ({significant(low.value, 2)})"
    count = sum(bool(h.value) for h in heads_of(own, "collapsed"))
    if not count:
        return f"{text}; no head{listed} collapsed"
    return f"{text}; {count} of {plural(len(heads), 'head')}{listed} collapsed (below {COLLAPSED})"


def _rank(result: Result, own: Sequence[Part]) -> str | None:
    layer, bound = _mean(result, own, "erank"), _mean(result, own, "rank_bound")
    if layer is None or bound is None:
        return None
    single = is_partial(result) and len({n for part in own for n in part.layers}) == 1
    text = f"{'the' if single else 'a'} layer adds {significant(layer)} effective dimensions"
    text += f" of {whole(bound)} ({percent(_mean(result, own, 'utilisation'))})"
    head = _mean(result, own, "erank_head")
    bounds = {head.value for head in heads_of(own, "rank_bound")}
    if head is not None and len(bounds) == 1:
        text += f", a head {significant(head)} of {whole(bounds.pop())}"
    if heads := heads_of(own, "erank"):
        low = min(heads, key=lambda h: h.value)
        text += f" (least{_listed(result)}: {low.name}, {significant(low.value)})"
    share = _mean(result, own, "mean_share")
    if share is not None:
        text += f"; {percent(share)} of it is one constant vector"
    return text


def _gate(result: Result, own: Sequence[Part]) -> str | None:
    rows = [part.rows("gates") for part in own]
    layers = [frame[frame["head"].isna()] for frame in rows if not frame.empty]
    layers = [frame for frame in layers if not frame.empty]
    if not layers:
        return None
    kinds = dict.fromkeys(gate_name(row) for frame in layers for row in records(frame))

    def average(column: str) -> float | None:
        return _average(known(v) for frame in layers for v in frame[column])

    text = f"{', '.join(kinds)}: mean {significant(average('mean'), 2)}"
    text += f", {percent(average('below_0.1'))} of it below 0.1"
    first, rest = average("gate_first"), average("gate_rest")
    if first is not None and rest is not None:
        text += (
            f"; {significant(first, 2)} on the first token, {significant(rest, 2)} on the others"
        )
    return text


def gate_name(row: Row) -> str:
    """ "element gate at G1 (sigmoid)", with what is not the rule named."""
    extra = [str(row["activation"])]
    if row["source"] == "input-independent":
        extra.append("input-independent")
    if row["mode"] == "additive":
        extra.append("additive")
    return printable(f"{row['granularity']} gate at {row['position']} ({', '.join(extra)})")


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{significant(number / size)} {unit}"
    return str(number)
