"""The verdict: checkpoints gathered, judged against rules and a baseline, reported.

    from attnprobe import load_results
    from attnprobe.audit import Rule, judge

    for finding in judge(load_results("results.json"), [Rule(metric="f_attr", max=0.15)]):
        print(finding.checkpoint, finding.status, finding.message)

Nothing here imports torch; `gather` measures checkpoints in processes of their own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnprobe.audit.findings import Finding, Problem
    from attnprobe.audit.judging import judge
    from attnprobe.audit.report import Report, audit
    from attnprobe.audit.rules import Rule
    from attnprobe.audit.runner import GatherOptions, gather

_LAZY = {
    "Finding": "findings",
    "GatherOptions": "runner",
    "Problem": "findings",
    "Report": "report",
    "Rule": "rules",
    "audit": "report",
    "gather": "runner",
    "judge": "judging",
}

__all__ = [
    "Finding",
    "GatherOptions",
    "Problem",
    "Report",
    "Rule",
    "audit",
    "gather",
    "judge",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnprobe.audit' has no attribute {name!r}")
    return getattr(import_module(f"attnprobe.audit.{_LAZY[name]}"), name)
