"""What a path or a packaged name turns into: a model, its vocabulary and who it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnprobe import tasks
from attnprobe.errors import CheckpointError, InputError
from attnprobe.models import ModelConfig, load_checkpoint
from attnprobe.tasks import Vocabulary

PRETRAINED = Path(__file__).with_name("pretrained")
PAIR = ("ungated", "gated")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TRANSFORMERS_KEYS = {"architectures", "model_type", "transformers_version"}


@dataclass(frozen=True)
class Address:
    """Where a checkpoint lies, and a short name that no other of the same run has."""

    name: str
    path: Path


@dataclass(frozen=True)
class Limits:
    """What a model can be shown.

    Attributes:
        vocab_size: token ids that it takes, None if it reads no tokens.
        max_length: tokens that a sample may have at most, None where nothing but memory bounds it.
        usual_length: tokens that its samples had in training, as far as that is known.
        n_heads: query heads of a layer, None where that is unknown or differs.
    """

    vocab_size: int | None
    max_length: int | None
    usual_length: int
    n_heads: int | None

    @classmethod
    def of(cls, config: ModelConfig) -> Limits:
        """Those of one of the project's own models."""
        is_bound = config.positions == "learned"
        most = config.max_length if is_bound else None
        return cls(config.vocab_size, most, config.max_length, config.n_heads)


@dataclass(frozen=True)
class Subject:
    """A model ready to be measured.

    Attributes:
        name: short, distinct from that of the others in the run.
        about: for `Result.checkpoint`: name, path, sha256 of the file, train step, loss and so on.
        model: in eval mode.
        limits: what it can be shown.
        vocabulary: its tokenizer or task; None where the file holds none.
        train: what was written down when it was trained.
        reads: "tokens", "image" or "audio": what its first input is.
        is_encoder_decoder: whether it takes a second sequence.
        folder: where tokenizer files lie, None for the project's own models.
        config: `ModelConfig`, or that of transformers.
    """

    name: str
    about: dict[str, Any]
    model: nn.Module
    limits: Limits
    vocabulary: Vocabulary | None
    train: Mapping[str, Any]
    reads: str = "tokens"
    is_encoder_decoder: bool = False
    folder: Path | str | None = None
    config: Any = None


def packaged() -> list[Address]:
    """The checkpoints that come with the package, the default pair first."""
    there = {path.stem: path for path in sorted(PRETRAINED.glob("*.pt"))}
    names = [name for name in PAIR if name in there]
    names += [name for name in there if name not in PAIR]
    return [Address(name, there[name]) for name in names]


def addresses(checkpoints: Sequence[str] | None) -> list[Address]:
    """Finds what was named, without opening it; what is not there fails when it is loaded.

    A folder stands for the checkpoints in it, a name without a path for a packaged checkpoint,
    nothing at all for the packaged pair.

    Raises:
        CheckpointError: nothing was named and the packaged pair is missing.
    """
    if not checkpoints:
        pair = [address for address in packaged() if address.name in PAIR]
        if not pair:
            raise CheckpointError(
                "no packaged checkpoints are installed: name one, or make one with attnprobe train"
            )
        return pair
    return _distinct([path for given in checkpoints for path in _places(given)])


def load(
    address: Address,
    *,
    model_config: str | Path | Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> Subject:
    """Reads a checkpoint.

    Args:
        address: from `addresses`.
        model_config: as for `load_checkpoint`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        dtype: of the weights: `float32`, `bfloat16`, `float16`, or `auto` as in the file.

    Raises:
        CheckpointError: it cannot be read, or is not one of attnprobe's own formats.
        InputError: there is no such device.
    """
    place, weights_dtype = find_device(device), DTYPES[dtype]
    path = address.path
    if not os.path.exists(path):  # which a name too long for a file does not upset
        raise CheckpointError(_not_there(path))
    if model_config is None and _is_transformers(path):
        raise CheckpointError(
            f"{path} is a transformers model, not one of attnprobe's own checkpoints: "
            "attnprobe.scan(model, tokens) measures any torch model from Python"
        )
    checkpoint = load_checkpoint(path, model_config)
    vocabulary = None if checkpoint.inputs is None else tasks.load(checkpoint.inputs)
    return Subject(
        name=address.name,
        about={
            "name": address.name,
            "path": str(checkpoint.path),
            "bytes": checkpoint.path.stat().st_size,
            "sha256": _sha256(checkpoint.path),
            "task": (checkpoint.inputs or {}).get("kind"),
            "tokenizer": _fingerprint(vocabulary),
            **{k: checkpoint.train.get(k) for k in ("step", "loss", "perplexity", "seed")},
            "config": checkpoint.config.to_dict(),
        },
        model=checkpoint.model.to(device=place, dtype=weights_dtype),
        limits=Limits.of(checkpoint.config),
        vocabulary=vocabulary,
        train=checkpoint.train,
        is_encoder_decoder=checkpoint.config.architecture == "encoder-decoder",
        config=checkpoint.config,
    )


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is the first accelerator there is, else the CPU.

    Raises:
        InputError: there is no such device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # a device without storage, like meta, fails here
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"there is no device {name!r} here: use --device auto or cpu") from None
    return device


def _places(given: str) -> Iterator[Path]:
    path = Path(given).expanduser()
    if os.path.isdir(path):
        inside = sorted((p for p in _listed(path) if p.suffix in SUFFIXES), key=_natural)
        yield from [path] if _is_transformers(path) or not inside else inside
    elif not os.path.exists(path) and given in {address.name for address in packaged()}:
        yield PRETRAINED / f"{given}.pt"
    else:
        yield path


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing in one that may not be opened, which loading it will say."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts step9 before step10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", path.name)]


def _distinct(paths: Sequence[Path]) -> list[Address]:
    """Stems as names, with as much of the path as it takes, and a number for the same file."""
    names = [_tail(path, 1) for path in paths]
    for parts in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        counts = Counter(names)
        names = [
            _tail(path, parts) if counts[name] > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    seen: Counter[str] = Counter()
    found = []
    for name, path in zip(names, paths, strict=True):
        seen[name] += 1
        found.append(Address(name if seen[name] == 1 else f"{name} ({seen[name]})", path))
    return found


def _tail(path: Path, parts: int) -> str:
    """The last parts of a path, without the suffix of a checkpoint."""
    path = path.with_suffix("") if path.suffix in SUFFIXES and path.stem else path
    return "/".join(path.parts[-parts:]) or str(path)


def _not_there(path: Path) -> str:
    names = ", ".join(address.name for address in packaged())
    known = f"; the packaged ones are {names}" if names else ""
    return f"{path} does not exist: check the path{known}"


def _is_transformers(path: Path) -> bool:
    """Whether a folder, or the folder of weights without a config of their own, is such a model."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.suffix != ".safetensors":
        return False
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and not _TRANSFORMERS_KEYS.isdisjoint(config)


def _fingerprint(vocabulary: Vocabulary | None) -> str | None:
    """A name for a vocabulary: ids of two with the same one mean the same text."""
    if vocabulary is None:
        return None
    sha = hashlib.sha256()
    for name, value in sorted(vocabulary.state().items()):
        plain = value.tolist() if isinstance(value, torch.Tensor) else value
        sha.update(f"{name}={plain!r};".encode("utf-8", "surrogatepass"))
    return sha.hexdigest()[:16]


def _sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()
