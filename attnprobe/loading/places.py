"""What a path, a name or an id stands for. Needs no torch."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnprobe.errors import InputError

PRETRAINED = Path(__file__).parents[1] / "pretrained"
PAIR = ("ungated", "gated")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf")
RESULTS = ".json"
CONFIG, ADAPTER = "config.json", "adapter_config.json"

_FOREIGN_KEYS = {"architectures", "model_type", "transformers_version"}
#: What training loops leave beside the weights.
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states)\b")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)[-.\w]*\.(safetensors|bin)")
_PEEK = 256  # bytes at the start of a result file that show it to be one
_STEP = re.compile(r"(?:step|iter|iteration|epoch|ckpt|checkpoint)\D{0,3}(\d+)", re.IGNORECASE)
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"  # of an id: the hub takes no dot or dash at its ends
_REVISION = r"(?:@([\w./-]+))?"
_HUB = re.compile(rf"({_PART}/{_PART})((?:/[\w.-]+)*){_REVISION}", re.ASCII)
_BARE = re.compile(rf"({_PART})(){_REVISION}", re.ASCII)


@dataclass(frozen=True)
class HubId:
    """A model of the Hugging Face hub: `org/name`, `org/name/folder` or `org/name@revision`.

    Attributes:
        repo: `org/name`, or a `name` alone, as the first models have it.
        inside: a folder or a GGUF file of the repository, "" for all of it.
        revision: a branch, tag or commit; None where the id names none.
    """

    repo: str
    inside: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        behind = "" if self.revision is None else f"@{self.revision}"
        return "/".join(filter(None, (self.repo, self.inside))) + behind


def hub_id(given: str, *, bare: bool = False) -> HubId | None:
    """The id that a name can be, None where it can only be a path.

    A path into a folder that is there is a misspelt path, and a file of weights is no id.

    Args:
        given: the name.
        bare: whether it may be without an organisation, as `gpt2` is.
    """
    match = _HUB.fullmatch(given) or (_BARE.fullmatch(given) if bare else None)
    if match is None or os.path.exists(given) or os.path.isdir(given.split("/")[0]):
        return None
    repo, inside, revision = match[1], match[2].strip("/"), match[3]
    suffixes = (*SUFFIXES, RESULTS) if bare else SUFFIXES
    if (inside or repo).endswith(tuple(s for s in suffixes if s != ".gguf" or not inside)):
        return None
    return HubId(repo, inside, revision)


def path_of(given: str) -> Path:
    """The path that a name can be.

    Raises:
        InputError: there is no name, as where a variable of a shell is not set.
    """
    if not given.strip():
        raise InputError(f"a checkpoint has no name ({given!r}): name one, or leave it out")
    return Path(os.path.expanduser(given))


def packaged() -> dict[str, Path]:
    """The checkpoints that come with the package by name, the default pair first."""
    there = {path.stem: path for path in sorted(PRETRAINED.glob("*.pt"))}
    names = [name for name in PAIR if name in there]
    names += [name for name in there if name not in PAIR]
    return {name: there[name] for name in names}


def matching(given: str) -> list[Path] | None:
    """What a glob stands for, in order of training step; None where it is none, or a path itself.

    Folders, and of files those that can be checkpoints or saved results: others lie beside them.
    """
    path = os.path.expanduser(given)
    if not glob.has_magic(path) or os.path.exists(path):
        return None
    found = sorted(map(Path, glob.glob(path, recursive=True)), key=step_order)
    return [p for p in found if os.path.isdir(p) or _is_weights(p) or is_result(p)]


def not_there(given: str | Path) -> str:
    """One line for a path that does not exist, or that the system does not let us see."""
    if matching(str(given)) is not None:
        return f"no checkpoint matches {given}: check the pattern"
    if os.path.islink(given):
        return f"{given} is a link to {os.readlink(given)}, which leads nowhere: check it"
    try:
        os.stat(given)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return unreadable(given, error)
    except ValueError:  # a NUL in it
        pass
    names = ", ".join(packaged())
    known = f"; the packaged ones are {names}" if names else ""
    if hub_id(str(given), bare=True) is None:
        return f"{given} does not exist: check the path{known}"
    return (
        f"{given} does not exist, and the cache of the Hugging Face hub has no model of that name: "
        f"check the path, or name a model of the hub as org/name{known}"
    )


def unreadable(path: str | Path, error: OSError) -> str:
    """One line for what the system says of a path, or of a file below it."""
    return f"cannot read {error.filename or path}: {error.strerror or error}"


def foreign(path: Path) -> Path | None:
    """The folder of transformers or the GGUF file that a path stands for, None if it is neither.

    Weights in such a folder stand for it: alone they do not say what they are of.
    """
    if path.suffix == ".gguf" and os.path.isfile(path):
        return path
    if os.path.isfile(path):
        return path.parent if _WEIGHTS.fullmatch(path.name) and _is_foreign(path.parent) else None
    return path if _is_foreign(path) else None


def foreign_config(model_config: object) -> dict[str, Any] | None:
    """The config of transformers that was given for a bare state dict, None if it is none."""
    is_file = isinstance(model_config, (str, Path))
    found = read_json(Path(model_config)) if is_file else model_config  # type: ignore[arg-type]
    is_one = isinstance(found, dict) and not _FOREIGN_KEYS.isdisjoint(found)
    return found if is_one else None  # type: ignore[return-value]


def named_by(path: Path) -> Path:
    """The path that a checkpoint is named by: for weights of transformers that of their folder."""
    place = foreign(path)
    return path if place is None or os.path.isfile(place) else place


def _is_foreign(folder: Path) -> bool:
    if os.path.lexists(folder / ADAPTER):  # a link to nowhere is damage, which reading will say
        return True
    config = folder / CONFIG
    if not os.path.lexists(config):
        return False
    found = read_json(config)
    if found is not None:
        return not _FOREIGN_KEYS.isdisjoint(found)
    try:  # it is damaged: the others must tell
        names = [path.name for path in folder.iterdir()]
    except OSError:  # which is for the reader to say
        return False
    return "tokenizer_config.json" in names or any(map(_WEIGHTS.fullmatch, names))


def is_result(path: Path) -> bool:
    """Whether a file looks like a saved result: folders hold configs and the like, too."""
    if path.suffix != RESULTS:
        return False
    try:
        with path.open("rb") as file:
            return b'"schema"' in file.read(_PEEK)
    except OSError:
        return True  # that it cannot be read is for the reader to say


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder in order of training step: files, and folders of transformers.

    Raises:
        OSError: the folder may not be opened.
    """
    inside = sorted(folder.iterdir(), key=step_order)
    return [path for path in inside if _is_weights(path) or (path.is_dir() and _is_foreign(path))]


def _is_weights(path: Path) -> bool:
    is_named_so = path.suffix in SUFFIXES and not _NO_WEIGHTS.match(path.name)
    return is_named_so and path.is_file()


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
