"""An audit from results to its report: judged, held against the baseline, waivers granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from attnprobe.audit import baseline, trend, waivers
from attnprobe.audit.baseline import Update
from attnprobe.audit.findings import Finding, Problem
from attnprobe.audit.globs import fits_result
from attnprobe.audit.judging import judge
from attnprobe.audit.rulebook import RuleBook, known_ids
from attnprobe.audit.trend import Trend
from attnprobe.render.names import labels
from attnprobe.result import Result

NOTHING_MEASURED = 3


@dataclass(frozen=True)
class Report:
    """All that an audit found.

    Attributes:
        checkpoints: names of those that were judged, in order.
        findings: by checkpoint, then by rule.
        problems: checkpoints that were not judged, and comparisons that were refused.
        notes: what the reader should know: void waivers, sites that were not measured.
        trends: of training runs among the checkpoints.
        update: what became of the baseline, None where it was not to be updated.
        presets, config: that the rules come from.
    """

    checkpoints: tuple[str, ...]
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    trends: tuple[Trend, ...] = ()
    update: Update | None = None
    presets: tuple[str, ...] = ()
    config: str | None = None

    @property
    def errors(self) -> list[Finding]:
        """Broken rules that fail the audit."""
        return [f for f in self.findings if f.failed]

    @property
    def warnings(self) -> list[Finding]:
        """Broken rules that do not."""
        return [f for f in self.findings if f.status == "broken" and f.level == "warn"]

    @property
    def waived(self) -> list[Finding]:
        """Broken rules that a waiver lets pass."""
        return [f for f in self.findings if f.status == "waived"]

    @property
    def passed(self) -> list[Finding]:
        """Rules that were kept."""
        return [f for f in self.findings if f.status == "passed"]

    def of(self, checkpoint: str) -> list[Finding]:
        """The findings of a checkpoint, the gravest first."""
        own = [f for f in self.findings if f.checkpoint == checkpoint]
        return sorted(own, key=gravity)


def gravity(finding: Finding) -> int:
    """0 for what fails the audit, then warnings, what is waived, what passed."""
    if finding.status == "broken":
        return 0 if finding.level == "error" else 1
    return 2 if finding.status == "waived" else 3


@dataclass(frozen=True)
class Held:
    """What results are held against.

    Attributes:
        path: of the baseline.
        results: in it, none where it is yet to be written.
        allow_different_input: whether to compare what was measured otherwise.
        update: whether to write the results into it instead.
    """

    path: Path
    results: Sequence[Result]
    allow_different_input: bool = False
    update: bool = False


def audit(
    results: Sequence[Result],
    book: RuleBook,
    *,
    problems: Sequence[Problem] = (),
    held: Held | None = None,
    today: date | None = None,
) -> Report:
    """Judges results by their rules and against a baseline.

    A result without a single figure is not judged but is a problem (exit code 3). A baseline that
    is to be updated is written only if no rule of level "error" is broken.

    Raises:
        InputError: a waiver is for no rule, the baseline cannot be written.
    """
    watched = baseline.watches(book.loaded)
    ids = [*known_ids(book), *(w.rule().id for w in watched), f"{baseline.PREFIX}present"]
    waivers.check(book.loaded, ids)
    measured = [r for r in results if r.measured]
    unmeasured = [_unmeasured(r) for r in results if not r.measured]
    findings = judge(measured, book.rules_of)
    refused: list[Problem] = []
    if held is not None and not held.update:
        compared = baseline.compare(measured, held.results, watched, held.allow_different_input)
        findings += compared.findings
        refused = [_refused(r, why, held.path) for r, why in compared.refused]
    findings, notes = waivers.grant(findings, book.loaded.config.waivers, today or date.today())
    report = Report(
        checkpoints=tuple(labels(measured)),
        findings=tuple(findings),
        problems=(*problems, *unmeasured, *refused),
        notes=(*notes, *_gaps(measured), *_unjudged(measured, findings), *_idle(book, measured)),
        trends=tuple(trend.of(measured, book.rules)),
        presets=book.presets,
        config=None if book.loaded.path is None else str(book.loaded.path),
    )
    if held is not None and held.update:
        report = replace(report, update=_updated(report, measured, held, watched))
    return report


def _updated(
    report: Report, results: Sequence[Result], held: Held, watched: Sequence[baseline.Watch]
) -> Update:
    lines = tuple(baseline.changes(results, held.results, watched))
    reason = None
    if report.errors:
        reason = "a rule is broken: mend it, or waive it with a reason, then update again"
    elif not results:
        reason = "there is no result to write"
    elif all(line.endswith("it was not audited") for line in lines) and held.results:
        reason = "nothing changes"
    else:
        baseline.write(held.path, results, held.results)
    return Update(str(held.path), lines, reason is None, reason)


def _unmeasured(result: Result) -> Problem:
    reasons = list(dict.fromkeys(result.not_measured["reason"].dropna().astype(str)))
    said = "; ".join(reasons[:3]) or "the result holds no figure"
    path = result.checkpoint.get("path") or ""
    return Problem(
        labels([result])[0], str(path), f"nothing could be measured: {said}", NOTHING_MEASURED
    )


def _refused(result: Result, why: str, path: Path) -> Problem:
    message = (
        f"not compared with {path}, which was measured otherwise ({why}): measure both alike, "
        "update the baseline, or add --allow-different"
    )
    return Problem(labels([result])[0], str(result.checkpoint.get("path") or ""), message, 2)


def _gaps(results: Sequence[Result]) -> list[str]:
    """Sites that no figure speaks of: a rule over all layers holds for the others only."""
    notes = []
    for name, result in zip(labels(results), results, strict=True):
        rows = result.not_measured
        whole = rows[(rows["metric"] == "all").fillna(False).astype(bool)]
        reasons = Counter(str(reason) for reason in whole["reason"])
        for reason, count in reasons.items():
            site = "site was" if count == 1 else "sites were"
            notes.append(f"{name}: {count} {site} not measured and not judged: {reason}")
    return notes


def _unjudged(results: Sequence[Result], findings: Sequence[Finding]) -> list[str]:
    judged = {f.checkpoint for f in findings}
    return [f"{name}: no rule is for it" for name in labels(results) if name not in judged]


def _idle(book: RuleBook, results: Sequence[Result]) -> list[str]:
    """Rules whose globs fit nothing: a slip in one would pass for a rule that is kept."""
    return [
        f"the rule {rule.id} is for {', '.join(rule.checkpoints)}, and no checkpoint is called so"
        for rule in book.rules
        if rule.checkpoints is not None
        and not any(fits_result(rule.checkpoints, result) for result in results)
    ]


def codes(report: Report) -> list[int]:
    """Every exit code that the report gives cause for; the gravest is for the caller to choose."""
    found = [problem.code for problem in report.problems]
    if report.errors:
        found.append(1)
    if not report.checkpoints and not found:
        found.append(NOTHING_MEASURED)
    return found
