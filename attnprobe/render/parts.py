"""A result cut into what belongs in one table: one stack, one kind of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from attnprobe.errors import InputError
from attnprobe.render.names import layers_text
from attnprobe.render.numbers import known
from attnprobe.result import TABLES, Result

Key = tuple[str, str]  # stack, kind
Row = dict[str, Any]
Heads = list[tuple[int, float | None]]


@dataclass(frozen=True)
class Part:
    """The layers of one stack and kind in one result."""

    result: Result
    stack: str
    kind: str
    _rows: dict[str, pd.DataFrame] = field(default_factory=dict, init=False, repr=False)

    def rows(self, table: str) -> pd.DataFrame:
        """Its rows of a table, those without a layer left out."""
        if table not in self._rows:
            frame: pd.DataFrame = getattr(self.result, table)
            mine = (frame["stack"] == self.stack) & (frame["kind"] == self.kind)
            self._rows[table] = frame[mine.fillna(False) & frame["layer"].notna()]
        return self._rows[table]

    @cached_property
    def layers(self) -> list[int]:
        """The numbers of its layers, in the model's order."""
        return [int(n) for n in self.rows("layers")["layer"]]

    def figures(self, column: str, table: str = "layers") -> dict[int, float | None]:
        """A figure of every layer."""
        rows = self.rows(table)
        if "head" in rows:
            rows = rows[rows["head"].isna()]
        pairs = zip(rows["layer"], rows[column], strict=True)
        return {int(layer): known(value) for layer, value in pairs}

    def heads(self, column: str, table: str = "heads") -> dict[int, Heads]:
        """(head, figure) of all heads of every layer."""
        rows = self.rows(table)
        rows = rows[rows["head"].notna()]
        found: dict[int, Heads] = {}
        for layer, head, value in zip(rows["layer"], rows["head"], rows[column], strict=True):
            found.setdefault(int(layer), []).append((int(head), known(value)))
        return found

    @cached_property
    def head_count(self) -> int:
        """Heads of its widest layer."""
        return max(self.rows("heads")["layer"].value_counts(), default=0)


def part_keys(results: Sequence[Result]) -> list[Key]:
    """Stacks and kinds of all results, in order of appearance."""
    seen: dict[Key, None] = {}
    for result in results:
        rows = result.layers[["stack", "kind"]].dropna().drop_duplicates()
        for stack, kind in zip(rows["stack"], rows["kind"], strict=True):
            seen.setdefault((str(stack), str(kind)))
    return list(seen)


def parts(result: Result) -> list[Part]:
    """All parts of one result."""
    return [Part(result, stack, kind) for stack, kind in part_keys([result])]


def part_title(key: Key) -> str:
    """ "encoder self-attention"."""
    return f"{key[0]} {key[1]}-attention"


def has(results: Sequence[Result], columns: Sequence[str], table: str = "layers") -> bool:
    """Whether any of the figures was measured in any of the results."""
    return any(bool(getattr(r, table)[list(columns)].notna().to_numpy().any()) for r in results)


def only_layer(result: Result, layer: int) -> Result:
    """The result of one layer alone; the model's figures are gone, as with `--layer`.

    Raises:
        InputError: there is no such layer.
    """
    there = sorted({int(n) for n in result.layers["layer"].dropna()})
    number = there[layer] if -len(there) <= layer < 0 else layer
    if number not in there:
        raise InputError(
            f"no layer {layer} in {result.name}: "
            + (f"it has {layers_text(there)}" if there else "no layer was measured")
        )
    frames = {name: getattr(result, name) for name in TABLES if name != "model"}
    kept = {
        name: frame[((frame["layer"] == number) | frame["layer"].isna()).fillna(True)]
        for name, frame in frames.items()
    }
    kept["samples"] = kept["samples"][kept["samples"]["layer"].notna()]
    return replace(
        result, model=result.model.iloc[:0], run={**result.run, "layers": [number]}, **kept
    )


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame, each a dict by column."""
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def is_partial(result: Result) -> bool:
    """Whether only some layers were measured."""
    return result.run.get("layers") is not None


def shown_layers(result: Result) -> list[int]:
    """Numbers of the layers that were measured."""
    return sorted({int(n) for n in result.layers["layer"].dropna()})


def where(part: Part, layer: int, head: int) -> str:
    """ "layer 3 head 2", with the stack where its kind of attention is in several."""
    stacks = {stack for stack, kind in part_keys([part.result]) if kind == part.kind}
    prefix = f"{part.stack} " if len(stacks) > 1 else ""
    return f"{prefix}layer {layer} head {head}"
