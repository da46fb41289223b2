"""What all views have in common: headlines, a table for each kind of attention, notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from attnprobe.render import headline, notes, numbers
from attnprobe.render.blocks import groups
from attnprobe.render.grid import BETWEEN, Column, Group, Table, tables
from attnprobe.render.parts import Heads, Key, Part, part_keys, part_title, parts
from attnprobe.result import Result

STUB = 5
BESIDE, MANY = {1: 50, 2: 27}, 15  # cells of a checkpoint's other columns, by checkpoints shown
Sentences = Callable[[Result], Sequence[str]]
BLANK = Text("")


@dataclass(frozen=True)
class Page:
    """Results and the width there is to show them.

    Attributes:
        named: at least one result, each with the name that it has on the page.
        width: in cells.
    """

    named: Sequence[tuple[str, Result]]
    width: int

    @property
    def results(self) -> list[Result]:
        return [result for _, result in self.named]

    @property
    def strip_width(self) -> int:
        """Cells for a strip over heads that leave room for what should stand beside it."""
        count = len(self.named)
        room = (self.width - STUB - len(BETWEEN) * count) // count
        return max(4, min(32, room - BESIDE.get(count, MANY)))


@dataclass(frozen=True)
class Paragraph:
    """Wrapped text with nothing behind its lines.

    Attributes:
        text: one line of it.
        first: cells before its first line.
        rest: cells before the others.
    """

    text: Text
    first: int = 0
    rest: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - max(self.first, self.rest))
        for number, line in enumerate(self.text.wrap(console, width)):
            line.rstrip()
            yield Text(" " * (self.rest if number else self.first)).append_text(line)


def headlines(page: Page, *sentences: Sentences) -> Iterator[RenderableType]:
    """A paragraph a checkpoint: what it is, then what was found."""
    for name, result in page.named:
        title = Text(name, "bold")
        if about := headline.identity(result):
            title.append(f" · {about}", "not bold")
        yield Paragraph(title, rest=2)
        for sentence in (s for part in sentences for s in part(result)):
            yield Paragraph(Text(sentence), 2, 2)


def each_part(page: Page) -> Iterator[tuple[Key, list[tuple[str, Part]]]]:
    """Each stack and kind of attention, and the checkpoints that have it."""
    for key in part_keys(page.results):
        yield (
            key,
            [(n, Part(result, *key)) for n, result in page.named if key in part_keys([result])],
        )


def by_part(
    page: Page, columns: Callable[[Part, list[int]], list[Column]]
) -> Iterator[RenderableType]:
    """A table for each stack and kind of attention, checkpoints side by side.

    Args:
        page: the page.
        columns: those of a part, a cell for each of the layers.
    """
    several, keys = len(page.results) > 1, dict(each_part(page))
    for key, own in keys.items():
        layers = sorted({layer for _, part in own for layer in part.layers})
        groups = [Group(name if several else "", columns(part, layers)) for name, part in own]
        foot = "mean" if any(c.foot for group in groups for c in group.columns) else ""
        stub = Column("layer", [str(layer) for layer in layers], foot=foot)
        if not any(not c.empty for group in groups for c in group.columns):
            continue
        yield BLANK
        if len(keys) > 1:
            yield Text(part_title(key), "bold")
        yield from stacked(tables([stub], groups, page.width))


def stacked(drawn: Sequence[Table]) -> Iterator[RenderableType]:
    """Tables with an empty line between them."""
    for number, table in enumerate(drawn):
        if number:
            yield BLANK
        yield table


def has_mean(part: Part) -> bool:
    """Whether the model's figures speak of the layers of this part, all of them and no others."""
    of_kind = [key for key in part_keys([part.result]) if key[1] == part.kind]
    return len(of_kind) == 1 and len(part.layers) > 1 and not part.result.model.empty


def mean(part: Part, column: str) -> float | None:
    """The model's figure for the foot of a column."""
    return part.result.figure(column, part.kind) if has_mean(part) else None


def figures(
    part: Part,
    layers: Sequence[int],
    column: str,
    title: str,
    order: int = 0,
    shown: Callable[[Sequence[float | None]], list[str]] = numbers.column,
) -> Column:
    """A column of a layer figure, the model's own at its foot."""
    values = part.figures(column)
    cells = shown([*(values.get(layer) for layer in layers), mean(part, column)])
    return Column(title, _blanked(cells[:-1], layers, part), order, foot=_foot(cells[-1]))


def percents(values: Sequence[float | None]) -> list[str]:
    """Shares as percentages."""
    return [numbers.percent(v) for v in values]


def _blanked(cells: Sequence[str], layers: Sequence[int], part: Part) -> list[str]:
    """Cells, empty in layers that this checkpoint does not have."""
    own = set(part.layers)
    return [c if layer in own else "" for c, layer in zip(cells, layers, strict=True)]


def _foot(cell: str) -> str:
    return "" if cell == numbers.MISSING else cell


def over_heads(
    part: Part,
    layers: Sequence[int],
    column: str,
    title: str,
    draw: Callable[[Sequence[float | None]], Text],
    order: int = 1,
    table: str = "heads",
) -> Column:
    """A strip of blocks over the heads of each layer."""
    heads = part.heads(column, table)
    strips = [draw([value for _, value in heads.get(layer, [])]) for layer in layers]
    if all(value is None for found in heads.values() for _, value in found):
        strips = [Text("") for _ in layers]
    return Column(title, strips, order, left=True)


def extreme_head(
    part: Part,
    layers: Sequence[int],
    column: str,
    title: str,
    pick: Callable[..., tuple[int, float]] = max,
    order: int = 2,
    decimals: int = 3,
) -> Column:
    """The head with the largest (or smallest) figure in each layer: "h2 0.89"."""
    heads = part.heads(column)
    found = [_extreme(heads.get(layer, []), pick) for layer in layers]
    values = [numbers.MISSING if f is None else f"{f[1]:.{decimals}f}" for f in found]
    digits = max((len(str(f[0])) for f in found if f is not None), default=1)
    cells = [
        "" if f is None else f"h{f[0]:<{digits}} {value}"
        for f, value in zip(found, values, strict=True)
    ]
    return Column(title, cells, order)


def _extreme(heads: Heads, pick: Callable[..., tuple[int, float]]) -> tuple[int, float] | None:
    there = [(number, value) for number, value in heads if value is not None]
    return pick(there, key=lambda pair: pair[1]) if there else None


def strip_note(page: Page, extreme: str = "highest") -> str:
    """What a cell of a strip over heads stands for."""
    most = max((part.head_count for result in page.results for part in parts(result)), default=0)
    size = groups(most, page.strip_width)
    return "one block a head" if size == 1 else f"a block for the {extreme} of every {size} heads"


def legend(blocks: Sequence[RenderableType], meanings: Mapping[str, str]) -> str:
    """What the columns mean that are there."""
    titles = {title for block in blocks if isinstance(block, Table) for title in block.titles}
    there = {"bars" if "  " in t else t: text for t, text in meanings.items() if t in titles}
    return "; ".join(f"{title}: {text}" for title, text in there.items())


def footer(page: Page, view: str, *remarks: str) -> Iterator[RenderableType]:
    """Remarks on the tables, what was not measured, and what everything was measured on."""
    missing = []
    for name, result in page.named:
        prefix = f"{name}: " if len(page.results) > 1 else ""
        missing += [f"not measured · {prefix}{line}" for line in notes.not_measured(result, view)]
    told = [remark for remark in remarks if remark]
    for lines in (told, missing, notes.measured_on(page.named)):
        if lines:
            yield BLANK
        for line in lines:
            yield Paragraph(Text(line, "dim"))
