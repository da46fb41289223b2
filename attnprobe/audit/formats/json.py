"""JSON: everything, for other programs. docs/audit.md describes it."""

from __future__ import annotations

import json

from attnprobe.audit.formats import structure
from attnprobe.audit.report import Report


def render(report: Report) -> str:
    """One object."""
    data = structure.whole(report)
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
