"""What the targets of a run are, or will be, measured on, before any of them is.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnprobe.audit.targets import Target

if TYPE_CHECKING:
    from attnprobe.result import Result


@dataclass(frozen=True)
class Foreseen:
    """What a target is, or will be, measured on: these parts of its `Result`, as far as known."""

    name: str
    checkpoint: dict[str, Any]
    input: dict[str, Any]
    run: dict[str, Any]


def foresee(
    targets: Sequence[Target],
    known: Callable[[Target], list[Result] | None],
    asked: Callable[[Target], dict[str, Any] | None],
    run: dict[str, Any],
) -> list[Foreseen | None] | None:
    """Of every result that the targets have or will have, None where that is not known.

    Args:
        targets: of the run.
        known: gives the results that a target has already, None where it must be measured.
        asked: gives `checkpoint` and `input` of one that must be, None where nobody can.
        run: options of measuring.

    Returns:
        None where there is nothing to hold against another, or to measure.
    """
    there = [known(target) for target in targets]
    if len(there) < 2 or None not in there:
        return None
    told: list[Foreseen | None] = []
    for target, results in zip(targets, there, strict=True):
        if results is None:
            answer = asked(target)
            told.append(None if answer is None else Foreseen(target.name, **answer, run=run))
        for result in results or ():
            name = result.checkpoint.get("name") if target.is_result else target.name
            about = result.checkpoint, result.input, result.run
            told.append(Foreseen(str(name or target.name), *about))
        if results == []:
            told.append(None)
    return told
