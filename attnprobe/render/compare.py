"""A comparison for people and for other programs: table, JSON, CSV, Markdown, LaTeX."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.text import Text

from attnprobe._version import __version__
from attnprobe.compare import FEW_SAMPLES, FIGURES, STACKED, Comparison, Figure
from attnprobe.errors import InputError
from attnprobe.files import replacing
from attnprobe.render.ascii import Ascii
from attnprobe.render.export import MARKDOWN_ESCAPES, as_csv, as_latex, as_markdown
from attnprobe.render.grid import Column, Group, Table, tables
from attnprobe.render.names import plural, printable
from attnprobe.render.numbers import MISSING, known, significant
from attnprobe.render.page import BLANK, Page, Paragraph, footer, stacked
from attnprobe.render.parts import part_title, records
from attnprobe.render.views import rank
from attnprobe.result import Result

SCHEMA = 1
FORMATS = ("table", "json", "csv", "md", "latex")
SUFFIXES = {".json": "json", ".csv": "csv", ".md": "md", ".tex": "latex", ".latex": "latex"}
NONE_SEEN = "none seen"
UNSURE = "*"
NAME_CELLS = 8  # of a checkpoint's name above a narrow column, more where there is room
BOUNDS = {"f_attr_uniform": "  its floor", "rank_bound": "  its bound"}
BOUNDS["head_rank_bound"] = BOUNDS["rank_bound"]
#: What reasons in `not_measured` are given for, of what is compared.
SPOKEN_OF = (
    *("all", "model", "sink", "entropy", "rank", "rank of heads", "gate", "activation"),
    *("perplexity", *(figure.metric for figure in FIGURES)),
)
Row = dict[str, Any]
Cell = Mapping[str, Row]  # by checkpoint


def show(comparison: Comparison, console: Console, by_layer: bool = False) -> None:
    """Prints a comparison: what differs, in words and in a table, and how sure that is.

    Nothing depends on colour, every line fits the console's width, and a console that can encode
    nothing but ASCII gets ASCII.

    Args:
        comparison: from `attnprobe.compare.compare`.
        console: where to print.
        by_layer: a table a figure over the layers, too.
    """
    page: RenderableType = Lines(*_page(comparison, console.width, by_layer))
    console.print(Ascii(page) if console.options.ascii_only else page, highlight=False)


def render(comparison: Comparison, format: str, by_layer: bool = False) -> str:
    """A comparison as text for other programs.

    Args:
        comparison: from `attnprobe.compare.compare`.
        format: "json" or "csv" (a row a checkpoint and figure, all digits), "md" or "latex" (a row
            a figure, four digits).
        by_layer: the layers, too.

    Raises:
        InputError: an unknown format.
    """
    if format == "json":
        return _json(comparison, by_layer)
    if format == "csv":
        return as_csv(_rows(comparison, by_layer))
    if format == "md":
        wide = _wide(comparison, by_layer)
        return as_markdown(wide.rename(columns=lambda name: str(name).translate(MARKDOWN_ESCAPES)))
    if format == "latex":
        return as_latex(_wide(comparison, by_layer))
    raise InputError(f"no format {format!r}: choose from {', '.join(FORMATS)}")


def export(comparison: Comparison, path: Path, by_layer: bool = False) -> None:
    """Writes a comparison to a file whose suffix chooses the format, whole or not at all.

    Raises:
        InputError: an unknown suffix, or a path that cannot be written.
    """
    check_suffix(path)
    text = render(comparison, SUFFIXES[path.suffix.lower()], by_layer)
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def check_suffix(path: Path) -> None:
    """Raises InputError where a suffix stands for no format."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot tell the format of {path}: end it in {', '.join(SUFFIXES)}")


# for other programs


def _rows(comparison: Comparison, by_layer: bool) -> pd.DataFrame:
    """A row a checkpoint and figure, the model's first."""
    parts = [comparison.model, comparison.layers] if by_layer else [comparison.model]
    rows = pd.concat([part for part in parts if not part.empty] or parts[:1], ignore_index=True)
    return rows if by_layer else rows.drop(columns=["stack", "layer"])


def _json(comparison: Comparison, by_layer: bool) -> str:
    def plain(frame: pd.DataFrame) -> list[Row]:
        finite = frame.replace([math.inf, -math.inf], math.nan).astype(object)
        return records(finite.where(finite.notna(), None))

    samples = zip(comparison.results, comparison.samples, comparison.paired, strict=True)
    entry = {
        "schema": SCHEMA,
        "tool": {"name": "attnprobe", "version": __version__},
        "reference": comparison.names[0],
        "confidence": comparison.confidence,
        "resamples": comparison.resamples,
        "seed": comparison.seed,
        "different": comparison.different,
        "checkpoints": [
            {
                "name": name,
                "path": result.checkpoint.get("path"),
                "sha256": result.checkpoint.get("sha256"),
                "input": result.input,
                "samples": count,
                "paired": paired,
            }
            for name, (result, count, paired) in zip(comparison.names, samples, strict=True)
        ],
        "model": plain(comparison.model.drop(columns=["stack", "layer"])),
        **({"layers": plain(comparison.layers)} if by_layer else {}),
    }
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _wide(comparison: Comparison, by_layer: bool) -> pd.DataFrame:
    """A row a figure, the checkpoints beside each other, for a page or a paper."""
    labels = {figure.metric: figure.label for figure in FIGURES}
    frame = _rows(comparison, by_layer)
    where = [c for c in ("kind", "stack", "layer") if c in frame]
    lines: dict[tuple[Any, ...], Row] = {}
    for row in records(frame):
        place = {c: row[c] if is_there(row[c]) else None for c in where}
        line = lines.setdefault(
            (*place.values(), row["metric"]), {**place, "figure": labels[row["metric"]]}
        )
        name = row["checkpoint"]
        line[name] = known(row["value"])
        if name != comparison.names[0]:
            for column in ("difference", "low", "high", "ratio"):
                line[f"{name}: {column}"] = known(row[column])
            line[f"{name}: seen"] = None if pd.isna(row["seen"]) else bool(row["seen"])
        elif row["metric"] == "f_attr":
            line["floor"] = known(row["bound"])
    return pd.DataFrame(list(lines.values()))


def is_there(value: object) -> bool:
    """Whether a cell holds something."""
    return value is not None and not pd.isna(value)  # type: ignore[call-overload]


# for people


def _page(comparison: Comparison, width: int, by_layer: bool) -> Iterator[RenderableType]:
    results = map(_to_the_point, comparison.results)
    page = Page(list(zip(comparison.names, results, strict=True)), width)
    for name in comparison.names[1:]:
        yield from _headline(comparison, name)
    kinds = list(dict.fromkeys(comparison.model["kind"]))
    for kind in kinds:
        yield BLANK
        if len(kinds) > 1:
            yield Text(f"{kind}-attention", "bold")
        rows = comparison.model[comparison.model["kind"] == kind]
        yield from stacked(_tables(comparison, "", _lines(rows), width))
    if by_layer:
        yield from _layers(comparison, width)
    yield from footer(page, "scan", *_remarks(comparison, page))


def _to_the_point(result: Result) -> Result:
    """A result that explains no other figures than those compared."""
    frame = result.not_measured
    return replace(result, not_measured=frame[frame["metric"].isin(SPOKEN_OF)])


def _headline(comparison: Comparison, name: str) -> Iterator[RenderableType]:
    """What is lower, what is higher and what is not seen to differ, a line each."""
    yield Paragraph(Text(f"{name} against {comparison.names[0]}", "bold"), rest=2)
    rows = comparison.model[comparison.model["checkpoint"] == name]
    several = comparison.model["kind"].nunique() > 1
    found: dict[str, list[str]] = {"lower": [], "higher": [], "no difference seen": []}
    labels = {figure.metric: figure.label for figure in FIGURES}
    for row in records(rows):
        difference, label = known(row["difference"]), labels[row["metric"]]
        if difference is None:
            continue
        label = f"{row['kind']} {label}" if several else label
        if difference == 0 or (is_there(row["seen"]) and not row["seen"]):
            found["no difference seen"].append(label)
        else:
            by = _ratio(known(row["ratio"])) or _signed(difference)
            mark = UNSURE if is_there(row["no_interval"]) else ""
            found["higher" if difference > 0 else "lower"].append(f"{label}{mark} {by}")
    for what, labels_found in found.items():
        if labels_found:
            yield Paragraph(Text(f"{what}: {' · '.join(labels_found)}"), 2, 4)


def _lines(rows: pd.DataFrame) -> list[tuple[str, Cell]]:
    """Label and cells of each figure that anyone has, those of its bound below it."""
    lines: list[tuple[str, Cell]] = []
    for figure in FIGURES:
        own = {row["checkpoint"]: row for row in records(rows[rows["metric"] == figure.metric])}
        if all(known(row["value"]) is None for row in own.values()):
            continue
        lines.append((figure.label, own))
        if figure.bound is not None:
            bounds = {name: {"value": row["bound"]} for name, row in own.items()}
            lines.append((BOUNDS[figure.bound], bounds))
    return lines


def _tables(
    comparison: Comparison, title: str, lines: Sequence[tuple[str, Cell]], width: int
) -> list[Table]:
    """The first checkpoint's figures, then those of each other with its difference.

    One table where that fits, else one for each with the first repeated.
    """
    if not lines:
        return []
    is_number = all(label.isdigit() for label, _ in lines)
    stub = Column(title, [label for label, _ in lines], left=not is_number)
    groups = [
        Group(name, _columns(comparison, name, [cells.get(name, {}) for _, cells in lines]))
        for name in comparison.names
    ]
    groups = [group for group in groups if not all(c.empty for c in group.columns)]
    drawn = tables([stub], groups, width)
    if len(drawn) == 1 or groups[0].name != comparison.names[0]:
        return drawn
    return [table for other in groups[1:] for table in tables([stub], [groups[0], other], width)]


def _columns(comparison: Comparison, name: str, cells: Sequence[Row]) -> list[Column]:
    values = [significant(known(row.get("value"))) if row else "" for row in cells]
    if name == comparison.names[0]:
        return [Column("value".rjust(min(len(name), NAME_CELLS)), values)]
    return [
        Column("value", values),
        Column("difference", [_difference(row) for row in cells]),
        Column(f"{100 * comparison.confidence:g} % interval", [_span(row) for row in cells]),
        Column("ratio", [_ratio(known(row.get("ratio"))) for row in cells], 1),
    ]


def _difference(row: Row) -> str:
    if "difference" not in row:
        return ""
    if is_there(row["seen"]) and not row["seen"]:
        return NONE_SEEN
    difference = known(row["difference"])
    return MISSING if difference is None else _signed(difference)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{significant(value)}"


def _span(row: Row) -> str:
    """An interval, to two digits of its width."""
    low, high = known(row.get("low")), known(row.get("high"))
    if low is None or high is None:
        return UNSURE if is_there(row.get("no_interval")) else ""
    width = high - low
    if width <= 0:
        return f"{_signed(low)} to {_signed(high)}"
    exponent = math.floor(math.log10(width / 2))
    if not -5 <= exponent < 7:
        return f"{low:+.1e} to {high:+.1e}"
    decimals = max(0, 1 - exponent)
    return f"{low:+.{decimals}f} to {high:+.{decimals}f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{significant(value)}×"


def _layers(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    """A table a figure, its layers below each other."""
    keys = list(
        dict.fromkeys(zip(comparison.layers["stack"], comparison.layers["kind"], strict=True))
    )
    for key in keys:
        rows = comparison.layers
        rows = rows[(rows["stack"] == key[0]) & (rows["kind"] == key[1])]
        for figure in FIGURES:
            lines = _by_layer(rows, figure)
            if not lines:
                continue
            yield BLANK
            part = f", {part_title(key)}" if len(keys) > 1 else ""
            bound = _common_bound(rows, figure)
            yield Text(f"{figure.label} by layer{part}{bound}", "bold")
            yield from stacked(_tables(comparison, "layer", lines, width))


def _by_layer(rows: pd.DataFrame, figure: Figure) -> list[tuple[str, Cell]]:
    own = rows[rows["metric"] == figure.metric]
    if own["value"].isna().all():
        return []
    lines: dict[int, dict[str, Row]] = {}
    for row in records(own):
        lines.setdefault(int(row["layer"]), {})[row["checkpoint"]] = row
    return [(str(layer), lines[layer]) for layer in sorted(lines)]


def _common_bound(rows: pd.DataFrame, figure: Figure) -> str:
    """The floor or bound of all layers, where it is the same for all."""
    bounds = rows[rows["metric"] == figure.metric]["bound"].dropna()
    if figure.bound is None or bounds.empty or bounds.max() - bounds.min() > 1e-6:
        return ""
    what = BOUNDS[figure.bound].split()[-1]
    return f" ({what} {significant(float(bounds.iloc[0]))})"


def _remarks(comparison: Comparison, page: Page) -> Iterator[str]:
    first = comparison.names[0]
    counts = sorted(set(comparison.samples))
    drawn = f"{counts[0]:,}" if len(counts) == 1 else " or ".join(f"{c:,}" for c in counts)
    how = "drawn alike for all" if all(comparison.paired) else "drawn apart where inputs differ"
    yield (
        f"difference and ratio: to {first}. Interval: {comparison.resamples:,} bootstrap draws of "
        f"{drawn} {'documents' if counts != [1] else 'document'}, {how}. {NONE_SEEN}: no "
        "difference seen, for the interval spans zero."
    )
    if counts[0] < FEW_SAMPLES:
        yield f"an interval from {plural(counts[0], 'document')} is rough: give more --samples"
    reasons: dict[str, list[str]] = {}
    labels = {figure.metric: figure.label for figure in FIGURES}
    for row in records(comparison.model[comparison.model["no_interval"].notna()]):
        own = reasons.setdefault(row["no_interval"], [])
        if labels[row["metric"]] not in own:
            own.append(labels[row["metric"]])
    if reasons:
        told = "; ".join(f"{', '.join(own)} ({why})" for why, own in reasons.items())
        yield f"{UNSURE} no interval: {told}"
    yield (
        "F-Attr: share of attention on the first token; its floor is what length and mask alone "
        "give. erank: effective rank of what a layer or head writes. M-Act: largest activation, "
        "mean over layers."
    )
    if STACKED in reasons and (told := rank.bottleneck(page)):
        yield told
    if comparison.different:
        yield f"compared all the same: {printable('; '.join(comparison.different))}"
