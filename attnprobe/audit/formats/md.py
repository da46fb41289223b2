"""Markdown: for a comment on a pull request, or for $GITHUB_STEP_SUMMARY."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnprobe.audit.findings import Finding
from attnprobe.audit.formats import words
from attnprobe.audit.report import Report, gravity
from attnprobe.render.names import printable

_ESCAPED = str.maketrans(
    {c: f"\\{c}" for c in r"\`*_[]|~#@"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
)
_MARKS = {
    "error": "❌",
    "warning": "⚠️",
    "waived": "⏸️",
    "passed": "✅",
    "improved": "✅",
    "new": "🆕",
}


def render(report: Report) -> str:
    """A verdict, a table of what is broken, and the rest folded away."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    line = words.verdict(report)
    yield f"### attnprobe audit {'✅' if line.startswith('passed') else '❌'}"
    yield ""
    yield _text(line[0].upper() + line[1:]) + "."
    yield ""
    for problem in report.problems:
        yield f"- ❌ **{_text(problem.checkpoint)}** was not judged: {_text(problem.message)}"
    if report.problems:
        yield ""
    shown = sorted((f for f in report.findings if words.state(f) != "passed"), key=gravity)
    if shown:
        yield from _table(
            ("", "checkpoint", "rule", "expected", "found", "where", "what to do"),
            [_row(f) for f in shown],
        )
    for trend in report.trends:
        yield f"**Trend of {_text(trend.run)}**"
        yield ""
        head = ("step", *trend.metrics)
        yield from _table([_text(h) for h in head], words.trend_rows(trend.metrics, trend.points))
    if report.update is not None:
        yield f"**Baseline {_text(report.update.path)}**"
        yield ""
        yield from (f"- {_text(line)}" for line in report.update.lines)
        told = "written" if report.update.written else f"not written: {report.update.reason}"
        yield f"- {_text(told)}"
        yield ""
    yield from (f"> {_text(note)}\n" for note in report.notes)
    passed = [f for f in report.findings if words.state(f) == "passed"]
    if passed:
        yield f"<details><summary>{len(passed)} passed</summary>"
        yield ""
        yield from _table(("checkpoint", "rule", "expected", "found"), [_kept(f) for f in passed])
        yield "</details>"


def _row(finding: Finding) -> list[str]:
    state = words.state(finding)
    hint = finding.hint
    if finding.waiver is not None:
        hint = f"waived until {finding.waiver.expires}: {finding.waiver.reason}"
    if state in ("improved", "new"):
        hint = "accept it with --update-baseline"
    checkpoint, rule, expected, found = _kept(finding)
    where = _text(words.places(finding))
    return [f"{_MARKS[state]} {state}", checkpoint, rule, expected, found, where, _text(hint)]


def _kept(finding: Finding) -> list[str]:
    return [
        _text(finding.checkpoint),
        _text(finding.rule),
        _text(f"{finding.subject}: {finding.expected}"),
        _text(words.found(finding)),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _text(text: str) -> str:
    return printable(text).translate(_ESCAPED)
