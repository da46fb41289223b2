"""What a column means to an audit: which way is bad, what changes are noise, what to do about it.

Tolerances are for two measurements on the same input in the same dtype: they let pass what another
kernel or machine may do to a figure, and a step of training that changes nothing of note.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from attnprobe.result import INTEGERS, KEY, TABLES, TEXT

Better = Literal["lower", "higher", "same"]

LISTED = 12  # words that a line can name
ALL = "attnprobe audit --list-rules"
#: Tables whose rows are finds: that there is none is a figure too, once it was looked for.
EVENTS = {
    "sinks": ("layers", "f_attr", "sink"),
    "massive": ("layers", "m_act", "activation"),
}


@dataclass(frozen=True)
class Figure:
    """What is known of a column.

    Attributes:
        better: which way is an improvement; "same" where any change is only a change.
        absolute, relative: changes up to the larger of `absolute` and `relative` times the old
            value are noise.
        too_high, too_low: what to do about it.
    """

    better: Better
    absolute: float
    relative: float
    too_high: str
    too_low: str = "see docs/definitions.md for what this figure means"


_SINK = (
    "heads rest on the first token: gate the attention output (--gate G1), train from scratch with "
    "it, or accept it and keep that token in every cache"
)
_RANK = (
    "heads write into few directions: read it beside mean_share and value_drain; a sink that is "
    "not drained does this, a gate at G1 undoes it"
)
_DIFFUSE = (
    "attention is wider than expected: where it is close to uniform, has the layer been trained, "
    "is the scale of the logits right"
)
_SHARP = (
    "attention is sharper than expected: fine for an induction head, a sign of entropy collapse "
    "where a whole layer looks at one key each; try QK norm, a lower learning rate, longer warm-up"
)
_OPEN = "the gate hardly closes: train longer, lower its bias at the start, or give it the query"
_SHUT = "the gate is all but shut: heads write nothing; check its bias and its learning rate"
_OUTLIERS = (
    "outliers of the residual stream: keep this layer in higher precision, smooth it, or train "
    "with a gate at G1"
)
_LOSS = "check that the input is what the checkpoint was trained on, then the training run itself"

FIGURES: dict[str, Figure] = {
    "f_attr": Figure("lower", 0.01, 0.05, _SINK),
    "f_attr_uniform": Figure("same", 1e-6, 0.0, "this is set by length and mask: check the input"),
    "alpha_first": Figure("lower", 0.01, 0.05, _SINK),
    "sink_rate": Figure("lower", 0.02, 0.05, _SINK),
    "first4": Figure(
        "lower",
        0.01,
        0.05,
        "keep the first four tokens in the cache (StreamingLLM), or take a model with a gate at G1",
    ),
    "null_mass": Figure("same", 0.01, 0.05, "learned sink logits take this attention"),
    "value_drain": Figure(
        "same",
        0.05,
        0.10,
        "the first token's value is large: its sink writes into the residual stream",
        "the first token's value is drained: its sink is an idle head",
    ),
    "entropy": Figure("same", 0.02, 0.02, _DIFFUSE, _SHARP),
    "entropy_norm": Figure("same", 0.01, 0.02, _DIFFUSE, _SHARP),
    "entropy_p05": Figure("same", 0.02, 0.05, _DIFFUSE, _SHARP),
    "entropy_p50": Figure("same", 0.02, 0.05, _DIFFUSE, _SHARP),
    "entropy_p95": Figure("same", 0.02, 0.05, _DIFFUSE, _SHARP),
    "entropy_nosink": Figure("same", 0.02, 0.02, _DIFFUSE, _SHARP),
    "max_logit": Figure(
        "lower",
        0.5,
        0.05,
        "logits grow: clip them (QK-Clip), soft-cap them, or normalise queries and keys",
    ),
    "collapsed": Figure("lower", 1.0, 0.0, _SHARP),  # one head may sit on the threshold
    "erank": Figure("higher", 0.5, 0.03, "more directions than expected", _RANK),
    "erank_centered": Figure("higher", 0.5, 0.03, "more directions than expected", _RANK),
    "erank_head": Figure("higher", 0.5, 0.03, "more directions than expected", _RANK),
    "stable_rank": Figure("higher", 0.1, 0.05, "more directions than expected", _RANK),
    "participation": Figure("higher", 0.1, 0.05, "more directions than expected", _RANK),
    "num_rank": Figure("higher", 1.0, 0.01, "more directions than expected", _RANK),
    "rank_bound": Figure("same", 0.0, 0.0, "set by tokens and widths: check the input"),
    "utilisation": Figure("higher", 0.01, 0.03, "more directions than expected", _RANK),
    "mean_share": Figure("lower", 0.01, 0.05, _RANK),
    "gate_mean": Figure("same", 0.01, 0.05, _OPEN, _SHUT),
    "gate_std": Figure("same", 0.01, 0.05, "the gate varies more than expected", _OPEN),
    "gate_median": Figure("same", 0.01, 0.05, _OPEN, _SHUT),
    "m_act": Figure("lower", 0.1, 0.05, _OUTLIERS),
    "ppl": Figure("lower", 0.0, 0.01, _LOSS),
    "nll": Figure("lower", 0.01, 0.01, _LOSS),
    "mean": Figure("same", 0.01, 0.05, _OPEN, _SHUT),
    "std": Figure("same", 0.01, 0.05, "the gate varies more than expected", _OPEN),
    "median": Figure("same", 0.01, 0.05, _OPEN, _SHUT),
    "below_0.1": Figure("same", 0.02, 0.05, _SHUT, _OPEN),
    "from_0.1_to_0.3": Figure("same", 0.02, 0.05, _SHUT, _OPEN),
    "from_0.4_to_0.6": Figure("same", 0.02, 0.05, _OPEN, _SHUT),
    "from_0.7_to_0.9": Figure("same", 0.02, 0.05, _OPEN, _SHUT),
    "above_0.9": Figure("same", 0.02, 0.05, _OPEN, _SHUT),
    "gate_first": Figure("same", 0.02, 0.05, _OPEN, _SHUT),
    "gate_rest": Figure("same", 0.02, 0.05, _OPEN, _SHUT),
    **{
        f"skippable_1e-{n}": Figure("same", 0.01, 0.05, "more can be skipped than expected", _OPEN)
        for n in (3, 2, 1)
    },
    **{
        f"skip_error_1e-{n}": Figure(
            "lower", 0.001, 0.05, "skip fewer heads: take a smaller threshold"
        )
        for n in (3, 2, 1)
    },
    "alpha": Figure("lower", 0.02, 0.05, _SINK),
    "alpha_max": Figure("lower", 0.02, 0.05, _SINK),
    "sigma": Figure("same", 1e-3, 0.02, "see docs/definitions.md#rank", _RANK),
    "value": Figure("lower", 1.0, 0.05, _OUTLIERS),
    "ratio": Figure("lower", 1.0, 0.05, _OUTLIERS),
}
_COUNTED = {
    "sinks": Figure("lower", 0.0, 0.0, "tokens that draw attention: keep them in every cache"),
    "massive": Figure("lower", 0.0, 0.0, _OUTLIERS),
}
_UNKNOWN = Figure("same", 0.0, 0.01, "see docs/definitions.md for what this figure means")

#: What each metric of a scan is needed for; a column it does not name has its family here.
FAMILIES: dict[str, tuple[str, ...]] = {
    "sink": (
        *("f_attr", "f_attr_uniform", "alpha_first", "sink_rate", "first4", "null_mass"),
        *("value_drain", "alpha", "alpha_max", "sinks", "positions"),
    ),
    "entropy": (
        *("entropy", "entropy_norm", "entropy_p05", "entropy_p50", "entropy_p95"),
        *("entropy_nosink", "max_logit", "collapsed"),
    ),
    "rank": (
        *("erank", "erank_centered", "erank_head", "stable_rank", "participation", "num_rank"),
        *("mean_share", "rank_bound", "utilisation", "sigma", "spectra"),
    ),
    "gate": ("gate_mean", "gate_std", "gate_median", "gates"),
    "activation": ("m_act", "massive"),
    "perplexity": ("ppl", "nll"),
}


def figure(table: str, column: str) -> Figure:
    """What is known of a column; of those that only place or count a row, what a find means."""
    if table in _COUNTED and column not in ("alpha", "alpha_max", "value", "ratio"):
        return _COUNTED[table]
    return FIGURES.get(column, _UNKNOWN)


def family(table: str, column: str) -> str | None:
    """The metric of a scan that measures a column, None where several have a part in it."""
    for name, members in FAMILIES.items():
        if table in members or column in members:
            return name
    return None


def is_number(table: str, column: str) -> bool:
    """Whether a column holds numbers that a bound can be put to."""
    return column not in TEXT and (table, column) != ("gates", "position")


def columns(table: str) -> list[str]:
    """The columns of a table that a rule may name, those first that are figures."""
    keys = (*KEY, *INTEGERS)
    figures = [c for c in TABLES[table] if c not in keys and c not in ("histogram", "edges")]
    return [*figures, *(c for c in TABLES[table] if c in keys and c not in figures)]


def finds(table: str) -> tuple[str, str, str] | None:
    """Where it shows that a table of finds was measured: table, column and metric."""
    return EVENTS.get(table)


def did_you_mean(word: str, choices: Iterable[str], elsewhere: str = "") -> str:
    """ "; did you mean 'f_attr'?", or what there is to choose from, for an unknown word.

    Args:
        word: what was written.
        choices: what it might be.
        elsewhere: what lists all of them, where they are too many for a line.
    """
    choices = list(dict.fromkeys(choices))
    near = _near(word, choices)
    known = ", ".join(choices[:LISTED])
    if len(choices) > LISTED:
        known += f" and {len(choices) - LISTED} more"
    if near:
        guess = f"; did you mean {' or '.join(map(repr, near))}?"
        return f"{guess} {elsewhere} lists all" if elsewhere else guess
    if elsewhere:
        return f"; {elsewhere} lists all"
    return f"; choose from {known}" if choices else ""


def _near(word: str, choices: Sequence[str]) -> list[str]:
    """The choice that a word is closest to, or those that it is the everyday name of."""
    plain = {_plain(choice): choice for choice in reversed(choices)}
    close = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    named = [c for c in FAMILIES.get(word.casefold(), ()) if c in choices]
    return list(dict.fromkeys([*named[:1], *(plain[name] for name in close)]))


def _plain(word: str) -> str:
    """A word as someone might write it: F-Attr is f_attr."""
    return word.casefold().replace("-", "_").replace(" ", "_")
