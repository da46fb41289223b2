"""JSON lines: a finding a line, then the problems, told apart by `type`."""

from __future__ import annotations

import json

from attnprobe.audit.formats import structure
from attnprobe.audit.report import Report


def render(report: Report) -> str:
    """One object a line; nothing at all where there is nothing to say."""
    lines = [{"type": "finding", **structure.finding(f)} for f in report.findings]
    lines += [{"type": "problem", **structure.problem(p)} for p in report.problems]
    return "".join(
        json.dumps(structure.finite(line), ensure_ascii=False, allow_nan=False) + "\n"
        for line in lines
    )
