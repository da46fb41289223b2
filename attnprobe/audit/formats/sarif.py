"""SARIF 2.1.0, for code scanning. Every result points to the line of its rule in the configuration,
or to the checkpoint where the rule comes from no file."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from attnprobe._version import __version__
from attnprobe.audit.findings import Finding, Problem
from attnprobe.audit.formats import structure, words
from attnprobe.audit.report import Report, gravity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
UNJUDGED = "not-judged"


def render(report: Report) -> str:
    """One run; rules that were kept are listed as rules but have no result."""
    rules = _rules(report)
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    shown = sorted((f for f in report.findings if f.status != "passed"), key=gravity)
    results = [_result(f, index[f.rule]) for f in shown]
    results += [_unjudged(p, index[UNJUDGED]) for p in report.problems]
    run = {
        "tool": {"driver": {"name": "attnprobe", "version": __version__, "rules": rules}},
        "invocations": [
            {
                "executionSuccessful": not report.problems,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": f"{p.checkpoint}: {p.message}"}}
                    for p in report.problems
                ],
            }
        ],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    data = structure.finite({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _rules(report: Report) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for f in report.findings:
        about = f"{f.subject} {f.expected}"
        rule = found.setdefault(
            f.rule,
            {
                "id": f.rule,
                "shortDescription": {"text": about},
                "fullDescription": {"text": f"{about}. {f.source.why or ''}".strip()},
                "defaultConfiguration": {"level": _level(f)},
            },
        )
        if f.hint:
            rule.setdefault("help", {"text": f.hint})
    if report.problems:
        told = "A checkpoint could not be judged"
        found[UNJUDGED] = {"id": UNJUDGED, "shortDescription": {"text": told}}
    return list(found.values())


def _result(finding: Finding, index: int) -> dict[str, Any]:
    where = words.places(finding)
    text = f"{finding.checkpoint}: {finding.message}"
    text += f", at {where}" if where else ""
    file = finding.source.file or finding.path or finding.checkpoint
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _level(finding),
        "message": {"text": f"{text}. {finding.hint}"},
        "locations": [_location(file, finding.source.line if finding.source.file else 1)],
        "partialFingerprints": _fingerprint(finding.rule, finding.checkpoint),
        "properties": {
            "checkpoint": finding.checkpoint,
            "expected": finding.expected,
            "found": finding.found,
            "reason": finding.reason,
        },
    }
    if finding.waiver is not None:
        told = f"{finding.waiver.reason} (until {finding.waiver.expires})"
        result["suppressions"] = [{"kind": "external", "justification": told}]
    return result


def _unjudged(problem: Problem, index: int) -> dict[str, Any]:
    return {
        "ruleId": UNJUDGED,
        "ruleIndex": index,
        "level": "error",
        "message": {"text": f"{problem.checkpoint}: {problem.message}"},
        "locations": [_location(problem.path or problem.checkpoint, 1)],
        "partialFingerprints": _fingerprint(UNJUDGED, problem.checkpoint),
    }


def _location(file: str, line: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": _artifact(file), "region": {"startLine": line}}
    return {"physicalLocation": place}


def _artifact(file: str) -> dict[str, str]:
    """A path in the repository relative to it, as code scanning wants it; else a file URI."""
    path = words.in_repository(file)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}


def _fingerprint(rule: str, checkpoint: str) -> dict[str, str]:
    """What tells results apart that are on the same line: GitHub goes by this key alone."""
    digest = hashlib.sha256(f"{rule}\n{checkpoint}".encode(errors="replace")).hexdigest()
    return {"primaryLocationLineHash": f"{digest[:16]}:1"}


def _level(finding: Finding) -> str:
    return "error" if finding.level == "error" else "warning"
