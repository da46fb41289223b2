"""What several formats say in the same words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from attnprobe.audit.findings import Finding, Place
from attnprobe.audit.report import Report
from attnprobe.render.names import plural, printable, token_text

SHOWN = 3


def verdict(report: Report) -> str:
    """The whole report in one line."""
    failed = {f.checkpoint for f in report.errors} | {p.checkpoint for p in report.problems}
    everything = {*report.checkpoints, *failed}
    counts = [
        plural(len(some), noun)
        for some, noun in ((report.errors, "error"), (report.warnings, "warning"))
        if some
    ]
    counts += [f"{len(report.waived)} waived"] if report.waived else []
    counts += [plural(len(report.problems), "problem")] if report.problems else []
    told = f" ({', '.join(counts)})" if counts else ""
    if failed:
        return f"failed: {len(failed)} of {plural(len(everything), 'checkpoint')}{told}"
    if not everything:
        return "failed: there was nothing to judge"
    return f"passed: {plural(len(everything), 'checkpoint')}{told}"


def place(where: Place, kinds: bool = False) -> str:
    """A row in words: `layer 3, head 2`, `layer 1, position 0, token <s>`.

    The usual, self-attention in a decoder, goes without saying unless `kinds` is set.
    """
    parts = []
    if where.stack not in (None, "decoder"):
        parts.append(printable(where.stack))
    if where.kind is not None and (kinds or where.kind != "self"):
        parts.append(printable(where.kind))
    if where.sample is not None:
        parts.append(f"document {where.sample}")
    if where.layer is not None:
        parts.append(f"layer {where.layer}")
    if where.head is not None:
        parts.append(f"head {where.head}")
    if where.position is not None and not isinstance(where.position, str):
        parts.append(f"position {where.position}")
    if where.token is not None:
        parts.append(f"token {token_text(where.token)}")
    return ", ".join(parts)


def places(finding: Finding, shown: int = SHOWN) -> str:
    """Where a finding is, worst first: `layer 3, head 2 (0.98); … and 5 more`. Empty if nowhere."""
    kinds = len({p.kind for p in finding.places}) > 1
    there = [(p, place(p, kinds)) for p in finding.places[:shown]]
    said = [_with_value(finding, p, text) for p, text in there if text]
    if not said:
        return ""
    more = max(finding.rows_broken, len(finding.places)) - len(said)
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")


def _with_value(finding: Finding, where: Place, text: str) -> str:
    is_said = finding.rows == 1 and finding.aggregate == "each"
    if is_said or finding.metric in ("position", "layer", "head"):
        return text
    value = "missing" if where.value is None else f"{where.value:.4g}"
    before = "" if where.before is None else f"{where.before:.4g} -> "
    return f"{text} ({before}{value})"


def found(finding: Finding) -> str:
    """What was found, in a cell."""
    if finding.reason is not None:
        return f"missing: {finding.reason}"
    change = finding.change
    if change is None or change.before is None:
        return finding.shown
    return f"{change.before:.4g} -> {finding.shown}"


def state(finding: Finding) -> str:
    """The status in a word: error, warning, waived, or passed, improved, new and so on."""
    if finding.status == "broken":
        return "error" if finding.level == "error" else "warning"
    if finding.status == "passed" and finding.change is not None:
        return {"improvement": "improved", "new": "new"}.get(finding.change.verdict, "passed")
    return finding.status


def in_repository(file: str) -> Path:
    """A file as services that show source want it: relative to the repository, else absolute.

    The repository is $GITHUB_WORKSPACE where the file lies in it, else the working folder.
    """
    path = Path(file).absolute()
    for root in (os.environ.get("GITHUB_WORKSPACE"), str(Path.cwd())):
        if root and path.is_relative_to(root):
            return path.relative_to(root)
    return path


def origin(finding: Finding) -> str:
    """Where the rule was written: `attnprobe.toml:12`, `preset`, `flag`."""
    source = finding.source
    if source.file is not None and source.origin in ("config", "preset", "baseline"):
        return f"{source.file}:{source.line}"
    return source.origin


def trend_rows(metrics: Sequence[str], points: Sequence[object]) -> list[list[str]]:
    """The cells of a trend's table, a row a checkpoint."""
    return [
        [
            f"{point.step}",  # type: ignore[attr-defined]
            *(_number(point.figures[m]) for m in metrics),  # type: ignore[attr-defined]
        ]
        for point in points
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
