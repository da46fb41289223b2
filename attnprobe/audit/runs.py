"""The checkpoints of one training run, in the order of their steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from attnprobe.result import Result


@dataclass(frozen=True)
class Run:
    """Two or more checkpoints of one training run.

    Attributes:
        name: the folder they lie in.
        results: in the order of their training step.
    """

    name: str
    results: tuple[Result, ...]

    @property
    def steps(self) -> list[int]:
        """The training step of each."""
        return [step for r in self.results if (step := step_of(r)) is not None]


def step_of(result: Result) -> int | None:
    """The training step a checkpoint was saved at, None where it does not say."""
    train = result.checkpoint.get("train")
    found = result.checkpoint.get("step")
    if found is None and isinstance(train, Mapping):
        found = train.get("step")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def find(results: Sequence[Result]) -> list[Run]:
    """Runs of at least two checkpoints: alike in folder, model and seed, apart in step."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if step_of(result) is not None:
            groups.setdefault(_identity(result), []).append(result)
    found = []
    for (folder, _), members in groups.items():
        if len({step_of(r) for r in members}) > 1:
            ordered = sorted(members, key=lambda r: step_of(r) or 0)
            found.append(Run(folder or "run", tuple(ordered)))
    return found


def predecessors(results: Sequence[Result]) -> dict[int, Result | None]:
    """By `id` of a result that is part of a run: the one before it, None for the first."""
    return {
        id(result): before
        for run in find(results)
        for before, result in zip((None, *run.results), run.results, strict=False)
    }


def why_no_run(result: Result) -> str:
    """Why a checkpoint is part of no run."""
    if step_of(result) is None:
        return "the checkpoint does not say at which step it was saved"
    return "a trend takes two checkpoints of the same run, and this one is alone"


def _identity(result: Result) -> tuple[str, str]:
    """What the checkpoints of a run have in common: folder, and model with its seed."""
    about = result.checkpoint
    path = str(about.get("path") or "").replace("\\", "/")
    model: list[Any] = [result.architecture, about.get("config"), about.get("seed")]
    folder = str(PurePath(path).parent) if path else ""
    return folder, json.dumps(model, sort_keys=True, default=str)
