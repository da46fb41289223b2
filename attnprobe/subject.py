"""What a path, a packaged name or an id turns into: a model, its vocabulary and who it is."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnprobe import tasks
from attnprobe.errors import CheckpointError, InputError
from attnprobe.files import file_sha256
from attnprobe.loading import folder as folders
from attnprobe.loading import parallel, places
from attnprobe.loading.folder import Folder
from attnprobe.loading.hub import fetch, named
from attnprobe.loading.identity import joint_sha256
from attnprobe.loading.limits import Limits, foreign_limits, reads
from attnprobe.loading.options import LoadOptions, check_local
from attnprobe.loading.outline import essentials
from attnprobe.loading.places import PAIR, RESULTS, SUFFIXES, HubId
from attnprobe.models import load_checkpoint
from attnprobe.tasks import Vocabulary

if TYPE_CHECKING:
    from attnprobe.loading.pretrained import Loaded

__all__ = ["Address", "Limits", "LoadOptions", "Subject", "addresses", "find_device", "load"]

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Address:
    """Where a checkpoint lies, and a short name that no other of the same run has.

    Attributes:
        name: the name.
        path: of a file or folder; of a model of the hub its id, until it is fetched.
        hub: the id, None for what lies on this machine.
        commit: that was fetched, None for others.
    """

    name: str
    path: Path
    hub: HubId | None = None
    commit: str | None = None


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
        notes: what the user may not expect of it.
        unread: why the tokenizer that is there could not be read, None where it was, or is none.
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
    notes: tuple[str, ...] = ()
    unread: str | None = None


def packaged() -> list[Address]:
    """The checkpoints that come with the package, the default pair first."""
    return [Address(name, path) for name, path in places.packaged().items()]


def addresses(checkpoints: Sequence[str] | None) -> list[Address]:
    """Finds what was named, without opening it; what is not there fails when it is loaded.

    A folder stands for the model or the checkpoints in it, a glob for what it matches, a name
    without a path for a packaged checkpoint, `org/name` for a model of the Hugging Face hub (a
    `name` alone where its cache has it), nothing at all for the packaged pair.

    Raises:
        InputError: a name is empty.
        CheckpointError: nothing was named and the packaged pair is missing.
    """
    if not checkpoints:
        pair = [address for address in packaged() if address.name in PAIR]
        if not pair:
            raise CheckpointError(
                "no packaged checkpoints are installed: name one, or make one with attnprobe train"
            )
        return pair
    return _distinct([place for given in checkpoints for place in _places(given)])


def load(address: Address, options: LoadOptions | None = None, **more: Any) -> Subject:
    """Reads a checkpoint.

    Args:
        address: from `addresses`.
        options: how.
        more: fields of `LoadOptions`, in place of them.

    Raises:
        CheckpointError: it cannot be read, or not as what it says that it is.
        TooLargeError: it does not fit into memory.
        InputError: there is no such device.
    """
    how = LoadOptions(**more) if options is None else options
    device, dtype = find_device(how.device), DTYPES[how.dtype]
    address, notes = fetched(address, how)
    try:
        return _read(address, how, device, dtype, notes)
    except OSError as error:
        raise CheckpointError(places.unreadable(address.path, error)) from error


def _read(
    address: Address,
    how: LoadOptions,
    device: torch.device,
    dtype: torch.dtype | None,
    notes: tuple[str, ...],
) -> Subject:
    """What lies on this machine, as what it is."""
    path = address.path
    if not os.path.exists(path):  # which a name too long for a file does not upset
        raise CheckpointError(places.not_there(path))
    if places.is_result(path):
        raise CheckpointError(
            f"{path} is a saved result, not a checkpoint: attnprobe compare and attnprobe audit "
            "read it"
        )
    place = places.foreign(path)
    if place is None or (path.is_file() and how.model_config is not None):
        config = places.foreign_config(how.model_config)
        if config is None or not path.is_file():
            return _own(address, how, device, dtype)
        return _foreign(address, Folder(path, config, (path,)), how, device, dtype, notes)
    folder = folders.read(place)
    if path.is_file() and path not in folder.weights:
        names = ", ".join(file.name for file in folder.weights)
        raise CheckpointError(f"{place} is read from {names}, not from {path.name}: name it")
    return _foreign(address, folder, how, device, dtype, notes)


def fetched(address: Address, how: LoadOptions) -> tuple[Address, tuple[str, ...]]:
    """An address on this machine, and what is to be said of how it came there.

    Raises:
        CheckpointError: the hub has no such model, or is out of reach; a revision of what is no
            model of the hub.
    """
    if address.hub is None:
        check_local(address.path, how.revision)
        return address, ()
    if address.commit is not None:
        return address, ()
    found = fetch(address.hub, revision=how.revision, offline=how.offline)
    notes = () if found.note is None else (found.note,)
    return replace(address, path=found.path, commit=found.commit), notes


def _own(
    address: Address, how: LoadOptions, device: torch.device, dtype: torch.dtype | None
) -> Subject:
    """One of the project's own models."""
    if how.device_map is not None:
        raise CheckpointError(
            "--device-map spreads models of transformers, and this is one of attnprobe's own: "
            "leave it out, or use --device"
        )
    if how.tensor_parallel:
        parallel.refuse(address.path, "one of attnprobe's own")
    checkpoint = load_checkpoint(address.path, how.model_config)
    vocabulary = None if checkpoint.inputs is None else tasks.load(checkpoint.inputs)
    return Subject(
        name=address.name,
        about={
            "name": address.name,
            "path": str(checkpoint.path),
            "bytes": checkpoint.path.stat().st_size,
            "sha256": file_sha256(checkpoint.path),
            "task": (checkpoint.inputs or {}).get("kind"),
            "tokenizer": fingerprint(vocabulary),
            **{k: checkpoint.train.get(k) for k in ("step", "loss", "perplexity", "seed")},
            "config": checkpoint.config.to_dict(),
        },
        model=checkpoint.model.to(device=device, dtype=dtype),
        limits=Limits.of(checkpoint.config),
        vocabulary=vocabulary,
        train=checkpoint.train,
        is_encoder_decoder=checkpoint.config.architecture == "encoder-decoder",
        config=checkpoint.config,
    )


def _foreign(
    address: Address,
    folder: Folder,
    how: LoadOptions,
    device: torch.device,
    dtype: torch.dtype | None,
    notes: tuple[str, ...],
) -> Subject:
    """A model of transformers."""
    from attnprobe.loading import adapter, pretrained, words

    loader = adapter.load if folder.is_adapter else pretrained.load
    loaded = loader(folder, how, device, dtype)
    vocabulary, unread = words.vocabulary(folder, loaded, how)
    hub = address.hub
    step = folders.step(folder.root)
    found = of_transformers(address.name, folder, loaded, vocabulary, unread)
    about = {
        "name": address.name,
        "path": str(folder.path) if hub is None else str(hub),
        "hub": None if hub is None else {"id": str(hub), "commit": address.commit},
        "bytes": sum(file.stat().st_size for file in folder.weights),
        "sha256": joint_sha256(folder.weights),
        **found.about,
        **step,
        **loaded.about,
    }
    return replace(found, about=about, notes=(*notes, *loaded.notes))


def of_transformers(
    name: str, folder: Folder, loaded: Loaded, vocabulary: Vocabulary | None, unread: str | None
) -> Subject:
    """A model of transformers with what follows from its config and tokenizer, weights or none."""
    return Subject(
        name=name,
        about={
            "task": None,
            "tokenizer": fingerprint(vocabulary),
            "config": essentials(loaded.config),
        },
        model=loaded.model,
        limits=foreign_limits(loaded.model, loaded.config),
        vocabulary=vocabulary,
        train={},
        reads=reads(loaded.model),
        is_encoder_decoder=bool(getattr(loaded.config, "is_encoder_decoder", False)),
        folder=folder.path,
        config=loaded.config,
        unread=unread,
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


def _places(given: str) -> Iterator[Path | HubId]:
    path = places.path_of(given)
    if os.path.isdir(path):
        yield from [path] if places.foreign(path) else _inside(path) or [path]
    elif not os.path.exists(path) and given in (there := places.packaged()):
        yield there[given]
    elif (matched := places.matching(given)) is not None:
        checkpoints = [m for m in matched if m.suffix != RESULTS or os.path.isdir(m)]
        yield from (place for match in checkpoints for place in _places(str(match)))
        if not checkpoints:
            yield path
    else:
        yield named(given) or path


def _inside(folder: Path) -> list[Path]:
    """The checkpoints in a folder; none in one that may not be opened, which loading will say."""
    try:
        return places.checkpoints_in(folder)
    except OSError:
        return []


def _distinct(found: Sequence[Path | HubId]) -> list[Address]:
    """Stems as names, with as much of the path as it takes, and a number for the same file."""
    hubs = [place if isinstance(place, HubId) else None for place in found]
    paths = [Path(str(place)) for place in found]
    told = [path if hub else places.named_by(path) for path, hub in zip(paths, hubs, strict=True)]
    names = [_tail(path, 1) for path in told]
    for parts in range(2, max((len(path.parts) for path in told), default=0) + 1):
        counts = Counter(names)
        names = [
            _tail(path, parts) if counts[name] > 1 else name
            for path, name in zip(told, names, strict=True)
        ]
    seen: Counter[str] = Counter()
    distinct = []
    for name, path, hub in zip(names, paths, hubs, strict=True):
        seen[name] += 1
        distinct.append(Address(name if seen[name] == 1 else f"{name} ({seen[name]})", path, hub))
    return distinct


def _tail(path: Path, parts: int) -> str:
    """The last parts of a path, without the suffix of a checkpoint."""
    path = path.with_suffix("") if path.suffix in SUFFIXES and path.stem else path
    return "/".join(path.parts[-parts:]) or str(path)


def fingerprint(vocabulary: Vocabulary | None) -> str | None:
    """A name for a vocabulary: ids of two with the same one mean the same text."""
    if vocabulary is None:
        return None
    sha = hashlib.sha256()
    for name, value in sorted(vocabulary.state().items()):
        plain = value.tolist() if isinstance(value, torch.Tensor) else value
        sha.update(f"{name}={plain!r};".encode("utf-8", "surrogatepass"))
    return sha.hexdigest()[:16]
