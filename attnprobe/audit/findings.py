"""What an audit says: findings with their places, and problems that kept it from judging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["passed", "broken", "waived"]
Level = Literal["off", "warn", "error"]
#: Places that a finding keeps; `rows_broken` counts all.
PLACES = 20


@dataclass(frozen=True)
class Source:
    """Where a rule comes from: a line of a file, or the command line.

    Attributes:
        origin: "config", "preset", "environment", "flag", "baseline" or "code".
        file: the configuration file, None where there is none.
        line: in it, from 1.
        why: where a preset's threshold comes from.
    """

    origin: str = "code"
    file: str | None = None
    line: int = 1
    why: str | None = None


@dataclass(frozen=True)
class Place:
    """A row that matters to a finding; what does not apply is None."""

    stack: Any = None
    kind: Any = None
    layer: Any = None
    head: Any = None
    sample: Any = None
    position: Any = None
    token: Any = None
    value: float | None = None
    before: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Granted:
    """The waiver that a finding was let pass by."""

    reason: str
    expires: str


@dataclass(frozen=True)
class Change:
    """A figure and what it was before, in the baseline or at the step before."""

    before: float | None
    verdict: Literal["unchanged", "regression", "improvement", "change", "new", "lost"]
    against: str


@dataclass(frozen=True)
class Finding:
    """One rule on one checkpoint.

    Attributes:
        checkpoint: what reports call it; no other of the audit is called so.
        name, path, step: what it is called itself, where it lies, when it was saved.
        rule: its id.
        level: "warn" or "error"; only a broken rule of level "error" fails an audit.
        status: "passed", "broken", or "waived" where it was broken and a waiver lets it pass.
        subject: the figure in words, as in `mean of heads.f_attr`.
        table, metric, aggregate: the same, for programs.
        expected: the bounds in words, as in `<= 0.15`.
        found: the figure, of several rows the worst; None where it is missing.
        shown: `found` in words, with the digits it takes to tell it from the bound.
        reason: why the figure is missing, None where it is not.
        places: the rows that broke the rule, worst first, at most `PLACES` of them.
        rows, rows_broken: how many were judged, and how many broke the rule.
        hint: what to do about it.
    """

    checkpoint: str
    name: str
    path: str | None
    step: int | None
    rule: str
    level: Level
    status: Status
    subject: str
    table: str
    metric: str
    aggregate: str
    expected: str
    found: float | None
    shown: str
    reason: str | None
    places: tuple[Place, ...]
    rows: int
    rows_broken: int
    hint: str
    source: Source
    change: Change | None = None
    waiver: Granted | None = None

    @property
    def failed(self) -> bool:
        """Whether this alone fails the audit."""
        return self.status == "broken" and self.level == "error"

    @property
    def message(self) -> str:
        """The finding as a sentence, without the checkpoint and the rule's id."""
        was = ""
        if self.change is not None and self.change.before is not None and self.reason is None:
            was = f", after {self.change.before:.4g} {self.change.against}"
        if self.reason is not None:
            return f"{self.subject} is missing ({self.reason}), expected {self.expected}"
        return f"{self.subject} is {self.shown}{was}, expected {self.expected}"


@dataclass(frozen=True)
class Problem:
    """A checkpoint that could not be judged: unreadable (code 2) or without any figure (code 3)."""

    checkpoint: str
    path: str
    message: str
    code: int
