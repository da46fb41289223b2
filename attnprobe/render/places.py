"""The tokens behind the sinks, and the massive activations that live on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.text import Text

from attnprobe.render import headline
from attnprobe.render.grid import Column, Group, tables
from attnprobe.render.names import plural, ranges, token_alone, token_text
from attnprobe.render.numbers import significant
from attnprobe.render.page import BLANK, Page, Paragraph
from attnprobe.render.parts import Row, part_keys, records
from attnprobe.result import Result

BY_LAYER = 10  # up to so many rows are listed layer by layer, more are put together by position
SHOWN = 8
TOKEN_CELLS = 18
MEANING = "heads, documents: in how many it sinks; mean, most: its attention there"
MERGED = (
    "; “3: e t a”: three tokens at that position, the commonest first, in at least so many heads"
)


def sinks(page: Page) -> Iterator[RenderableType]:
    """A table of the keys that heads sink on, with their tokens."""
    rows, hidden = _shown(page, _sink_lines)
    if not rows:
        return
    columns = [
        *_origin(page, rows, "attention"),
        Column("layer", [r["layers"] for r in rows], left=True),
        Column("position", [r["position"] for r in rows]),
        Column("token", [r["token"] for r in rows], left=True),
        Column("heads", [r["heads"] for r in rows]),
        Column("documents", [r["documents"] for r in rows], 2),
        Column("mean", [r["mean"] for r in rows], 3),
        Column("most", [r["most"] for r in rows], 1),
    ]
    above = headline.epsilon(page.results[0])
    title = (
        f"Sinks: keys that get more than {above:g} of the attention of the queries that see them"
    )
    yield from _listed(title, columns, hidden, "sinks", page.width)
    yield Paragraph(Text(f"{MEANING}{MERGED if _merged(rows) else ''}", "dim"))


def _merged(rows: Sequence[Row]) -> bool:
    """Whether any line stands for more than one token."""
    return any(row["heads"].startswith("≥") for row in rows)


def massive(page: Page) -> Iterator[RenderableType]:
    """The huge numbers of the residual stream, put together by place and dimension."""
    rows, hidden = _shown(page, _massive_lines)
    if not rows:
        return
    columns = [
        *_origin(page, rows, "stack"),
        Column("layer", [r["layers"] for r in rows], left=True),
        Column("position", [r["position"] for r in rows]),
        Column("token", [r["token"] for r in rows], left=True),
        Column("dimension", [r["dimension"] for r in rows]),
        Column("documents", [r["documents"] for r in rows], 2),
        Column("largest", [r["value"] for r in rows]),
        Column("× median", [r["ratio"] for r in rows], 1),
    ]
    yield from _listed("Massive activations", columns, hidden, "massive", page.width)


def _shown(page: Page, lines_of: Callable[[Result], list[Row]]) -> tuple[list[Row], int]:
    """The first lines of every checkpoint, and how many there are besides."""
    rows, hidden = [], 0
    for name, result in page.named:
        lines = lines_of(result)
        rows += [{"checkpoint": name, **line} for line in lines[:SHOWN]]
        hidden += len(lines[SHOWN:])
    return rows, hidden


def _origin(page: Page, rows: Sequence[Row], where: str) -> list[Column]:
    """Columns that say whose a row is, as far as there are several checkpoints or stacks."""
    several = any(len(part_keys([r])) > 1 for r in page.results)
    return [
        *([Column("checkpoint", _once(rows), left=True)] if len(page.results) > 1 else []),
        *([Column(where, [r[where] for r in rows], left=True)] if several else []),
    ]


def _listed(
    title: str, columns: Sequence[Column], hidden: int, table: str, width: int
) -> Iterator[RenderableType]:
    yield BLANK
    yield Paragraph(Text(title, "bold"))
    yield from tables(columns[:1], [Group("", columns[1:])], width)
    if hidden:
        more = f"and {plural(hidden, 'more row')}: --format csv --table {table} gives them all"
        yield Text(more, "dim")


def _once(rows: Sequence[Row]) -> list[str]:
    """The name of the checkpoint in its first row only."""
    names = [row["checkpoint"] for row in rows]
    return [n if i == 0 or names[i - 1] != n else "" for i, n in enumerate(names)]


def _sink_lines(result: Result) -> list[Row]:
    rows = records(result.sinks)
    if len(rows) <= BY_LAYER:
        return [_sink_line([row]) for row in rows]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["stack"], row["kind"], row["position"]), []).append(row)
    ordered = sorted(groups.values(), key=lambda g: -sum(r["heads"] * r["documents"] for r in g))
    return [_sink_line(group) for group in ordered]


def _sink_line(rows: Sequence[Row]) -> Row:
    """One line of the rows of one position: over layers, and over tokens where they differ.

    Heads of different tokens may be the same ones, so their number is a lower bound there.
    """
    tokens = _tokens(rows)
    layers = {row["layer"] for row in rows}
    heads = sum(max(r["heads"] for r in rows if r["layer"] == layer) for layer in layers)
    documents = max(
        sum(row["documents"] for row in rows if row["layer"] == layer) for layer in layers
    )
    weights = [row["heads"] * row["documents"] for row in rows]
    mean = sum(w * r["alpha"] for w, r in zip(weights, rows, strict=True)) / sum(weights)
    first = rows[0]
    return {
        "attention": f"{first['stack']} {first['kind']}",
        "layers": ranges(layers),
        "position": str(int(first["position"])),
        "token": tokens,
        "heads": f"{'≥ ' if len(rows) > len(layers) else ''}{heads}",
        "documents": f"{documents} of {first['documents_total']}",
        "mean": significant(mean, 2),
        "most": significant(max(row["alpha_max"] for row in rows), 2),
    }


def _massive_lines(result: Result) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in records(result.massive):
        groups.setdefault((row["stack"], row["position"], row["dimension"]), []).append(row)
    ordered = sorted(groups.values(), key=lambda g: -max(abs(r["value"]) for r in g))
    lines = []
    for rows in ordered:
        top = max(rows, key=lambda r: abs(r["value"]))
        ratio = top["ratio"]
        lines.append(
            {
                "stack": str(top["stack"]),
                "layers": ranges(row["layer"] for row in rows),
                "position": str(int(top["position"])),
                "token": _tokens(rows),
                "dimension": str(top["dimension"]),
                "documents": str(len({row["document"] for row in rows})),
                "value": significant(top["value"]),
                "ratio": significant(None if ratio is None or ratio != ratio else ratio),
            }
        )
    return lines


def _tokens(rows: Sequence[Row]) -> str:
    """The token, or how many there are and the commonest."""
    counts: dict[str, int] = {}
    for row in rows:
        text = token_text(row["token"], row["token_id"])
        counts[text] = counts.get(text, 0) + int(row.get("documents") or 1)
    texts = sorted(counts, key=lambda t: -counts[t])
    if len(texts) == 1:
        return clipped_end(token_alone(rows[0]["token"], rows[0]["token_id"]))
    return clipped_end(f"{len(texts)}: {' '.join(texts)}")


def clipped_end(text: str) -> str:
    """The beginning of a token that is too long for its column."""
    if cell_len(text) <= TOKEN_CELLS:
        return text
    return set_cell_size(text, TOKEN_CELLS - 1) + "…"
