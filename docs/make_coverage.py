"""Writes docs/coverage.md from the table of types that the tests hold. Run it after that changed:

python tests/coverage/test_coverage_types.py --write && python docs/make_coverage.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).with_name("coverage.md")
sys.path.insert(0, str(PAGE.parent.parent / "tests" / "coverage"))

from exceptions import REFUSED, UNBUILT, WINDOWLESS  # noqa: E402
from table import TRANSFORMERS, Row, read  # noqa: E402
from towers import TOWERS  # noqa: E402

TASKS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "image": "Image classification",
}
INTRODUCTION = f"""\
# What is proven of transformers' models

This page is made by `python docs/make_coverage.py` from the table that
`tests/coverage/test_coverage_types.py` holds, type by type, with transformers {TRANSFORMERS}.

Of every type in transformers' mapping for a task a model is built from its own config, made small:
random weights, each kind of layer that the type has, 24 tokens, windows and chunks of 8. Then, for
every attention site and every head,

- the attention on the first key and the entropy of each query, the attention that each key gets
  and the share of a learned sink are **those of the model's own eager attention weights**, which
  the test collects without attnprobe and sums in float64: to 1e-5 in float32;
- the model's **logits are the same to 1e-5** while it is watched;
- a batch of a whole sample, one padded on the right and one padded on the left is measured under
  the implementation that transformers chooses (SDPA where there is one), and the padded sample once
  more, alone and under the eager one;
- every numbered layer is measured or named as not measured, with the reason and the model's own
  number.

"""
COLUMNS = """\
**seen by** `interface` (transformers' attention interface), `sdpa` (torch's function) or
`written out` (the model multiplies the matrix itself). **attention**: how many sites of which kind.
**windows**: how many of them see a window or chunk shorter than the input. **sinks**: learned sink
logits take attention. **padding**: the sides on which the model itself attends in a padded sample
as in the sample alone, so that its figures are the same too; on others its positions shift.
**besides**: layers of other kinds, listed as not measured, or what is left out and why.
"""
ANY_SIZE = """\
## Vision towers for images of any size

These towers attend image by image or window by window, in a call for each. The calls of a layer are
measured as one over several documents, and each document is held against its own eager weights:
"""


def page() -> str:
    """The whole page."""
    rows = read()
    parts = [INTRODUCTION + _counts(rows.values()), COLUMNS]
    for task, title in TASKS.items():
        own = [row for row in rows.values() if row.task == task]
        parts.append(f"## {title}\n\n{_types(own)}")
        if unbuilt := [(name, why) for (t, name), why in UNBUILT.items() if t == task]:
            parts.append(_unbuilt(unbuilt))
    return "\n".join([*parts, f"{ANY_SIZE}{', '.join(f'`{name}`' for name in TOWERS)}.\n"])


def _counts(rows: Iterable[Row]) -> str:
    lines = [
        "| task | types | proven whole | proven in part | nothing to measure | not run |",
        "|---|---|---|---|---|---|",
    ]
    for task, title in TASKS.items():
        measured = [row.measured for row in rows if row.task == task]
        absent = sum(t == task for t, _ in UNBUILT)
        part = sum(m in ("part", "alone") for m in measured)
        counts = [len(measured) + absent, measured.count("all"), part, measured.count("none")]
        lines.append(f"| {title} | {' | '.join(map(str, [*counts, absent]))} |")
    return "\n".join(lines) + "\n"


def _types(rows: Iterable[Row]) -> str:
    lines = [
        "| type | seen by | attention | windows | sinks | gate | padding | besides |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        why = REFUSED.get((row.task, row.type), ("", ""))[0]
        share = {"part": "in part: ", "alone": "in part: ", "none": "not measured: "}
        besides = share.get(row.measured, "") + why if why else row.without
        if windowless := WINDOWLESS.get((row.task, row.type)):
            besides = f"{besides}; no window: {windowless}".removeprefix("; ")
        sides = ", ".join(side for side in ("right", "left") if getattr(row, side) == "yes")
        cells = (row.tap, row.attention, row.windows, row.sinks, row.gate, sides, besides)
        lines.append(f"| `{row.type}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _unbuilt(types: Iterable[tuple[str, str]]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in types:
        by_reason.setdefault(why, []).append(f"`{name}`")
    lines = [f"- {why}: {', '.join(names)}" for why, names in by_reason.items()]
    return "Not run:\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
