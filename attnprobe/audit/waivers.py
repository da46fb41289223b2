"""Waivers: broken rules that are known of and let pass until a day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase

from attnprobe.audit.config import Loaded, Waiver
from attnprobe.audit.figures import did_you_mean
from attnprobe.audit.findings import Finding, Granted
from attnprobe.audit.globs import fits


def check(loaded: Loaded, ids: Sequence[str]) -> None:
    """Makes sure that every waiver is for a rule that there is.

    Raises:
        InputError: one is not.
    """
    for number, waiver in enumerate(loaded.config.waivers):
        if not any(fnmatchcase(name, waiver.rule) for name in ids):
            raise loaded.fault(
                ("waivers", number, "rule"),
                f"there is no rule {waiver.rule!r}{did_you_mean(waiver.rule, ids)}",
            )


def grant(
    findings: Sequence[Finding], waivers: Sequence[Waiver], today: date
) -> tuple[list[Finding], list[str]]:
    """Lets broken rules pass for which a waiver holds; gives notes on those that do not.

    A waiver holds to the end of the day it names.
    """
    valid = [w for w in waivers if today <= w.expires]
    notes = [
        f"the waiver of {w.rule} for {', '.join(w.checkpoints)} expired on {w.expires}: it is void "
        f"({w.reason})"
        for w in waivers
        if today > w.expires
    ]
    used: set[int] = set()
    judged = []
    for finding in findings:
        if finding.status == "broken":
            number = next((n for n, w in enumerate(valid) if _is_for(w, finding)), None)
            if number is not None:
                used.add(number)
                given = Granted(valid[number].reason, valid[number].expires.isoformat())
                finding = replace(finding, status="waived", waiver=given)
        judged.append(finding)
    for n, w in enumerate(valid):
        if n not in used:
            met = any(fits(w.checkpoints, finding.name, finding.path) for finding in findings)
            why = "was not needed" if met else "is for no checkpoint that was judged"
            notes.append(f"the waiver of {w.rule} for {', '.join(w.checkpoints)} {why}")
    return judged, notes


def _is_for(waiver: Waiver, finding: Finding) -> bool:
    return fnmatchcase(finding.rule, waiver.rule) and fits(
        waiver.checkpoints, finding.name, finding.path
    )
