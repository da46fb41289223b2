"""Annotations of GitHub Actions: workflow commands on stdout, gravest first.

GitHub shows ten errors and ten warnings a step; the md and sarif formats hold all.
"""

from __future__ import annotations

from attnprobe.audit.findings import Finding, Problem
from attnprobe.audit.formats import words
from attnprobe.audit.report import Report, gravity


def render(report: Report) -> str:
    """A command a line for what is broken, and the verdict as a notice."""
    broken = [f for f in report.findings if f.status == "broken"]
    lines = [_problem(p) for p in report.problems]
    lines += [_finding(f) for f in sorted(broken, key=gravity)]
    lines += [command("notice", note, title="attnprobe audit") for note in report.notes]
    lines.append(command("notice", words.verdict(report), title="attnprobe audit"))
    return "".join(f"{line}\n" for line in lines)


def command(kind: str, message: str, **properties: str | int) -> str:
    """`::error file=…,line=…::message`, with all that could end it early escaped."""
    given = ",".join(f"{name}={_property(str(value))}" for name, value in properties.items())
    return f"::{kind}{' ' if given else ''}{given}::{_data(message)}"


def _finding(finding: Finding) -> str:
    kind = "error" if finding.level == "error" else "warning"
    where = words.places(finding)
    message = f"{finding.checkpoint}: {finding.message}"
    message += f"\nat {where}" if where else ""
    message += f"\n{finding.hint}"
    title = f"attnprobe {finding.rule}"
    if finding.source.file is not None:
        file = words.in_repository(finding.source.file).as_posix()
        return command(kind, message, file=file, line=finding.source.line, title=title)
    return command(kind, message, title=title)


def _problem(problem: Problem) -> str:
    message = f"{problem.checkpoint}: {problem.message}"
    return command("error", message, title="attnprobe: not judged")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
