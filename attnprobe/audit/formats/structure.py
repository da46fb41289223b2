"""A report as plain dicts and lists, for JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from attnprobe._version import __version__
from attnprobe.audit.findings import Finding, Problem
from attnprobe.audit.formats import words
from attnprobe.audit.report import Report

SCHEMA = 1


def whole(report: Report) -> dict[str, Any]:
    """The JSON file; strict, no number in it is NaN or infinite."""
    data = {
        "schema": SCHEMA,
        "tool": {"name": "attnprobe", "version": __version__, "python": sys.version.split()[0]},
        "verdict": words.verdict(report),
        "presets": list(report.presets),
        "config": report.config,
        "counts": {
            "checkpoints": len(report.checkpoints),
            "errors": len(report.errors),
            "warnings": len(report.warnings),
            "waived": len(report.waived),
            "passed": len(report.passed),
            "problems": len(report.problems),
        },
        "checkpoints": list(report.checkpoints),
        "findings": [finding(f) for f in report.findings],
        "problems": [problem(p) for p in report.problems],
        "notes": list(report.notes),
        "trends": [asdict(trend) for trend in report.trends],
        "baseline": None if report.update is None else asdict(report.update),
    }
    plain: dict[str, Any] = _finite(data)
    return plain


def finding(one: Finding) -> dict[str, Any]:
    """A finding; `message` says all of it in words."""
    entry = asdict(one)
    entry["message"] = one.message
    entry["state"] = words.state(one)
    entry["places"] = [
        {k: v for k, v in place.items() if v is not None} for place in entry["places"]
    ]
    return entry


def problem(one: Problem) -> dict[str, Any]:
    """A checkpoint that was not judged."""
    return asdict(one)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


def finite(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same with null for what is no finite number."""
    plain: dict[str, Any] = _finite(value)
    return plain
