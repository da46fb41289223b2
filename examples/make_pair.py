"""Makes the packaged checkpoints again: three models that differ in their gates alone.

    python examples/make_pair.py [FOLDER]

Each is trained by `attnprobe train` from the same data, seed and number of steps, on one thread of
the CPU, some five minutes each; the same machine and torch give the same weights. The feed-forward
layers of the gated ones are narrower by exactly the parameters that their gates take.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from attnprobe.models import load_checkpoint, save_checkpoint

RECIPE = (
    "--task backcopy --seed 0 --steps 3000 --batch-size 64 --length 64 --lr 6e-3 "
    "--width 64 --layers 4 --heads 4 --positions rotary --norm post "
    "--monitor-every 100 --device cpu"
)
TWINS = {
    "ungated": "--gate none --ff 64",
    "gated": "--gate G1 --granularity element --ff 32",
    "gated-head": "--gate G1 --granularity head --ff 62",
}


def make(path: Path, options: str) -> None:
    """Trains one checkpoint and drops the optimiser's state from it."""
    command = f"attnprobe train {path} {RECIPE} {options} --force"
    print(command, flush=True)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums do not depend on the core count
    subprocess.run([sys.executable, "-m", *command.split()], check=True, env=one_thread)
    made = load_checkpoint(path)
    save_checkpoint(path, made.model, made.inputs, made.train)


def main() -> None:
    """Makes all three."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "pair")
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in TWINS.items():
        make(folder / f"{name}.pt", options)


if __name__ == "__main__":
    main()
