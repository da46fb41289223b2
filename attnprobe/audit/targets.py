"""What targets stand for: files, folders, globs and packaged names. Needs no torch."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnprobe.errors import CheckpointError

PRETRAINED = Path(__file__).parents[1] / "pretrained"
PAIR = ("ungated", "gated")
CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
RESULTS = ".json"
_STEP = re.compile(r"(?:step|iter|iteration|epoch|ckpt|checkpoint)\D{0,3}(\d+)", re.IGNORECASE)
_PEEK = 256  # bytes at the start of a result file that show it to be one


@dataclass(frozen=True)
class Target:
    """One file to gather results from.

    Attributes:
        name: short, and no other target of the run has it.
        path: of the file, or what was given where there is none.
        is_result: whether it is a saved result, not a checkpoint.
        problem: why there is nothing to read, None where there is something.
    """

    name: str
    path: Path
    is_result: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class _Place:
    path: Path
    problem: str | None = None


def resolve(targets: Sequence[str]) -> list[Target]:
    """Finds the files that targets stand for, in their order, each file once.

    A folder stands for the checkpoints in it, or where it has none for its result files; both, and
    what a glob matches, come in order of training step, then name. A name that is no path is a
    packaged checkpoint; nothing at all is the packaged pair.

    Raises:
        CheckpointError: nothing was given and the packaged pair is missing.
    """
    if not targets:
        pair = [PRETRAINED / f"{name}.pt" for name in PAIR]
        places = [_Place(path) for path in pair if path.is_file()]
        if not places:
            raise CheckpointError(
                "no packaged checkpoints are installed: name one, or make one with attnprobe train"
            )
    else:
        places = [place for given in targets for place in _places(given)]
    by_file: dict[str, _Place] = {}
    for place in places:
        by_file.setdefault(os.path.realpath(place.path), place)
    unique = list(by_file.values())
    names = _names([place.path for place in unique])
    return [
        Target(name, place.path, place.path.suffix == RESULTS, place.problem)
        for name, place in zip(names, unique, strict=True)
    ]


def step_order(path: Path) -> tuple[bool, int, list[tuple[str, int]]]:
    """A sort key: by the training step in a file's name, then by name, step9 before step10.

    A file without a number, as in final.pt, comes last.
    """
    match = _STEP.search(path.stem)
    numbers = re.findall(r"\d+", path.stem)
    step = int(match[1]) if match else int(numbers[-1]) if numbers else None
    return step is None, step or 0, _natural(path.name)


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _places(given: str) -> list[_Place]:
    path = Path(os.path.expanduser(given))
    if os.path.isdir(path):  # which, other than a Path's own, never raises
        return _opened(path)
    if os.path.isfile(path):
        return [_Place(path)]
    if os.path.exists(path):  # a pipe or a device, which may never end
        return [_Place(path, f"{path} is no regular file")]
    if glob.has_magic(given):
        matched = sorted(map(Path, glob.glob(str(path), recursive=True)), key=step_order)
        found = [place for match in matched for place in _matched(match)]
        return found or [_Place(path, f"no checkpoint or result file matches {given}")]
    packaged = PRETRAINED / f"{given}.pt"
    if path.name == given and os.path.isfile(packaged):
        return [_Place(packaged)]
    return [_Place(path, _not_there(path))]


def _matched(path: Path) -> list[_Place]:
    if path.is_dir():
        return _opened(path)
    is_wanted = path.suffix in CHECKPOINTS or (path.suffix == RESULTS and _is_result(path))
    return [_Place(path)] if is_wanted else []


def _opened(folder: Path) -> list[_Place]:
    try:
        inside = _inside(folder)
    except OSError as error:
        return [_Place(folder, f"cannot read {folder}: {error.strerror or error}")]
    return inside or [_Place(folder, f"{folder} holds no checkpoint and no result file")]


def _inside(folder: Path) -> list[_Place]:
    files = sorted((p for p in folder.iterdir() if p.is_file()), key=step_order)
    checkpoints = [p for p in files if p.suffix in CHECKPOINTS]
    return [
        _Place(p)
        for p in checkpoints or [p for p in files if p.suffix == RESULTS and _is_result(p)]
    ]


def _is_result(path: Path) -> bool:
    """Whether a .json looks like a result: folders hold configs and the like, too."""
    try:
        with path.open("rb") as file:
            return b'"schema"' in file.read(_PEEK)
    except OSError:
        return True  # that it cannot be read is for the reader to say


def _not_there(path: Path) -> str:
    names = ", ".join(sorted(p.stem for p in PRETRAINED.glob("*.pt")))
    known = f"; the packaged ones are {names}" if names else ""
    return f"{path} does not exist: check the path{known}"


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
    return path.with_suffix("") if path.suffix in (*CHECKPOINTS, RESULTS) and path.stem else path
