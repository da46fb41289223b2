"""Folders of small checkpoints, healthy and not, and a way to gather them in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attnprobe.audit.runner import GatherOptions
from attnprobe.models import GateConfig, ModelConfig, build, save_checkpoint
from attnprobe.tasks import BackCopy

LAW = "the whale and the sea and the ship that sailed at dawn "
SMALL = {"n_layers": 3, "d_model": 64, "max_length": 512}  # a third of a second to measure
OPTIONS = GatherOptions(samples=4, length=32)

#: Run by `start` and `run`: gathers `argv[1]`, prints an event a line, then how it went.
SCRIPT = """
import json, sys, time
asked = json.loads(sys.argv[1])
started = time.perf_counter()
from pathlib import Path
from attnprobe.audit.runner import GatherOptions, gather
say = lambda *what: print(json.dumps(what), flush=True)
try:
    gathered = gather(
        asked["targets"], GatherOptions(**asked["options"]), jobs=asked["jobs"],
        cache=Path(asked["cache"]), on_event=lambda e: say("event", e.kind, e.name),
    )
except KeyboardInterrupt:
    say("interrupted")
    sys.exit(130)
say("end", [[g.name, len(g.results), g.error, g.cached] for g in gathered])
say("torch", "torch" in sys.modules, time.perf_counter() - started)
"""


def make(path: Path, seed: int, **changes: Any) -> None:
    """A checkpoint that differs from others by its seed."""
    task = BackCopy.learn(LAW)
    torch.manual_seed(seed)
    shape = {"vocab_size": task.vocab_size, "d_model": 16, "n_layers": 1, "n_heads": 2}
    model = build(ModelConfig(**{**shape, "max_length": 32, **changes}))
    save_checkpoint(path, model, task.state(), {"step": seed})


class Payload:
    """What must never run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['TEST_PAYLOAD']}",)


def fill(folder: Path, healthy: int) -> list[str]:
    """So many healthy checkpoints and five that are not, whose names it gives."""
    for step in range(healthy):
        gate = GateConfig("G1") if step % 2 else GateConfig()
        make(folder / f"step{step}.pt", step, gate=gate, **SMALL)
    good = (folder / "step0.pt").read_bytes()
    (folder / "step900-truncated.pt").write_bytes(good[: len(good) // 2])
    (folder / "step901-empty.pt").write_bytes(b"")
    torch.save({"state_dict": Payload()}, folder / "step902-payload.pt")
    content = torch.load(folder / "step0.pt", weights_only=True)
    state = content["state_dict"]
    name = next(iter(state))
    torch.save(
        {**content, "state_dict": {**state, name: state[name] * torch.nan}},
        folder / "step903-nan.pt",
    )
    torch.save(
        {**content, "state_dict": {**state, name: state[name][:-1]}},
        folder / "step904-shapes.pt",
    )
    return ["truncated", "empty", "payload", "nan", "shapes"]


def command(targets: list[str], cache: Path, jobs: int = 1, **options: Any) -> list[str]:
    """The command line of a process that gathers."""
    asked = {
        "targets": targets,
        "options": {"samples": 4, "length": 32, **options},
        "jobs": jobs,
        "cache": str(cache),
    }
    return [sys.executable, "-c", SCRIPT, json.dumps(asked)]


def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Such a process, at work."""
    return subprocess.Popen(
        command(*arguments, **options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def workers(runner: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if _stat(stat)[1] == str(runner):
                found.append(int(stat.parent.name))
    return found


def wait_for_end(pids: list[int], seconds: float = 20) -> None:
    """Until none of the processes runs any more."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        with suppress(OSError):
            while _stat(Path(f"/proc/{pid}/stat"))[0] != "Z":
                assert time.monotonic() < deadline, f"{pid} is still there"
                time.sleep(0.05)


def _stat(path: Path) -> list[str]:
    """State and parent of a process, from what follows its name in brackets."""
    return path.read_text().rpartition(")")[2].split()[:2]


def said(text: str) -> tuple[Counter[str], dict[str, Any]]:
    """How many events of each kind there were, and what else a process said by its first word."""
    events: Counter[str] = Counter()
    other: dict[str, Any] = {}
    for line in text.splitlines():
        word, *rest = json.loads(line)
        if word == "event":
            events[rest[0]] += 1
        else:
            other[word] = rest
    return events, other
