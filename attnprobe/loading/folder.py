"""What lies in a folder of transformers: its config, the files of its weights, who it is.

Needs no torch. What is missing or cut short is found here, before a library trips over it.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from attnprobe.errors import CheckpointError
from attnprobe.loading.places import ADAPTER, CONFIG, not_there, read_json, unreadable

#: Names of weights in the order in which transformers looks for them.
MODEL_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: Files beside the weights that figures depend on: config, tokenizer, code.
_BESIDE = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
#: Bytes of an element, by the name that safetensors has for its type.
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
BYTES |= {"I16": 2, "U16": 2, "C64": 8}  # all others take one, or less
_POINTER = b"version https://git-lfs.github.com/"
_GGUF = b"GGUF"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Folder:
    """A model as files.

    Attributes:
        path: the folder, a GGUF file, or a bare state dict whose config comes from elsewhere.
        config: what `config.json` or `adapter_config.json` holds; empty for GGUF.
        weights: the files that are loaded.
    """

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf" and self.path.is_file()

    @property
    def is_bare(self) -> bool:
        return self.path.is_file() and not self.is_gguf

    @property
    def is_adapter(self) -> bool:
        return "peft_type" in self.config

    @property
    def root(self) -> Path:
        """The folder itself, or that of the file."""
        return self.path.parent if self.path.is_file() else self.path

    def beside(self) -> list[Path]:
        """The small files that figures depend on, too."""
        if self.path.is_file():
            return []
        return sorted(p for p in self.path.iterdir() if p.suffix in _BESIDE and p.is_file())


def read(path: Path) -> Folder:
    """A folder, its config and weights found and whole as far as that costs little.

    Raises:
        CheckpointError: no weights, a missing or truncated part, a config that is no JSON object.
    """
    if path.is_file():
        _refuse_pointer(path)
        _refuse_no_gguf(path)
        return Folder(path, {}, (path,))
    is_adapter = os.path.lexists(path / ADAPTER)
    config = _config(path / (ADAPTER if is_adapter else CONFIG))
    weights = tuple(_weights(path, ADAPTER_WEIGHTS if is_adapter else MODEL_WEIGHTS))
    for file in weights:
        _refuse_pointer(file)
        if file.suffix == ".safetensors":
            header(file)
    return Folder(path, config, weights)


def _refuse_pointer(file: Path) -> None:
    """What git leaves in the place of a large file where Git LFS is not installed."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(f"{file} is a pointer of Git LFS, not the weights: git lfs pull")


def _refuse_no_gguf(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_GGUF))
    except OSError as error:
        raise CheckpointError(unreadable(file, error)) from None
    if start != _GGUF:
        what = "is empty" if not start else "is no GGUF file, or is damaged"
        raise CheckpointError(f"{file} {what}: copy or download it again")


def _config(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if found is None:
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(unreadable(path, error)) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON ({error})") from None
        raise CheckpointError(f"{path} must hold a JSON object")
    return found


def _weights(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    name = next((name for name in names if os.path.lexists(folder / name)), None)
    if name is None:
        others = sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf")
        hint = f", or name {folder / others[0]}" if others else ""
        raise CheckpointError(
            f"{folder} holds a config but no weights ({names[0]} or {names[-1].split('.')[0]}.bin, "
            f"or shards with an index): copy or download them too{hint}"
        )
    if not name.endswith(".index.json"):
        yield _regular(folder / name)
        return
    index = _config(folder / name).get("weight_map")
    if not index or not isinstance(index, dict):
        raise CheckpointError(f"{folder / name} has no weight_map: copy or download it again")
    if not all(isinstance(part, str) and PurePath(part).name == part for part in index.values()):
        raise CheckpointError(f"{folder / name} names files that are none: download it again")
    for part in sorted(set(index.values())):
        if not os.path.lexists(folder / part):
            raise CheckpointError(
                f"{folder} lacks {part}, which its {name} names: copy or download it too"
            )
        yield _regular(folder / part)


def _regular(file: Path) -> Path:
    """A file of weights that can be read from its beginning to its end."""
    if os.path.isfile(file):
        return file
    if os.path.isdir(file) or os.path.exists(file):
        what = "a folder" if os.path.isdir(file) else "a pipe or a device"
        raise CheckpointError(f"{file} is {what}, no file of weights: copy or download it again")
    raise CheckpointError(f"{not_there(file)}, or download it again")


def header(file: Path) -> dict[str, tuple[str, int]]:
    """The tensors of a safetensors file: name to type (`F32`) and number of elements.

    Raises:
        CheckpointError: it is none, or is cut short.
    """
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            content = json.loads(opened.read(length)) if 8 + length <= size else None
    except OSError as error:
        raise CheckpointError(unreadable(file, error)) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is no safetensors file, or is damaged") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no safetensors file, or is cut short")
    content.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in content.values()), default=0)
        tensors = {n: (str(e["dtype"]), math.prod(e["shape"])) for n, e in content.items()}
        spans = {n: e["data_offsets"][1] - e["data_offsets"][0] for n, e in content.items()}
    except (KeyError, TypeError, IndexError, AttributeError):
        raise CheckpointError(f"{file} is no safetensors file, or is damaged") from None
    for name, (dtype, number) in tensors.items():
        width = BYTES.get(dtype)
        if spans[name] > number if width is None else spans[name] != number * width:
            raise CheckpointError(f"{file} is damaged at {name}: copy or download it again")
    if 8 + length + end > size:
        missing = 8 + length + end - size
        raise CheckpointError(f"{file} is cut short: {missing:,} bytes are missing; copy it again")
    return tensors


def elements(weights: Iterable[Path]) -> Counter[str] | None:
    """How many numbers there are of each type; None where a file does not say (pickles, GGUF)."""
    count: Counter[str] = Counter()
    for file in weights:
        if file.suffix != ".safetensors":
            return None
        for dtype, number in header(file).values():
            count[dtype] += number
    return count


def step(folder: Path) -> dict[str, Any]:
    """What a trainer wrote down beside a checkpoint: `step`, `loss`, `perplexity`, None if not."""
    state = read_json(folder / "trainer_state.json") or {}
    found = state.get("global_step")
    named = re.search(r"(?:checkpoint|step|global_step)[-_]?(\d+)$", folder.name)
    if not isinstance(found, int):
        found = int(named[1]) if named else None
    history = state.get("log_history")
    entries = history if isinstance(history, list) else []
    losses = [e["loss"] for e in entries if isinstance(e, dict) and "loss" in e]
    loss = losses[-1] if losses and isinstance(losses[-1], (int, float)) else None
    return {"step": found, "loss": loss, "perplexity": None, "seed": None}
