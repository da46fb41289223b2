"""CSV: a finding a row, problems with the state `problem`."""

from __future__ import annotations

import csv
import io

from attnprobe.audit.formats import words
from attnprobe.audit.report import Report

COLUMNS = (
    *("checkpoint", "path", "step", "rule", "level", "state", "table", "metric", "aggregate"),
    *("expected", "found", "before", "reason", "where", "rows", "rows_broken", "hint", "source"),
)


def render(report: Report) -> str:
    """Comma-separated, with a head; numbers keep every digit."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for f in report.findings:
        writer.writerow(
            {
                **{name: getattr(f, name) for name in COLUMNS if hasattr(f, name)},
                "state": words.state(f),
                "before": None if f.change is None else f.change.before,
                "where": words.places(f, len(f.places)),
                "source": words.origin(f),
            }
        )
    for p in report.problems:
        writer.writerow(
            {"checkpoint": p.checkpoint, "path": p.path, "state": "problem", "reason": p.message}
        )
    return out.getvalue()
