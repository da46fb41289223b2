"""A result file that figures are held against: what got worse, what got better, what is new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnprobe.audit import figures
from attnprobe.audit.config import Baseline, Loaded
from attnprobe.audit.figures import did_you_mean
from attnprobe.audit.findings import Change, Finding, Source
from attnprobe.audit.judging import Verdict, changed, finding_of
from attnprobe.audit.rules import Rule, Step
from attnprobe.audit.selection import select
from attnprobe.errors import InputError
from attnprobe.render.names import labels
from attnprobe.result import TABLES, Result, load_results, save_results

#: Figures of the model that are watched unless the file says otherwise.
WATCHED = (
    *("f_attr", "sink_rate", "entropy_norm", "collapsed", "erank", "erank_head", "mean_share"),
    *("gate_mean", "m_act", "ppl"),
)
PREFIX = "baseline/"


@dataclass(frozen=True)
class Watch:
    """A figure to hold against the baseline.

    Attributes:
        room: the change that is noise.
        better: which way is an improvement.
        named: whether the file asks for it; then it may not be missing on either side.
    """

    table: str
    metric: str
    room: Step
    better: figures.Better
    level: Any
    named: bool
    source: Source

    def rule(self, kind: str | None = None) -> Rule:
        """The watch as a rule on changes for the worse."""
        return Rule(
            id=PREFIX + (self.metric if self.table == "model" else f"{self.table}.{self.metric}"),
            table=self.table,  # type: ignore[arg-type]
            metric=self.metric,
            kind=kind,  # type: ignore[arg-type]
            max_increase=None if self.better == "higher" else self.room,
            max_decrease=None if self.better == "lower" else self.room,
            level=self.level,
            source=self.source,
        )


def read(path: Path) -> list[Result]:
    """The baseline.

    Raises:
        InputError: there is none, or it is no result file.
    """
    if not path.is_file():
        raise InputError(f"there is no baseline {path}: --update-baseline writes one")
    return load_results(path)


def watches(loaded: Loaded, metrics: Sequence[str] = WATCHED) -> list[Watch]:
    """What is held against the baseline: the usual figures, and those the file names.

    Raises:
        InputError: the file names a figure that there is not.
    """
    table: Baseline = loaded.config.baseline
    names = list(dict.fromkeys([*metrics, *table.metrics]))
    return [_watch(loaded, name, named=name in table.metrics) for name in names]


def _watch(loaded: Loaded, name: str, named: bool) -> Watch:
    where = ("baseline", "metrics", name)
    table, dot, metric = name.partition(".")
    if not dot or table not in ("model", "layers", "heads"):
        table, metric = "model", name
    choices = figures.columns(table)
    if metric not in TABLES[table] or not figures.is_number(table, metric):
        wrong = did_you_mean(metric, choices, figures.ALL)
        raise loaded.fault(where, f"there is no figure {metric!r} in the table {table}{wrong}")
    known = figures.figure(table, metric)
    given = loaded.config.baseline.metrics.get(name)
    better = (given.better if given else None) or known.better
    room = Step(known.absolute, known.relative)
    if given is not None and (given.absolute, given.relative) != (None, None):
        room = Step(given.absolute or 0.0, given.relative or 0.0)
    level = (given.level if given else None) or ("warn" if better == "same" else "error")
    source = loaded.source(*(where if named else ("baseline",)), origin="baseline")
    return Watch(table, metric, room, better, level, named, source)


@dataclass(frozen=True)
class Comparison:
    """Results held against a baseline.

    Attributes:
        findings: one a checkpoint and figure.
        refused: by the name of a checkpoint, why it was not compared.
    """

    findings: tuple[Finding, ...]
    refused: tuple[tuple[Result, str], ...]


def compare(
    results: Sequence[Result],
    baseline: Sequence[Result],
    watched: Sequence[Watch],
    allow_different_input: bool = False,
) -> Comparison:
    """Holds every result against that of the same name, or against the only one there is.

    A checkpoint that the baseline does not have breaks a rule; one that was measured on other
    tokens, in another dtype or on another kind of device is refused unless that is allowed.
    """
    findings: list[Finding] = []
    refused = []
    for label, result in zip(labels(results), results, strict=True):
        old = counterpart(result, baseline, alone=len(results) == 1)
        if old is None:
            findings.append(_absent(label, result, baseline, watched))
            continue
        reason = None if allow_different_input else why_different(result, old)
        if reason is not None:
            refused.append((result, reason))
            continue
        findings += [f for watch in watched for f in _held(label, result, old, watch)]
    return Comparison(tuple(findings), tuple(refused))


def counterpart(result: Result, baseline: Sequence[Result], alone: bool) -> Result | None:
    """The result to compare with."""
    same = [old for old in baseline if old.name == result.name]
    if same:
        return same[0]
    return baseline[0] if alone and len(baseline) == 1 else None


def why_different(now: Result, before: Result) -> str | None:
    """What keeps two results from being compared, None where they were measured alike."""
    sides = (now, before)
    facts = {
        "tokens (sha256)": [_short(r.input.get("sha256")) for r in sides],
        "length": [r.input.get("length") for r in sides],
        "dtype": [r.run.get("dtype") for r in sides],
        "device": [str(r.run.get("device") or "").partition(":")[0] or None for r in sides],
        "epsilon": [r.run.get("epsilon", 0.3) for r in sides],
        "ranks before the gate": [r.run.get("pre_gate", False) for r in sides],
    }
    if facts["tokens (sha256)"] == [None, None]:
        return "neither says on which tokens it was measured"
    apart = [f"{name} {a}, baseline {b}" for name, (a, b) in facts.items() if a != b]
    return "; ".join(apart) or None


def _short(digest: Any) -> str | None:
    return None if digest is None else str(digest)[:12]


def _held(label: str, now: Result, before: Result, watch: Watch) -> list[Finding]:
    """One finding, or one for each kind of attention where the model has several."""
    kinds: list[str | None] = [None]
    if watch.table == "model":
        both = dict.fromkeys([*now.model["kind"].dropna(), *before.model["kind"].dropna()])
        kinds = list(both) if len(both) > 1 else [None]
    found = []
    for kind in kinds:
        rule = watch.rule(kind)
        if rule.level == "off":
            continue
        verdict = _verdict(watch, rule, now, before)
        if verdict is not None:
            found.append(finding_of(label, rule, now, verdict))
    return found


def _verdict(watch: Watch, rule: Rule, now: Result, before: Result) -> Verdict | None:
    missing = [not _is_there(result, rule) for result in (now, before)]
    if all(missing) and not watch.named:
        return None  # a gate's mean of a model without a gate is no news
    if missing == [False, True] and not watch.named:
        rows = select(now, rule)
        value = float(rows.values[0]) if len(rows.values) == 1 else None
        return Verdict(value, rows=len(rows.values), change=Change(None, "new", "in the baseline"))
    verdict = changed(rule, now, before, rule.max_increase, rule.max_decrease, "in the baseline")
    if missing == [True, False]:
        return replace(verdict, change=Change(_single(before, rule), "lost", "in the baseline"))
    if verdict.change is None:
        return verdict
    if verdict.broken:
        word: Any = "change" if watch.better == "same" else "regression"
        return replace(verdict, change=replace(verdict.change, verdict=word))
    gain = changed(rule, now, before, rule.max_decrease, rule.max_increase, "in the baseline")
    if gain.broken:
        better = replace(verdict.change, before=_before(gain), verdict="improvement")
        return replace(verdict, found=gain.found, change=better)
    return verdict


def _before(verdict: Verdict) -> float | None:
    return None if verdict.change is None else verdict.change.before


def _is_there(result: Result, rule: Rule) -> bool:
    rows = select(result, rule)
    return rows.problem is None and len(rows.values) > 0 and rows.all_there


def _single(result: Result, rule: Rule) -> float | None:
    rows = select(result, rule)
    return float(rows.values[0]) if len(rows.values) == 1 else None


def _absent(
    label: str, result: Result, baseline: Sequence[Result], watched: Sequence[Watch]
) -> Finding:
    """The finding of a checkpoint that the baseline does not have."""
    names = [old.name for old in baseline]
    source = watched[0].source if watched else Source("baseline")
    rule = Rule(
        id=f"{PREFIX}present",
        metric="f_attr",
        max=1.0,
        source=source,
        hint="accept it with --update-baseline",
    )
    reason = f"the baseline has no {result.name!r}{did_you_mean(result.name, names)}"
    finding = finding_of(label, rule, result, Verdict(None, broken=1, reason=reason))
    return replace(finding, subject="the baseline's entry", expected="one to compare with")


@dataclass(frozen=True)
class Update:
    """What `--update-baseline` did.

    Attributes:
        path: of the baseline.
        lines: what changes, in words.
        written: whether it was; not where nothing changes or a rule is broken.
        reason: why it was not written.
    """

    path: str
    lines: tuple[str, ...]
    written: bool
    reason: str | None = None


def changes(
    results: Sequence[Result], baseline: Sequence[Result], watched: Sequence[Watch]
) -> list[str]:
    """What the new baseline would say that the old one does not, line by line."""
    lines = []
    for label, result in zip(labels(results), results, strict=True):
        old = next((b for b in baseline if b.name == result.name), None)
        if old is None:
            lines.append(f"{label}: added")
            continue
        why = why_different(result, old)
        if why is not None:
            lines.append(f"{label}: measured otherwise: {why}")
        for watch in watched:
            for finding in _held(label, result, old, watch):
                lines += _line(label, finding)
        if result.to_dict() != old.to_dict() and not any(
            line.startswith(f"{label}: ") for line in lines
        ):
            lines.append(f"{label}: measured anew, no figure moved beyond its tolerance")
    kept = [old.name for old in baseline if old.name not in {r.name for r in results}]
    lines += [f"{name}: kept as it was, it was not audited" for name in kept]
    return lines


def _line(label: str, finding: Finding) -> list[str]:
    change = finding.change
    if finding.reason is not None:
        return [f"{label}: {finding.subject} is missing now ({finding.reason})"]
    if change is None or change.verdict == "unchanged":
        return []
    before = "–" if change.before is None else f"{change.before:.6g}"
    return [f"{label}: {finding.subject} {before} -> {finding.shown} ({change.verdict})"]


def merged(results: Sequence[Result], baseline: Sequence[Result]) -> list[Result]:
    """The new baseline: old entries in their order, replaced where they were audited, then new."""
    fresh = {result.name: result for result in results}
    kept = [fresh.pop(old.name, old) for old in baseline]
    return [*kept, *fresh.values()]


def write(path: Path, results: Sequence[Result], baseline: Sequence[Result]) -> None:
    """Writes the new baseline, whole or not at all.

    Raises:
        InputError: two results have the same name, or it cannot be written.
    """
    names = Counter(result.name for result in results)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise InputError(f"several results are called {twice[0]!r}: a baseline takes one of a name")
    save_results(merged(results, baseline), path)
