"""For people: a terminal, or a log of 80 columns."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from attnprobe.audit.baseline import PREFIX
from attnprobe.audit.findings import Finding, Problem
from attnprobe.audit.formats import words
from attnprobe.audit.report import Report
from attnprobe.audit.trend import Trend
from attnprobe.render.names import plural, printable

WIDTH = 80
LISTED = 5  # checkpoints up to which rules that were kept are listed, too
_STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "waived": "magenta",
    "improved": "green",
    "passed": "green",
    "new": "cyan",
}


def render(report: Report) -> str:
    """80 columns of plain text."""
    out = io.StringIO()
    console = Console(
        file=out, width=WIDTH, color_system=None, force_terminal=False, highlight=False
    )
    show(report, console)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def show(report: Report, console: Console) -> None:
    """Prints a report."""
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterator[RenderableType]:
    for name in report.checkpoints:
        yield from _checkpoint(report, name)
    for trend in report.trends:
        yield from _trend(trend)
    if report.update is not None:
        yield from _update(report)
    if report.problems:
        yield Text("Not judged", style="bold")
        yield _rows([("error", _problem(problem)) for problem in report.problems])
        yield Text()
    for note in report.notes:
        yield Text(f"note: {printable(note)}", style="dim")
    line = words.verdict(report)
    yield Text(line, style="bold green" if line.startswith("passed") else "bold red")


def _checkpoint(report: Report, name: str) -> Iterator[RenderableType]:
    """A heading with counts, and below it what is to be seen; of many checkpoints, only faults."""
    findings = report.of(name)
    is_short = len(report.checkpoints) > LISTED
    listed = [f for f in findings if not is_short or words.state(f) != "passed"]
    counts = Counter(words.state(f) for f in findings)
    said = [plural(counts[state], state) for state in ("error", "warning") if counts[state]]
    said += [f"{counts[s]} {s}" for s in ("waived", "improved", "new", "passed") if counts[s]]
    heading = Text(printable(name), style="bold")
    heading.append(f"  {', '.join(said) or 'no rule is for it'}", style="not bold")
    yield heading
    same = [f for f in listed if f.change is not None and f.change.verdict == "unchanged"]
    same = [f for f in same if f.rule.startswith(PREFIX)]
    rows = [(words.state(f), _finding(f)) for f in listed if f not in same]
    if same:
        rows.append(("passed", Text(f"{plural(len(same), 'figure')} as in the baseline")))
    if rows:
        yield _rows(rows)
    if listed or not is_short or name == report.checkpoints[-1]:
        yield Text()


def _rows(rows: list[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(overflow="fold", ratio=1)
    for state, text in rows:
        grid.add_row(Text(f"  {state}", style=_STYLES.get(state, "")), text)
    return grid


def _finding(finding: Finding) -> Text:
    text = Text(printable(finding.rule), style="bold")
    if finding.status == "passed":
        text.append(f"  {_kept(finding)}", style="not bold")
        return text
    text.append(f"  {printable(finding.message)}", style="not bold")
    where = words.places(finding)
    if where:
        text.append(f"\nat {printable(where)}", style="not bold")
    if finding.waiver is not None:
        told = f"\nwaived until {finding.waiver.expires}: {printable(finding.waiver.reason)}"
        text.append(told, style="not bold")
    else:
        text.append(f"\n{printable(finding.hint)}", style="not bold dim")
    return text


def _kept(finding: Finding) -> str:
    """A rule that was kept, short: what was found, and the bound."""
    found = words.found(finding)
    if finding.change is not None and finding.change.verdict == "new":
        return f"{finding.subject} {found}, not in the baseline"
    return f"{finding.subject} {found} ({finding.expected})"


def _problem(problem: Problem) -> Text:
    text = Text(printable(problem.checkpoint), style="bold")
    text.append(f"  {printable(problem.message)}", style="not bold")
    return text


def _trend(trend: Trend) -> Iterator[RenderableType]:
    kind = "" if trend.kind == "self" else f", {trend.kind} attention"
    yield Text(f"Trend of {printable(trend.run)}{kind}", style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("  step", justify="right")
    for metric in trend.metrics:
        table.add_column(metric, justify="right", overflow="fold")
    for cells in words.trend_rows(trend.metrics, trend.points):
        table.add_row(*cells)
    yield table
    yield Text()


def _update(report: Report) -> Iterator[RenderableType]:
    update = report.update
    assert update is not None
    yield Text(f"Baseline {printable(update.path)}", style="bold")
    for line in update.lines:
        yield Text(f"  {printable(line)}")
    yield Text("  written" if update.written else f"  not written: {update.reason}")
    yield Text()
