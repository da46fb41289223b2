"""Checkpoints side by side: each figure's difference to the first, and whether one can be seen.

A difference is judged by a bootstrap over samples: documents are drawn again with replacement,
both checkpoints are pooled over the same draw where they were shown the same input, and the
interval is that of the middle 95 % of the differences. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pandas as pd

from attnprobe.bootstrap import Draws, draw
from attnprobe.errors import InputError
from attnprobe.result import Result

if TYPE_CHECKING:
    from attnprobe.audit.foreseeing import Foreseen

RESAMPLES = 2000
CONFIDENCE = 0.95
FEW_SAMPLES = 10  # below this an interval is rough
FLAG = "--allow-different"

STACKED = "ranks describe all tokens together, not samples"
LARGEST = "the largest activation is not kept by sample"
NOT_KEPT = "not kept by sample"
TOO_FEW = "too few samples have it"
ONE_SAMPLE = "there is one sample only"


@dataclass(frozen=True)
class Figure:
    """A line of the comparison.

    Attributes:
        metric: its column in the tables of a result.
        label: what people call it.
        bound: the column of what it is held against: F-Attr's floor, a rank's upper bound.
        no_interval: why it has no interval, None if it has one.
    """

    metric: str
    label: str
    bound: str | None = None
    no_interval: str | None = None


FIGURES = (
    Figure("f_attr", "F-Attr", "f_attr_uniform"),
    Figure("sink_rate", "sink rate"),
    Figure("entropy_norm", "entropy / ln n"),
    Figure("erank", "layer erank", "rank_bound", STACKED),
    Figure("erank_head", "head erank", "head_rank_bound", STACKED),
    Figure("gate_mean", "gate mean"),
    Figure("below_0.1", "gate below 0.1", no_interval=NOT_KEPT),
    Figure("m_act", "M-Act", no_interval=LARGEST),
    Figure("ppl", "perplexity"),
)
#: The columns of both tables of a comparison.
COLUMNS = (
    *("checkpoint", "reference", "stack", "kind", "layer", "metric", "value", "bound"),
    *("difference", "low", "high", "seen", "ratio", "ratio_low", "ratio_high", "no_interval"),
)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Figures of several results, their differences to the first, and how sure these are.

    Attributes:
        results: what was compared, the reference first.
        names: a distinct name for each.
        model: a row a checkpoint, kind of attention and figure, with `COLUMNS`: `difference` and
            `ratio` to the first, `low` and `high` of the difference, `seen` False where these
            span zero, `no_interval` the reason where there are none; null for the first itself.
        layers: the same for every attention layer.
        confidence: of the intervals.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        paired: for each result, whether it was shown the same documents as the first.
        samples: the documents of each.
        different: why this would have been refused; empty where it would not.
    """

    results: list[Result]
    names: list[str]
    model: pd.DataFrame
    layers: pd.DataFrame
    confidence: float
    resamples: int
    seed: int
    paired: list[bool]
    samples: list[int]
    different: list[str]


def compare(
    results: Sequence[Result],
    *,
    allow_different: bool = False,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Comparison:
    """Compares results to the first of them.

    An interval lies between the quantiles (1 - confidence) / 2 and (1 + confidence) / 2 of the
    difference over all draws (Efron's percentile interval); `attnprobe.bootstrap` has the formula.

    Args:
        results: two or more.
        allow_different: compare what was measured on different inputs or with other options, too.
        resamples: how many.
        confidence: of the intervals, between 0 and 1.
        seed: the same seed gives the same intervals.

    Raises:
        InputError: fewer than two results, or they cannot be compared; the line says why.
    """
    if len(results) < 2:
        one = "only one result" if results else "no result"
        raise InputError(f"there is {one} to compare: give two different ones or more")
    names = _names(results)
    reasons = [
        reason
        for result, name in zip(results[1:], names[1:], strict=True)
        for reason in differences(results[0], result, names[0], name)
    ]
    if reasons and not allow_different:
        raise InputError(f"{'; '.join(reasons)}: measure them alike, or give {FLAG}")
    draws = [Draws(result) for result in results]
    paired = [
        _same_input(results[0], result) and own.samples == draws[0].samples
        for result, own in zip(results, draws, strict=True)
    ]
    draw(draws, paired, resamples, seed)
    figures = [list(_figures(result)) for result in results]
    rows = [
        row
        for number in range(len(results))
        for row in _rows(number, names, figures, draws, confidence)
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table = table.astype({"layer": "Int64", "seen": "boolean", "no_interval": object})
    floats = [c for c in COLUMNS[6:] if c not in ("seen", "no_interval")]
    table[floats] = table[floats].astype("float64")
    is_layer = table["layer"].notna()
    return Comparison(
        results=list(results),
        names=names,
        model=table[~is_layer].reset_index(drop=True),
        layers=table[is_layer].reset_index(drop=True),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        paired=paired,
        samples=[own.samples for own in draws],
        different=reasons,
    )


def _names(results: Sequence[Result]) -> list[str]:
    from attnprobe.render.names import labels

    return labels(results)


# what can be compared


class Shown(Protocol):
    """What a result says of its input; of one that is still to be measured, what is foreseen."""

    @property
    def checkpoint(self) -> dict[str, Any]: ...
    @property
    def input(self) -> dict[str, Any]: ...
    @property
    def run(self) -> dict[str, Any]: ...


def refuse_different(foreseen: Sequence[Foreseen | None]) -> None:
    """Refuses checkpoints that cannot be compared, before minutes are spent on measuring them.

    Args:
        foreseen: of every result or checkpoint, None where nothing is known yet.

    Raises:
        InputError: they will be measured on different inputs, or with other options.
    """
    first, others = (foreseen[0], foreseen[1:]) if foreseen else (None, ())
    if first is None:
        return
    reasons = [
        reason
        for other in filter(None, others)
        for reason in differences(first, other, first.name, other.name, is_measured=False)
    ]
    if reasons:
        raise InputError(f"{'; '.join(reasons)}: measure them alike, or give {FLAG}")


def differences(
    first: Shown, other: Shown, first_name: str, name: str, *, is_measured: bool = True
) -> list[str]:
    """Why two results say little about each other, a clause each; none if they do.

    Args:
        first, other: what they were shown.
        first_name, name: of them.
        is_measured: whether they are results; of what is foreseen, what is not known is no reason.
    """
    ours, theirs = first.input, other.input
    told: list[str] = []
    was = "was" if is_measured else "would be"

    def unlike(what: str, a: Any, b: Any) -> None:
        told.append(f"{name} {was} measured with another {what} than {first_name} ({b}, not {a})")

    for known in (_tokenizer, _fingerprint):
        a, b = known(first), known(other)
        if a is not None and b is not None and a != b:
            unlike("tokenizer", a, b)
            break
    if ours.get("length") != theirs.get("length"):
        unlike("length", *(f"{v.get('length')} tokens" for v in (ours, theirs)))
    if not told and not _same_input(first, other):
        unknown = [n for n, v in ((first_name, ours), (name, theirs)) if not v.get("sha256")]
        if unknown and is_measured:
            told.append(f"{' and '.join(unknown)} does not say what it was measured on")
        elif not unknown:
            a, b = _described(first), _described(other)
            told.append(
                f"{name} {was} measured on another input than {first_name} "
                f"({f'{b}; not {a}' if a != b else f'other tokens, though both {a}'})"
            )
    for option, flag in (("epsilon", "--epsilon"), ("pre_gate", "--pre-gate")):
        values = first.run.get(option), other.run.get(option)
        if None not in values and values[0] != values[1]:
            unlike(flag, *values)
    return told


def _tokenizer(result: Shown) -> str | None:
    """What turned text into ids, in words; None where the result does not say."""
    kind = result.checkpoint.get("task")
    size = (result.checkpoint.get("config") or {}).get("vocab_size")
    return f"{kind} of {size} ids" if kind and size else None


def _fingerprint(result: Shown) -> str | None:
    """The hash of a tokenizer, where the result has one: two of a kind and size may differ."""
    value = result.checkpoint.get("tokenizer")
    return None if value is None else str(value)[:12]


def _same_input(first: Shown, other: Shown) -> bool:
    digests = first.input.get("sha256"), other.input.get("sha256")
    return digests[0] == digests[1] and digests[0] is not None


def _described(result: Shown) -> str:
    about = result.input
    seed = f", seed {about['seed']}" if about.get("seed") is not None else ""
    samples, length = about.get("samples"), about.get("length")
    size = f"samples: {samples}" if length is None else f"{samples} × {length} tokens"
    return f"{about['source']}, {size}{seed}" if about.get("source") else f"{size}{seed}"


# the figures


@dataclass(frozen=True)
class _Value:
    """A figure of a model (site "") or a layer, in one result."""

    figure: Figure
    site: str
    stack: str | None
    kind: str
    layer: int | None
    value: float | None
    bound: float | None

    @property
    def place(self) -> tuple[Any, ...]:
        """Where its like is found in another result: layers go by number, not by module path."""
        return self.figure.metric, self.stack, self.kind, self.layer


def _figures(result: Result) -> Iterator[_Value]:
    """The figures of the model by kind of attention, then those of its layers."""
    closed = result.gates[result.gates["head"].isna()]
    bounds = result.heads.groupby("site", dropna=False)["rank_bound"].mean()
    for number, row in enumerate(_records(result.model)):
        kind = str(row["kind"])
        own = closed[closed["kind"] == kind]["below_0.1"]
        row["below_0.1"] = own.mean() if len(own) else None
        heads = result.heads[result.heads["kind"] == kind]["rank_bound"]
        row["head_rank_bound"] = heads.mean() if heads.notna().any() else None
        for figure in FIGURES:
            if figure.metric != "ppl" or not number:  # the model's, whatever kinds it has
                yield _value(figure, row, "", None, kind, None)
    for row in _records(result.layers):
        own = closed[closed["site"] == row["site"]]["below_0.1"]
        row["below_0.1"] = own.iloc[0] if len(own) else None
        row["head_rank_bound"] = bounds.get(row["site"])
        for figure in FIGURES:
            if figure.metric != "ppl":
                where = str(row["site"]), str(row["stack"]), str(row["kind"]), int(row["layer"])
                yield _value(figure, row, *where)


def _value(
    figure: Figure, row: dict[str, Any], site: str, stack: str | None, kind: str, layer: int | None
) -> _Value:
    bound = None if figure.bound is None else _known(row.get(figure.bound))
    return _Value(figure, site, stack, kind, layer, _known(row.get(figure.metric)), bound)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _known(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _rows(
    number: int,
    names: Sequence[str],
    figures: Sequence[Sequence[_Value]],
    draws: Sequence[Draws],
    confidence: float,
) -> Iterator[dict[str, Any]]:
    """The rows of one result; its difference to the first where it is another."""
    first = {value.place: value for value in figures[0]}
    for value in figures[number]:
        row: dict[str, Any] = {
            "checkpoint": names[number],
            "reference": names[0],
            "stack": value.stack,
            "kind": value.kind,
            "layer": value.layer,
            "metric": value.figure.metric,
            "value": value.value,
            "bound": value.bound,
        }
        like = first.get(value.place)
        if number and like and like.value is not None and value.value is not None:
            row["difference"] = value.value - like.value
            row["ratio"] = value.value / like.value if like.value else None
            row |= _interval(value, like, draws[0], draws[number], confidence)
        yield row


def _interval(
    value: _Value, like: _Value, ours: Draws, theirs: Draws, confidence: float
) -> dict[str, Any]:
    """The bounds of the difference, or why there are none."""
    if value.figure.no_interval:
        return {"no_interval": value.figure.no_interval}
    a, b = _drawn(like, ours), _drawn(value, theirs)  # (R,) each
    if a is None or b is None:
        return {"no_interval": NOT_KEPT}
    if min(ours.samples, theirs.samples) < 2:
        return {"no_interval": ONE_SAMPLE}
    tails = (1 - confidence) / 2, (1 + confidence) / 2
    there = np.isfinite(a) & np.isfinite(b)  # a draw may miss the few documents that count
    if there.mean() < confidence:
        return {"no_interval": TOO_FEW}
    a, b = a[there], b[there]
    low, high = _quantiles(b - a, tails)
    found = {"low": low, "high": high, "seen": not low <= 0 <= high}
    if (a > 0).all():
        found["ratio_low"], found["ratio_high"] = _quantiles(b / a, tails)
    return found


def _drawn(value: _Value, draws: Draws) -> np.ndarray | None:
    assert value.value is not None
    return draws.figure(value.figure.metric, value.kind, value.site, value.value)


def _quantiles(values: np.ndarray, at: tuple[float, float]) -> tuple[float, float]:
    low, high = np.quantile(values, at)
    return float(low), float(high)
