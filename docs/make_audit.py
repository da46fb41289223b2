"""Writes the end of docs/audit.md from the code: keys, presets, tolerances, variables.

python docs/make_audit.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from attnprobe.audit import figures, settings
from attnprobe.audit.baseline import WATCHED
from attnprobe.audit.config import TABLES
from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rules import Rule

PAGE = Path(__file__).with_name("audit.md")
MARKER = "<!-- from here on written by docs/make_audit.py -->"
HEADINGS = {
    "": "The file",
    "rules": "[[rules]]",
    "overrides": "[[overrides]]",
    "waivers": "[[waivers]]",
    "baseline": "[baseline]",
    "baseline.metrics": "[baseline.metrics]",
    "input": "[input]",
    "run": "[run]",
    "output": "[output]",
}
KINDS = {
    "str": "text",
    "float": "number",
    "int": "whole number",
    "bool": "true or false",
    "date": "date",
    "Any": 'number or "10%"',
}


def page() -> str:
    """The whole page: what is written by hand, then the rest."""
    head = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
    return f"{head}{MARKER}\n\n" + "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield "## Every key"
    yield ""
    yield "In pyproject.toml the tables are below `tool.attnprobe`: `[[tool.attnprobe.rules]]`."
    yield ""
    for name, table in TABLES.items():
        yield f"### {HEADINGS[name]}"
        yield ""
        yield from _rows("key", "what it holds", "")
        for key, field in table.model_fields.items():
            if key == "source":
                continue
            holds = (
                "table" if name and key == "rules" else _kind(field.annotation, field.alias or key)
            )
            told = f"{field.description}{_default(field)}"
            yield f"| `{field.alias or key}` | {_cell(holds)} | {_cell(told)} |"
        yield ""
    yield "## Presets"
    yield ""
    for preset in PRESETS.values():
        yield f"### {preset.name}"
        yield ""
        yield preset.about
        yield ""
        yield from _rows("rule", "holds", "level", "where the threshold comes from")
        for rule_id, keys in preset.entries().items():
            rule = Rule(**keys, id=rule_id)
            why = preset.rules[rule_id.partition("/")[2]].why
            holds = f"{rule.subject} {rule.expected}" + (f", {rule.kind}" if rule.kind else "")
            yield f"| `{rule_id}` | {_cell(holds)} | {rule.level} | {_cell(why)} |"
        yield ""
    yield "## What is held against a baseline"
    yield ""
    yield from _rows("figure", "better", "noise up to the larger of", "level")
    for name in WATCHED:
        known = figures.FIGURES[name]
        level = "warn" if known.better == "same" else "error"
        noise = f"{known.absolute:g} and {100 * known.relative:g} %"
        yield f"| `{name}` | {known.better} | {noise} | {level} |"
    yield ""
    yield "## Environment variables"
    yield ""
    yield "An empty variable is none; lists are separated by commas; an unknown one is an error."
    yield ""
    yield from _rows("variable", "in the file")
    for setting, (table, key) in settings.KEYS.items():
        place = f"`{key}` in `[{table}]`" if table else f"`{key}`"
        yield f"| `{settings.variable(setting)}` | {place} |"
    yield f"| `{settings.variable('config')}` | which file |"
    yield f"| `{settings.variable('rule')}` | as `--rule`, over all rules of the file |"
    yield f"| `{settings.variable('cache')}` | the folder of the cache |"


def _rows(*head: str) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"


def _kind(annotation: Any, key: str) -> str:
    """A type in words."""
    if key in ("rules", "overrides", "waivers", "metrics", "baseline", "input", "run", "output"):
        return "table" if key not in ("rules", "overrides", "waivers") else "list of tables"
    if key in ("layers", "heads"):
        return "number, list or range"
    origin = get_origin(annotation)
    if origin is Literal:
        return " · ".join(str(word) for word in get_args(annotation))
    if origin is list:
        return "text or list of texts"
    if origin is dict:
        return "table"
    args = [a for a in get_args(annotation) if a is not type(None)]
    if args:
        kinds = dict.fromkeys(_kind(a, "") for a in args if isinstance(a, type) or get_origin(a))
        return " or ".join(kinds) or KINDS["Any"]
    return KINDS.get(getattr(annotation, "__name__", ""), KINDS["Any"])


def _default(field: Any) -> str:
    default = field.default
    if default is PydanticUndefined:
        return "; must be given"
    if isinstance(default, (str, bool)) and default not in ("", False):
        return f" [default: {default}]"
    return f" [default: {', '.join(default)}]" if isinstance(default, list) and default else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
