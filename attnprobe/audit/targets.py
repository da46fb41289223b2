"""What targets stand for: files, folders, globs and packaged names. Needs no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnprobe.errors import CheckpointError
from attnprobe.loading import hub, places
from attnprobe.loading.places import PAIR, RESULTS, SUFFIXES, HubId, step_order


@dataclass(frozen=True)
class Target:
    """One checkpoint or result file to gather results from.

    Attributes:
        name: short, and no other target of the run has it.
        path: of the file or folder, or what was given where there is none.
        is_result: whether it is a saved result, not a checkpoint.
        problem: why there is nothing to read, None where there is something.
        hub: the id, for a model of the Hugging Face hub.
    """

    name: str
    path: Path
    is_result: bool = False
    problem: str | None = None
    hub: HubId | None = None


@dataclass(frozen=True)
class _Place:
    path: Path
    problem: str | None = None
    hub: HubId | None = None


def resolve(targets: Sequence[str]) -> list[Target]:
    """Finds the files that targets stand for, in their order, each file once.

    A folder of transformers is one model; another stands for the checkpoints in it, or where it has
    none for its result files; both, and what a glob matches, come in order of training step, then
    name. A name that is no path is a packaged checkpoint, `org/name` a model of the Hugging Face
    hub; nothing at all is the packaged pair.

    Raises:
        InputError: a name is empty.
        CheckpointError: nothing was given and the packaged pair is missing.
    """
    if not targets:
        there = places.packaged()
        found = [_Place(there[name]) for name in PAIR if name in there]
        if not found:
            raise CheckpointError(
                "no packaged checkpoints are installed: name one, or make one with attnprobe train"
            )
    else:
        found = [place for given in targets for place in _places(given)]
    by_file: dict[str, _Place] = {}
    for place in found:
        by_file.setdefault(os.path.realpath(place.path), place)
    unique = list(by_file.values())
    told = [place.path if place.hub else places.named_by(place.path) for place in unique]
    names = _names(told)
    return [
        Target(name, place.path, _is_saved(place), place.problem, place.hub)
        for name, place in zip(names, unique, strict=True)
    ]


def _places(given: str) -> list[_Place]:
    path = places.path_of(given)
    if os.path.isdir(path):  # which, other than a Path's own, never raises
        return _opened(path)
    if os.path.isfile(path):
        return [_Place(path)]
    if os.path.exists(path):  # a pipe or a device, which may never end
        return [_Place(path, f"{path} is no regular file")]
    if (matched := places.matching(given)) is not None:
        found = [p for m in matched for p in (_opened(m) if m.is_dir() else [_Place(m)])]
        return found or [_Place(path, f"no checkpoint or result file matches {given}")]
    if given in (there := places.packaged()):
        return [_Place(there[given])]
    if (wanted := hub.named(given)) is not None:
        return [_Place(path, hub=wanted)]
    return [_Place(path, places.not_there(path))]


def _is_saved(place: _Place) -> bool:
    return place.hub is None and place.path.suffix == RESULTS and not place.path.is_dir()


def _opened(folder: Path) -> list[_Place]:
    if places.foreign(folder) is not None:
        return [_Place(folder)]
    try:
        inside = places.checkpoints_in(folder) or _results_in(folder)
    except OSError as error:
        return [_Place(folder, f"cannot read {folder}: {error.strerror or error}")]
    if not inside:
        return [_Place(folder, f"{folder} holds no checkpoint and no result file")]
    return [_Place(path) for path in inside]


def _results_in(folder: Path) -> list[Path]:
    files = sorted((p for p in folder.iterdir() if p.is_file()), key=step_order)
    return [path for path in files if places.is_result(path)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Stems, with the suffix or as much of the path as tells them apart."""
    stems = Counter(_bare(path) for path in paths)
    bare = [path if stems[_bare(path)] > 1 else _bare(path) for path in paths]
    names = [path.name or str(path) for path in bare]
    for parts in range(2, max((len(path.parts) for path in bare), default=0) + 1):
        counts = Counter(names)
        names = [
            "/".join(path.parts[-parts:]) if counts[name] > 1 else name
            for path, name in zip(bare, names, strict=True)
        ]
    return names


def _bare(path: Path) -> Path:
    """A path without the suffix of a checkpoint or a result."""
    return path.with_suffix("") if path.suffix in (*SUFFIXES, RESULTS) and path.stem else path
