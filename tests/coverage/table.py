"""The table of types: what is proven of each, kept beside the tests and shown in the docs.

`types.csv` is written by `python tests/coverage/test_coverage_types.py --write`; the tests hold
every line against what they find.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

TRANSFORMERS = "5.24"  # whose mappings the table is of
PATH = Path(__file__).with_name("types.csv")


@dataclass
class Row:
    """A type.

    Attributes:
        task: causal, masked, seq2seq or image.
        type: its name in transformers.
        measured: all; alone (the padded batch is refused); part; none.
        tap: how its attention is seen: interface, sdpa or written out.
        attention: how many sites of which kind.
        windows: how many of them have a window (or chunks) shorter than the input.
        sinks: yes where learned sinks take attention.
        gate: as the scan says it.
        right, left: whether the model itself attends the same in a sample padded on that side.
        without: layers of other kinds, as the scan names them.
    """

    task: str
    type: str
    measured: str = "all"
    tap: str = ""
    attention: str = ""
    windows: str = ""
    sinks: str = ""
    gate: str = ""
    right: str = ""
    left: str = ""
    without: str = ""


def read() -> dict[tuple[str, str], Row]:
    """The table by task and type."""
    with PATH.open(encoding="utf-8", newline="") as file:
        return {(line["task"], line["type"]): Row(**line) for line in csv.DictReader(file)}


def write(rows: Iterable[Row]) -> None:
    """Writes the table anew."""
    with PATH.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
