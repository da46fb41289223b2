"""The attnprobe.toml that `attnprobe init` writes: a preset, and the rest as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rules import Rule

_REST = """\
# What to audit where the command line names nothing: checkpoints, results, folders, globs.
# checkpoints = ["checkpoints/*.pt"]

# Your own rules. `metric` is a column of docs/definitions.md, `scope` is model, layer or head; the
# bounds are min and max for values, max_increase and max_decrease for steps along a training run.
#
# [[rules]]
# id = "no-dead-heads"
# metric = "erank"
# scope = "head"
# min = 2
# level = "warn"          # warn is shown, error fails the audit, off is not judged
# hint = "prune this head"
#
# [[rules]]
# metric = "collapsed"
# scope = "head"
# aggregate = "count"     # or each, mean, max, min, p05, p50, p95, share
# max = 2
# layers = "0-3,-1"
#
# [[rules]]
# metric = "ppl"
# max_increase = "5%"

# A rule of a preset under its own id: only what is given here changes.
#
# [[rules]]
# id = "gated/f-attr"
# max = 0.2

# Other bounds for some checkpoints, by name or path.
#
# [[overrides]]
# checkpoints = ["*-step0*", "old/*"]
# reason = "gates are not trained yet"
# [overrides.rules]
# "gated/*" = { level = "warn" }

# A broken rule that is known of, let pass until a day.
#
# [[waivers]]
# rule = "gated/massive"
# checkpoints = "base-1b"
# reason = "retrained in spring"
# expires = 2030-04-01

# A result file to hold figures against: attnprobe audit --update-baseline writes it. A change up to
# the larger of the two tolerances is noise; the usual ones are in docs/audit.md.
#
# [baseline]
# file = "attnprobe-baseline.json"
# [baseline.metrics]
# f_attr = { absolute = 0.01, relative = 0.05 }
# "layers.erank" = { relative = 0.1 }

# What checkpoints are measured on, and how; the same as the options of attnprobe scan.
#
# [input]
# length = 512
# samples = 16
# text_file = "held-out.txt"
#
# [run]
# device = "auto"
# jobs = 2
#
# [output]
# format = "table"        # json, jsonl, md, github, junit, sarif, csv
# files = ["audit.sarif", "junit:audit.xml"]
"""


def text(preset: str) -> str:
    """The file; it parses, and judges by the preset alone."""
    return "\n".join([*_preset(preset), "", _REST])


def _preset(name: str) -> Iterator[str]:
    yield "# Rules for attnprobe audit. Flags win over ATTNPROBE_* variables, these over this file."
    yield ""
    yield f'presets = ["{name}"]'
    yield "#"
    yield from _comment(PRESETS[name].about)
    for rule_id, keys in PRESETS[name].entries().items():
        rule = Rule.model_validate({**keys, "id": rule_id})
        level = "" if rule.level == "error" else f", {rule.level}"
        yield "#"
        yield from _comment(f"{rule_id}: {rule.subject} {rule.expected}{level}")
        why = PRESETS[name].rules[rule_id.partition("/")[2]].why
        yield from _comment(why, indent="    ")
    others = ", ".join(n for n in PRESETS if n != name)
    yield "#"
    yield from _comment(f"Other presets: {others}; several may be listed.")


def _comment(words: str, indent: str = "") -> list[str]:
    return textwrap.wrap(words, 98, initial_indent=f"# {indent}", subsequent_indent=f"# {indent}")
