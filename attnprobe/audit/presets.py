"""Rules that come with attnprobe, and where each threshold comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PAPER = "gated-attention paper (15A2B MoE)"
SUN = "Sun et al. 2024, Massive Activations"
GU = "Gu et al., ICLR 2025"
XIAO = "Xiao et al. 2023, StreamingLLM"


@dataclass(frozen=True)
class PresetRule:
    """A rule, and why its threshold is what it is."""

    keys: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Preset:
    """Rules for a purpose; their ids are `<preset>/<rule>`."""

    name: str
    about: str
    rules: Mapping[str, PresetRule]

    def entries(self) -> dict[str, dict[str, Any]]:
        """The keys of every rule, by id."""
        return {f"{self.name}/{n}": dict(rule.keys) for n, rule in self.rules.items()}


_HEALTH = Preset(
    "health",
    "What any trained transformer keeps, gated or not: nothing collapsed, nothing that overflows.",
    {
        "collapse": PresetRule(
            {"metric": "entropy_norm", "min": 0.03},
            "a head below 0.03 counts as collapsed (docs/definitions.md); a whole model below it "
            "is the entropy collapse of Zhai et al. 2023",
        ),
        "layer-collapse": PresetRule(
            {"table": "layers", "metric": "entropy_norm", "min": 0.03, "level": "warn"},
            "the same for a layer; one that rests on a sink altogether comes close to it",
        ),
        "collapsed-heads": PresetRule(
            {
                "table": "heads",
                "metric": "collapsed",
                "aggregate": "share",
                "max": 0.25,
                "level": "warn",
            },
            "our choice: induction heads are sharp too, but a quarter of all heads is many",
        ),
        "uniform": PresetRule(
            {"metric": "entropy_norm", "aggregate": "max", "max": 0.98, "level": "warn"},
            "our choice: 1 is attention that looks at nothing in particular, as before training",
        ),
        "rank-collapse": PresetRule(
            {"table": "layers", "metric": "utilisation", "min": 0.01},
            "Dong et al. 2021: attention alone drives the output of a layer to rank 1; "
            "1 % of the directions there is room for is our choice",
        ),
        "overflow": PresetRule(
            {"table": "layers", "metric": "m_act", "kind": "self", "max": 65504},
            "the largest number of float16",
        ),
    },
)
_GATED = Preset(
    "gated",
    "A gate that does its work: no sink, no massive activation, and values of the gate that vary.",
    {
        "f-attr": PresetRule(
            {"metric": "f_attr", "max": 0.15},
            f"{PAPER}: 0.048 (element) and 0.073 (head) with a gate at G1, 0.467 without, 0.297 "
            "and more with gates that leave the sink; 0.15 is twice the one and half the other",
        ),
        "sink-rate": PresetRule(
            {"metric": "sink_rate", "max": 0.2},
            f"{GU}: 77-99 % of the heads of ungated models have a sink; a fifth is our choice",
        ),
        "gate-mean": PresetRule(
            {"metric": "gate_mean", "min": 0.005, "max": 0.5},
            f"{PAPER}: mean 0.116 (element) and 0.172 (head), and a gate held in [0.5, 1] leaves "
            "the sink (F-Attn 0.451); a sigmoid starts at 0.5. Below 0.005, our choice, attention "
            "is switched off",
        ),
        "massive": PresetRule(
            {"table": "massive", "metric": "value", "aggregate": "count", "max": 0},
            f"{SUN}: above 100 and 1,000 times the median; {PAPER}: largest activation 94 "
            "(element) and 98 (head) with a gate, 1053 without",
        ),
    },
)
_QUANTIZATION = Preset(
    "quantization",
    "Activations that a low-precision format can hold without outliers taking its whole range.",
    {
        "massive": PresetRule(
            {"table": "massive", "metric": "value", "aggregate": "count", "max": 0},
            f"{SUN}: above 100 and 1,000 times the median; one such number sets the scale of a "
            "whole tensor",
        ),
        "m-act": PresetRule(
            {"table": "layers", "metric": "m_act", "kind": "self", "max": 100},
            f"{SUN}: 100 is where massive begins; {PAPER}: 94 and 98 with a gate, 1053 without",
        ),
        "sinks": PresetRule(
            {"metric": "f_attr", "max": 0.3, "level": "warn"},
            "Bondarenko et al. 2023: heads that rest on a sink are what grows outliers; "
            f"{PAPER}: 0.297 with a gate at G2, whose largest activation was 125; 0.467 and 1053 "
            "without",
        ),
    },
)
_KV_CACHE = Preset(
    "kv-cache",
    "A cache of recent tokens alone loses little: no attention rests on tokens that it evicts.",
    {
        "first-tokens": PresetRule(
            {"metric": "first4", "max": 0.3},
            f"{XIAO}: a window breaks models whose first four tokens carry the attention, and "
            "works again once it keeps these; 0.3 is the mass from which Gu et al. speak of a sink",
        ),
        "late-sinks": PresetRule(
            {
                "table": "sinks",
                "metric": "position",
                "aggregate": "count",
                "above": 3,
                "max": 0,
                "level": "warn",
            },
            f"{XIAO}: four initial tokens are kept; a sink behind them (positions count from 0) is "
            "evicted all the same. Heads that look for a token are found by this, too",
        ),
    },
)

PRESETS: dict[str, Preset] = {p.name: p for p in (_HEALTH, _GATED, _QUANTIZATION, _KV_CACHE)}
#: What is judged where nobody says what.
DEFAULT = "health"
