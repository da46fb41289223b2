"""JUnit XML: a suite a checkpoint, a case a rule. GitLab, Jenkins and the like show it."""

from __future__ import annotations

import io

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from attnprobe.audit.findings import Finding, Problem
from attnprobe.audit.formats import words
from attnprobe.audit.report import Report
from attnprobe.render.names import printable


def render(report: Report) -> str:
    """The XML; warnings are cases that pass, with what was found as their output."""
    xml = JUnitXml("attnprobe audit")
    for name in report.checkpoints:
        suite = TestSuite(printable(name))
        for finding in report.of(name):
            suite.add_testcase(_case(finding))
        xml.add_testsuite(suite)
    if report.problems:
        suite = TestSuite("not judged")
        for problem in report.problems:
            suite.add_testcase(_problem(problem))
        xml.add_testsuite(suite)
    xml.update_statistics()
    # junitparser counts them on the root too, where the schema has no place for it
    xml._elem.attrib.pop("skipped", None)
    out = io.BytesIO()
    xml.write(out, pretty=True)
    return out.getvalue().decode("utf-8").rstrip() + "\n"


def _case(finding: Finding) -> TestCase:
    case = TestCase(printable(finding.rule), f"attnprobe.{printable(finding.checkpoint)}", 0.0)
    state = words.state(finding)
    if state == "error":
        failure = Failure(printable(finding.message), "rule")
        failure.text = _told(finding)
        case.result = [failure]
    elif state == "waived" and finding.waiver is not None:
        until = f"waived until {finding.waiver.expires}: {finding.waiver.reason}"
        case.result = [Skipped(printable(f"{finding.message}; {until}"), "waiver")]
    else:
        case.system_out = f"{state}: {_told(finding)}"
    return case


def _problem(problem: Problem) -> TestCase:
    case = TestCase(printable(problem.checkpoint), "attnprobe.not judged", 0.0)
    case.result = [Error(printable(problem.message), "checkpoint")]
    return case


def _told(finding: Finding) -> str:
    where = words.places(finding, len(finding.places))
    lines = [finding.message, f"at {where}" if where else "", finding.hint, words.origin(finding)]
    return "\n".join(printable(line) for line in lines if line)
