"""A rule: a bound on a column of a table of results, checked when it is made."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from attnprobe.audit import figures
from attnprobe.audit.findings import Level, Source
from attnprobe.audit.selection import MIXED
from attnprobe.result import TABLES

Scope = Literal["model", "layer", "head"]
Aggregate = Literal["each", "mean", "max", "min", "p05", "p50", "p95", "count", "share"]
Table = Literal[
    "model",
    "layers",
    "heads",
    "samples",
    "sinks",
    "positions",
    "gates",
    "spectra",
    "massive",
]
_OF_SCOPE = {"model": "model", "layer": "layers", "head": "heads"}


def _indices(value: Any) -> Any:
    """`"0-3,-1"`, 2 or [0, 1] as a list."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    numbers: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:\s*-\s*(\d+))?\s*", part, re.ASCII)
        if match is None or (match[2] and not 0 <= int(match[1]) <= int(match[2]) < 100_000):
            raise ValueError(f'{part.strip()!r} is no range: write 3, "0-3" or "0-3,-1"')
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return numbers


def _globs(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Step:
    """The largest change that is let pass, absolute or as a share of the value before."""

    absolute: float = 0.0
    relative: float = 0.0

    def room(self, before: float) -> float:
        """How far a figure may move from `before`."""
        return max(self.absolute, self.relative * abs(before))

    def __str__(self) -> str:
        parts = [f"{self.absolute:g}"] if self.absolute or not self.relative else []
        return " or ".join([*parts, *([f"{100 * self.relative:g}%"] if self.relative else [])])


def _step(value: Any) -> Any:
    """0.1, or "10%" of the value before."""
    if isinstance(value, Step):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        step = Step(absolute=float(value))
    elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s*%", value.strip(), re.ASCII):
        step = Step(relative=float(value.strip().rstrip("%")) / 100)
    else:
        raise ValueError('write a number, or a share of the value before such as "10%"')
    if not (math.isfinite(step.absolute) and step.absolute >= 0):
        raise ValueError("must be a finite number, 0 or more")
    return step


Indices = Annotated[list[int], BeforeValidator(_indices)]
Globs = Annotated[list[str], BeforeValidator(_globs)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Limit = Annotated[Any, BeforeValidator(_step)]


class Rule(BaseModel):
    """A bound on a figure.

    Raises:
        pydantic.ValidationError: unknown keys, metrics or tables, or bounds that make no rule.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    metric: str = Field(description="a column of the table, as in docs/definitions.md")
    table: Table = Field(
        default="model",
        description="model, layers, heads, samples, sinks, positions, gates, spectra or massive",
    )
    scope: Scope | None = Field(
        default=None,
        description="model, layer or head: names the table model, layers or heads; with the "
        "tables gates and spectra it chooses between their rows of layers and of heads",
    )
    aggregate: Aggregate = Field(
        default="each",
        description="each: every row keeps the bounds. Else the bounds are for one number: mean, "
        "max, min, p05, p50 or p95 of the rows, how many there are (count), or what share (share)",
    )
    min: Number | None = Field(default=None, description="smallest value that is fine")
    max: Number | None = Field(default=None, description="largest value that is fine")
    above: Number | None = Field(
        default=None, description="for count and share: only rows with a larger value"
    )
    below: Number | None = Field(
        default=None, description="for count and share: only rows with a smaller value"
    )
    max_increase: Limit | None = Field(
        default=None,
        description="largest increase from one checkpoint of a run to the next, as a number or "
        'as a share such as "10%"',
    )
    max_decrease: Limit | None = Field(default=None, description="largest decrease, likewise")
    layers: Indices | None = Field(
        default=None, description='only these, as 3, [0, 1] or "0-3,-1"; -1 is the last'
    )
    heads: Indices | None = Field(default=None, description="only these, likewise")
    kind: Literal["self", "cross"] | None = Field(
        default=None, description="only this kind of attention"
    )
    stack: str | None = Field(default=None, description="only this stack, as in decoder")
    checkpoints: Globs | None = Field(
        default=None, description="only checkpoints whose name or path matches one of these globs"
    )
    level: Level = Field(
        default="error", description="error fails the audit, warn is shown, off is not judged"
    )
    hint: str | None = Field(default=None, description="what to do about it, instead of our words")
    id: str = Field(
        default="",
        pattern=r"^[^\s\x00-\x1f\x7f]*$",
        description="a name for reports, overrides and waivers; with the id of a preset's rule "
        "the keys given here replace those of the preset, the others stay",
    )
    source: Source = Field(default=Source(), exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _table_of_scope(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        scope, table = data.get("scope"), data.get("table")
        if scope in _OF_SCOPE and table is None:
            return {**data, "table": _OF_SCOPE[scope]}
        return data

    @model_validator(mode="after")
    def _makes_sense(self) -> Rule:
        fault = _fault(self)
        if fault:
            raise ValueError(fault)
        if not self.id:
            object.__setattr__(self, "id", default_id(self))
        return self

    @property
    def is_trend(self) -> bool:
        """Whether it bounds changes along a run instead of values."""
        return self.max_increase is not None or self.max_decrease is not None

    @property
    def subject(self) -> str:
        """The figure in words."""
        name = f"{self.table}.{self.metric}"
        if self.aggregate == "each":
            return name
        beyond = [f"> {self.above:g}"] if self.above is not None else []
        beyond += [f"< {self.below:g}"] if self.below is not None else []
        which = f" {' and '.join(beyond)}" if beyond else ""
        return f"{self.aggregate} of {name}{which}"

    @property
    def expected(self) -> str:
        """The bounds in words."""
        if self.is_trend:
            if self.max_increase == self.max_decrease:
                return f"a change of at most {self.max_increase}"
            parts = [("rise", self.max_increase), ("fall", self.max_decrease)]
            said = [f"a {word} of at most {step}" for word, step in parts if step is not None]
            return " and ".join(said)
        return _between(self.min, self.max)


def default_id(rule: Rule) -> str:
    """What a rule without a name is called."""
    parts = [rule.table, rule.metric, *([] if rule.aggregate == "each" else [rule.aggregate])]
    return ".".join([*parts, *(["trend"] if rule.is_trend else [])])


def _between(least: float | None, most: float | None) -> str:
    if least is None:
        return f"<= {most:.12g}"
    return f">= {least:.12g}" if most is None else f"between {least:.12g} and {most:.12g}"


def _fault(rule: Rule) -> str | None:
    """Why a rule makes no sense, None where it does."""
    table, metric = rule.table, rule.metric
    if metric not in TABLES[table]:
        wrong = figures.did_you_mean(metric, figures.columns(table), figures.ALL)
        elsewhere = [t for t in TABLES if metric in figures.columns(t) and t != "not_measured"]
        also = f" ({metric} is a column of {', '.join(elsewhere)})" if elsewhere else ""
        return f"metric: there is no {metric!r} in the table {table}{also}{wrong}"
    if not figures.is_number(table, metric) or metric in ("histogram", "edges"):
        return f"metric: {metric!r} holds no numbers; choose another column of {table}"
    if rule.scope is not None and table not in MIXED and _OF_SCOPE[rule.scope] != table:
        return f"scope: {rule.scope!r} does not go with the table {table}; leave out one of them"
    if rule.scope == "model" and table in MIXED:
        return f"scope: the table {table} has rows of layers and heads only"
    return _fault_of_bounds(rule) or _fault_of_rows(rule)


def _fault_of_bounds(rule: Rule) -> str | None:
    if rule.is_trend and (rule.min is not None or rule.max is not None):
        return "min and max are for values, max_increase and max_decrease for changes: make it two"
    if not rule.is_trend and rule.min is None and rule.max is None:
        return "it has no bound: give min, max, max_increase or max_decrease"
    if rule.min is not None and rule.max is not None and rule.min > rule.max:
        return f"min: {rule.min:g} is above max, {rule.max:g}"
    if (rule.above is not None or rule.below is not None) and rule.aggregate not in (
        "count",
        "share",
    ):
        return 'above and below choose what is counted: set aggregate to "count" or "share"'
    return None


def _fault_of_rows(rule: Rule) -> str | None:
    has = TABLES[rule.table]
    for name, value in (("layers", rule.layers), ("heads", rule.heads), ("stack", rule.stack)):
        column = name.rstrip("s") if name != "stack" else name
        if value is not None and column not in has:
            return f"{name}: the rows of the table {rule.table} are of no {column}"
        if value == []:
            return f"{name}: it names none"
    if rule.heads is not None and rule.table in MIXED and rule.scope != "head":
        return f'heads: the table {rule.table} is judged by layer unless scope = "head"'
    return None
