"""What probing costs beside the plain forward pass, in time and peak memory.

    python benchmarks/compare.py                                    # writes nothing, prints a table
    python benchmarks/compare.py --lengths 512 2048 8192 --runs 5 --markdown docs/performance.md

Every run is a process of its own, and the works take turns, so that a machine whose speed drifts
slows all of them alike. Quoted are medians, and ratios of medians to the plain pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

WORK = Path(__file__).with_name("work.py")
MARKER = "<!-- benchmarks/compare.py writes below this line -->"


def measure(work: str, shape: str, length: int, samples: int) -> dict[str, float] | None:
    """One run in a process of its own; None where it failed, as for want of memory."""
    arguments = [work, "--shape", shape, "--length", str(length), "--samples", str(samples)]
    done = subprocess.run(
        [sys.executable, str(WORK), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{work} at {length}: failed\n{done.stderr[-500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def compare(works: list[str], shape: str, length: int, samples: int, runs: int) -> list[list[str]]:
    """Rows of the table for one length."""
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(runs):
        for work in works:
            if (one := measure(work, shape, length, samples)) is not None:
                seen[work].append(one)
    time = {w: median(r["seconds"] for r in seen[w]) for w in works if seen[w]}
    peak = {w: median(r["peak_bytes"] for r in seen[w]) for w in works if seen[w]}
    return [
        [
            f"{samples} × {length:,}" if samples > 1 else f"{length:,}",
            work,
            f"{time[work]:.2f}",
            f"{time[work] / time['plain']:.2f}",
            f"{peak[work] / 1e9:.2f}",
            f"{peak[work] / peak['plain']:.2f}",
            f"{(peak[work] - peak['plain']) / 1e9:+.2f}",
        ]
        for work in works
        if work in time
    ]


HEADER = ["tokens", "work", "seconds", "× plain", "peak GB", "× plain", "over plain, GB"]


def table(rows: list[list[str]]) -> str:
    lines = [HEADER, ["---", "---", *(["---:"] * 5)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    import torch
    import transformers

    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", default=["plain", "sink", "sink+entropy", "scan"])
    parser.add_argument("--shape", default="gpt2-small")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="a page whose lower part is replaced")
    options = parser.parse_args()

    rows = []
    for length in options.lengths:
        rows += compare(options.works, options.shape, length, options.samples, options.runs)
        print(table(rows[-len(options.works) :]), flush=True)
    if options.markdown:
        head = options.markdown.read_text(encoding="utf-8").partition(MARKER)[0]
        command = "python benchmarks/compare.py " + " ".join(sys.argv[1:])
        text = f"{head}{MARKER}\n\n`{command}`\n\n{machine()}\n\n{table(rows)}\n"
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
