"""Weights are numbers with a fraction: whole ones, truth values and complex ones are refused.

A library casts them to floats without a word, and figures of the cast would look like any others.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import CheckpointError
from attnprobe.loading.folder import Folder, header

#: How safetensors calls types that hold no fraction.
_OTHERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64"}


def check(folder: Folder) -> None:
    """Refuses weights of another type, unless the config names a quantisation that packs them so.

    Raises:
        CheckpointError: naming the first; or a file holds something else than tensors by name.
    """
    if folder.is_gguf or folder.config.get("quantization_config") is not None:
        return
    for file in folder.weights:
        for name, kind in _strange(file):
            raise CheckpointError(
                f"{file}: {name} is {kind}, which holds no fractions: save its weights as floats, "
                "or name in config.json how they were quantised"
            )


def _strange(file: Path) -> Iterator[tuple[str, str]]:
    if file.suffix == ".safetensors":
        found = {name: kind for name, (kind, _) in header(file).items()}
        yield from ((n, k) for n, k in found.items() if _is_weight(n) and k in _OTHERS)
        return
    for name, value in _outline(file).items():
        if isinstance(value, Tensor) and _is_weight(str(name)) and not value.is_floating_point():
            yield str(name), str(value.dtype).removeprefix("torch.")


def _is_weight(name: str) -> bool:
    return name.endswith(".weight")


def _outline(file: Path) -> Mapping[Any, Any]:
    """The tensors of a pickle by name, without their numbers; none where reading will say why."""
    if not zipfile.is_zipfile(file):  # an old one, which could only be read as a whole
        return {}
    try:
        content = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, OSError, RuntimeError, ValueError, KeyError, EOFError):
        return {}
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not weights by name")
    return content
