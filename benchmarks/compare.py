"""What probing costs beside the plain forward pass and beside what people use, in time and memory.

    python benchmarks/compare.py --minutes 20                # measures what is missing, prints
    python benchmarks/compare.py --minutes 0 --write         # docs/performance.md and its figure
    python benchmarks/compare.py --only 512 --peers ~/peers/bin/python

Every run is a process of its own, and the works of a case take turns, so that a machine whose
speed drifts slows all of them alike. Quoted are medians, and medians of the ratios to the plain
pass of the same turn. What was measured is kept in a file of lines, so that a call goes on where
the last one ended; the file is of one machine and one state of the code: start a new one for
another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
WORK = HERE / "work.py"
PAGE = HERE.parent / "docs" / "performance.md"
FIGURE = HERE.parent / "docs" / "performance.png"
PICTURE = f"![Time and peak memory over the length]({FIGURE.name})"
MARKER = "<!-- benchmarks/compare.py writes below this line -->"
PEERS = ("TransformerLens", "nnsight")
LONG = 4096  # from here on the exponents are fitted


@dataclass(frozen=True)
class Case:
    """What is run in turns: `works` so many times, `once` in the first turn only."""

    shape: str
    samples: int
    length: int
    works: tuple[str, ...]
    once: tuple[str, ...] = ()
    turns: int = 3

    @property
    def name(self) -> str:
        return f"{self.samples} × {self.length:,}" if self.samples > 1 else f"{self.length:,}"


LAST = "plain, last logits"
OURS = ("plain", LAST, "sink", "sink+entropy", "scan")
BY_HEAD, WITHOUT = "scan, ranks of heads", "scan without ranks"
THEIRS = ("output_attentions", *PEERS)
EVERY = "output_attentions, all"
CASES = (
    Case("gpt2-small", 1, 4096, OURS, once=(*THEIRS, EVERY)),
    Case("gpt2-small", 16, 512, (*OURS, BY_HEAD, WITHOUT), once=THEIRS),
    Case("gpt2-small", 1, 512, OURS, once=THEIRS, turns=5),
    Case("gpt2-small", 1, 16384, ("plain", "scan"), turns=1),
    Case("gpt2-small", 1, 32768, ("plain", "scan"), turns=1),
    Case("gpt2-small", 1, 8192, ("plain", "sink+entropy", "scan"), turns=1),
    Case("llama-0.3b", 1, 2048, OURS, once=("output_attentions",), turns=1),
    Case("width 4096", 16, 512, ("plain", "scan", BY_HEAD, WITHOUT), turns=1),
    Case("gpt2-small", 1, 2048, OURS, turns=1),
)
Run = dict[str, object]


def due(cases: Sequence[Case]) -> Iterator[tuple[Case, int, str]]:
    """All runs: first one turn of every case, so that every figure is there early."""
    for turn in range(max(case.turns for case in cases)):
        for case in cases:
            if turn < case.turns:
                for work in (*case.works, *(case.once if turn == 0 else ())):
                    yield case, turn, work


def measure(case: Case, work: str, python: str) -> dict[str, float] | None:
    """One run in a process of its own; None where it failed, as for want of memory."""
    given = ["--shape", case.shape, "--length", str(case.length), "--samples", str(case.samples)]
    done = subprocess.run(
        [python, str(WORK), work, *given], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{work} at {case.name}: failed\n{done.stderr[-500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def key(case: Case, turn: int, work: str) -> Run:
    return {
        "shape": case.shape,
        "samples": case.samples,
        "length": case.length,
        "turn": turn,
        "work": work,
    }


def known(path: Path) -> list[Run]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def take(cases: Sequence[Case], path: Path, minutes: float, peers: str | None) -> None:
    """Measures what the file lacks, for so many minutes."""
    started = time.monotonic()
    there = [{k: run[k] for k in key(cases[0], 0, "")} for run in known(path)]
    for case, turn, work in due(cases):
        if key(case, turn, work) in there or (work in PEERS and peers is None):
            continue
        if time.monotonic() - started > 60 * minutes:
            print(f"{minutes:g} minutes are over: call again for the rest", file=sys.stderr)
            return
        before = time.monotonic()
        found = measure(case, work, peers if work in PEERS and peers else sys.executable)
        run = {**key(case, turn, work), **(found or {"failed": True})}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
        seconds = time.monotonic() - before
        print(f"{case.shape} {case.name} {work} #{turn}: {seconds:.0f} s", file=sys.stderr)


@dataclass(frozen=True)
class Found:
    """The medians of one work in one case."""

    case: Case
    work: str
    seconds: float
    peak: float
    ratio: float | None  # of time to the plain pass of the same turn
    over: float | None  # bytes at the peak above the plain pass


def found(cases: Sequence[Case], runs: Sequence[Run]) -> list[Found]:
    rows = []
    for case in cases:
        own = {
            (run["turn"], run["work"]): run
            for run in runs
            if (run["shape"], run["samples"], run["length"])
            == (case.shape, case.samples, case.length)
            and "failed" not in run
        }
        for work in (*case.works, *case.once):
            turns = [turn for turn, name in own if name == work]
            if not turns:
                continue
            paired = [turn for turn in turns if (turn, "plain") in own]

            def of(turn: object, name: str, column: str, own: dict = own) -> float:
                return own[turn, name][column]

            rows.append(
                Found(
                    case,
                    work,
                    median(of(t, work, "seconds") for t in turns),
                    median(of(t, work, "peak_bytes") for t in turns),
                    median(of(t, work, "seconds") / of(t, "plain", "seconds") for t in paired)
                    if paired
                    else None,
                    median(of(t, work, "peak_bytes") - of(t, "plain", "peak_bytes") for t in paired)
                    if paired
                    else None,
                )
            )
    return rows


HEADER = ["shape", "tokens", "work", "seconds", "× plain", "peak GB", "over plain, GB"]


def table(rows: Sequence[Found]) -> str:
    lines = [HEADER, ["---", "---", "---", *(["---:"] * 4)]]
    for row in sorted(rows, key=lambda r: (r.case.shape, r.case.samples, r.case.length)):
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        over = "" if row.over is None else f"{row.over / 1e9:+.2f}"
        cells = [row.case.shape, row.case.name, row.work, f"{row.seconds:.2f}", ratio]
        lines.append([*cells, f"{row.peak / 1e9:.2f}", over])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a line through the logarithms."""
    x, y = [math.log(v) for v in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def bars(rows: Sequence[Found]) -> str:
    """The figures that were promised, beside what was measured."""
    by_name = {
        (r.case.samples, r.case.length, r.work): r for r in rows if r.case.shape == "gpt2-small"
    }
    wide = {r.work: r.ratio for r in rows if r.case.shape == "width 4096"}
    narrow = {work: r.ratio for (n, length, work), r in by_name.items() if (n, length) == (16, 512)}

    def tax(work: str, own: dict[str, float | None]) -> float | None:
        with_ranks, without = own.get(work), own.get(WITHOUT)
        return None if with_ranks is None or without is None else with_ranks - without

    def ratio(samples: int, length: int, work: str) -> float | None:
        row = by_name.get((samples, length, work))
        return None if row is None else row.ratio

    def against(
        work: str, other: str = "scan", samples: int = 1, length: int = 4096
    ) -> float | None:
        pair = by_name.get((samples, length, work)), by_name.get((samples, length, other))
        return pair[0].seconds / pair[1].seconds if pair[0] and pair[1] else None

    long = [r for (n, length, w), r in by_name.items() if n == 1 and length >= LONG and w == "scan"]
    grown = None
    if len(long) > 1:
        grown = exponent([r.case.length for r in long], [r.peak for r in long])
    extra = by_name.get((1, 16384, "scan"))
    extra_gb = None if extra is None or extra.over is None else extra.over / 1e9
    lines = [
        ("sink + entropy over the plain pass, 4,096 tokens", 1.35, ratio(1, 4096, "sink+entropy")),
        ("scan over the plain pass, 4,096 tokens", 2.0, ratio(1, 4096, "scan")),
        ("scan over the plain pass, 16 samples of 512", 1.4, ratio(16, 512, "scan")),
        ("what ranks add to a scan, over the plain pass, 16 × 512", 0.1, tax("scan", narrow)),
        ("of heads alone, the same", 0.03, tax(BY_HEAD, narrow)),
        ("what ranks add at width 4,096, 16 × 512", 0.35, tax("scan", wide)),
        ("memory above the plain pass, 16,384 tokens, GB", 0.4, extra_gb),
        ("exponent of memory in length, 4,096 to 32,768", 1.1, grown),
    ]
    text = ["| GPT-2 small's shape | must be at most | measured |", "| --- | ---: | ---: |"]
    text += [f"| {n} | {m:g} | {'' if v is None else f'{v:.2f}'} |" for n, m, v in lines]
    text += ["", "| time over that of `scan`, 4,096 tokens | must be at least | measured |"]
    text += ["| --- | ---: | ---: |"]
    for work in (*THEIRS, EVERY):
        value = against(work)
        least = "4" if work.startswith("output_attentions") else ""
        text.append(f"| {work} | {least} | {'' if value is None else f'{value:.1f}'} |")
    return "\n".join(text)


def grows(rows: Sequence[Found]) -> str:
    """How time and memory grow, fitted from 4,096 tokens on."""
    lines = []
    for work in ("plain", "scan"):
        own = [
            r
            for r in rows
            if (r.case.shape, r.case.samples, r.work) == ("gpt2-small", 1, work)
            and r.case.length >= LONG
        ]
        if len(own) > 1:
            lengths = [r.case.length for r in own]
            in_time = exponent(lengths, [r.seconds for r in own])
            in_memory = exponent(lengths, [r.peak for r in own])
            reach = f"{min(lengths):,} to {max(lengths):,}"
            lines.append(f"`{work}`, {reach}: time {in_time:.2f}, memory {in_memory:.2f}.")
    return " ".join(["Fitted exponents in the length:", *lines]) if lines else ""


def machine() -> str:
    import torch
    import transformers

    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def draw(rows: Sequence[Found], path: Path) -> None:
    """Time and memory over the length, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    own = [r for r in rows if r.case.shape == "gpt2-small" and r.case.samples == 1]
    for work in dict.fromkeys(r.work for r in own):
        line = sorted((r for r in own if r.work == work), key=lambda r: r.case.length)
        lengths = [r.case.length for r in line]
        axes[0].loglog(lengths, [r.seconds for r in line], "o-", label=work, ms=4, lw=1.3)
        axes[1].loglog(lengths, [r.peak / 1e9 for r in line], "o-", label=work, ms=4, lw=1.3)
    for axis, label in zip(axes, ("seconds", "peak memory, GB"), strict=True):
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("benchmarks.jsonl"), help="what is kept")
    parser.add_argument("--minutes", type=float, default=20, help="no run starts later")
    parser.add_argument("--peers", help="a Python that has transformer-lens and nnsight")
    parser.add_argument("--only", type=int, nargs="+", help="only these lengths")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()

    cases = [c for c in CASES if options.only is None or c.length in options.only]
    take(cases, options.runs, options.minutes, options.peers)
    rows = found(CASES, known(options.runs))
    if not rows:
        sys.exit("nothing was measured yet")
    text = "\n\n".join(filter(None, [machine(), bars(rows), table(rows), grows(rows)]))
    print(text)
    if options.write:
        draw(rows, FIGURE)
        head = PAGE.read_text(encoding="utf-8").partition(MARKER)[0]
        PAGE.write_text(f"{head}{MARKER}\n\n{PICTURE}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
