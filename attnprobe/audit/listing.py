"""What rules there are and what they may bound: `attnprobe audit --list-rules`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import get_args

from attnprobe.audit import figures
from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rules import Aggregate, Rule
from attnprobe.result import KEY, TABLES

WIDTH = 80


def text() -> str:
    """The rules of every preset, the figures of every table, and how a bound is written."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for preset in PRESETS.values():
        yield from textwrap.wrap(f"--preset {preset.name}: {preset.about}", WIDTH)
        rules = [Rule.model_validate({**keys, "id": n}) for n, keys in preset.entries().items()]
        width = max(len(rule.id) for rule in rules)
        for rule in rules:
            which = f", {rule.kind}-attention" if rule.kind else ""
            level = "" if rule.level == "error" else f" ({rule.level})"
            yield f"  {rule.id:{width}}  {rule.subject} {rule.expected}{which}{level}"
        yield ""
    yield "Figures that a bound may be put to, by table; without a table it is model's"
    tables = [table for table in TABLES if table != "not_measured"]
    width = max(map(len, tables))
    for table in tables:
        names = [c for c in figures.columns(table) if figures.is_number(table, c) and c not in KEY]
        lines = textwrap.wrap(", ".join(names), WIDTH - width - 4)
        yield f"  {table:{width}}  {lines[0]}"
        yield from (f"{'':{width + 4}}{line}" for line in lines[1:])
    yield ""
    yield "--rule '[TABLE.]FIGURE[:AGGREGATE]<=NUMBER', or >=; or the id of a rule in force"
    yield f"  AGGREGATE of its rows: {', '.join(get_args(Aggregate))}"
