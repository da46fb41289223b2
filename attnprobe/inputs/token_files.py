"""Files of numbers: token ids, or pixels and sound where they are no whole numbers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.arrays import Arrays
from attnprobe.inputs.drawn import Drawn, Source, chosen, share
from attnprobe.inputs.framing import Frame
from attnprobe.inputs.options import InputOptions
from attnprobe.subject import Subject


@dataclass(frozen=True)
class TokenRows:
    """Token ids from a file, as they are unless a length or a start token is asked for."""

    name: str
    rows: Sequence[Tensor]

    def draw(self, subject: Subject, options: InputOptions) -> Drawn:
        frame = Frame.of(subject, options, default=False)
        pieces = [
            piece
            for number, row in enumerate(self.rows, start=1)
            for piece in frame.windows(row, options.length, f"row {number} of {self.name}")
        ]
        rows = chosen(pieces, options, None)
        sentence = f"{share(rows, pieces)}{self.name}{frame.told}"
        return Drawn(rows, sentence, "tokens", bool(frame.before))


def read_numbers(path: Path) -> Source:
    """Token ids, or floats of a model that reads none.

    Raises:
        InputError: the file cannot be read, is empty, or holds neither.
    """
    readers = {".npy": _from_npy, ".json": _from_json, ".pt": _from_pt, ".txt": _from_txt}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InputError(f"{path}: token ids are read from {', '.join(readers)}")
    try:
        content = reader(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, IndexError):
        raise InputError(f"{path} cannot be read as {path.suffix} of token ids") from None
    if isinstance(content, Tensor) and content.is_floating_point() and content.dim():
        one = content.dim() == 1  # a recording
        return Source(values=Arrays(str(path), content[None] if one else content))
    return Source(tokens=TokenRows(str(path), _rows(path, content)))


def _rows(path: Path, content: Any) -> list[Tensor]:
    is_flat = isinstance(content, Tensor) and content.dim() == 1
    is_flat |= isinstance(content, list) and not any(isinstance(r, (list, Tensor)) for r in content)
    try:
        rows = [_row(row) for row in ([content] if is_flat else content)]
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError):
        raise InputError(
            f"{path} must hold whole numbers, one sample or one sample a row"
        ) from None
    if not rows or not all(len(row) for row in rows):
        raise InputError(f"{path} is empty or has an empty row: there is nothing to measure")
    return rows


def _row(row: Any) -> Tensor:
    if isinstance(row, list):
        if not all(type(n) is int for n in row):
            raise TypeError
        return torch.tensor(row, dtype=torch.int64)
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise TypeError
    return row.long()


def _from_npy(path: Path) -> Any:
    import numpy as np

    array = np.load(path, allow_pickle=False)
    if array.dtype.kind not in "iuf":
        return [[None]]
    if array.dtype == np.uint64:  # of which the largest would come out negative
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _from_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _from_pt(path: Path) -> Any:
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, list):
        return [_plain(row) if isinstance(row, Tensor) else row for row in content]
    return _plain(content) if isinstance(content, Tensor) else content


def _plain(values: Tensor) -> Tensor:
    """Dense, and in float32 where it has fractions."""
    if values.is_meta or values.is_nested or values.is_quantized:
        raise ValueError("there are no numbers in it")
    values = values if values.layout is torch.strided else values.to_dense()
    return values.float() if values.is_floating_point() else values


def _from_txt(path: Path) -> Any:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[int(n) for n in line.replace(",", " ").split()] for line in lines if line.strip()]
