"""From what the metrics say of their own to the tables of a result: rows joined, in model order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from attnprobe.capture import Site
from attnprobe.errors import InputError
from attnprobe.metrics import Tables
from attnprobe.metrics.base import Row


def collected(tables: Sequence[Tables], sites: Sequence[Site]) -> dict[str, list[Row]]:
    """The rows of all metrics in model order, those of one head, layer, sample or kind joined."""
    order = {site.path: n for n, site in enumerate(sites)}
    rows: dict[str, list[Row]] = {name: [] for name in ("sinks", "massive", "not_measured")}
    for table in tables:
        for name, part in table.rows.items():
            rows.setdefault(name, []).extend(part)
    for name, keys in (
        ("heads", ("site", "head")),
        ("layers", ("site",)),
        ("samples", ("site", "head", "sample")),
        ("model", ("kind",)),
    ):
        rows[name] = _joined(rows.get(name, []), keys)
    for whole in rows.pop("whole", []):
        rows["model"] = [{**row, **whole} for row in rows["model"] or [{"kind": "self"}]]

    def place(row: Row) -> tuple[int, int, int]:
        head = row.get("head")
        within = -1 if head is None else head  # the layer's row before those of its heads
        return order.get(row.get("site", ""), len(order)), within, row.get("sample", 0)

    for name in ("heads", "layers", "samples", "positions", "gates", "spectra"):
        rows[name] = sorted(rows.get(name, []), key=place)
    return rows


def _joined(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    merged: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        merged.setdefault(tuple(row.get(k) for k in keys), {}).update(row)
    return list(merged.values())


def keep_heads(rows: dict[str, list[Row]], heads: Collection[int]) -> None:
    """Drops the rows of other heads; rows of layers stay.

    Raises:
        InputError: a head that is in no layer.
    """
    there = {row["head"] for row in rows["heads"]}
    absent = sorted(set(heads) - there)
    if absent and there:
        raise InputError(
            f"no head {', '.join(map(str, absent))}: this model has {ranges(sorted(there))}"
        )
    for name in ("heads", "samples", "positions", "gates", "spectra"):
        rows[name] = [row for row in rows[name] if row.get("head") in (*heads, None)]


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
