"""Turns an id of the Hugging Face hub into a folder on this machine. Needs no torch.

The only place that touches the network; what it gives is read as any other folder.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from attnprobe.errors import CheckpointError
from attnprobe.loading.folder import ADAPTER_WEIGHTS, MODEL_WEIGHTS
from attnprobe.loading.places import ADAPTER, CONFIG, HubId, hub_id

TIMEOUT = 10.0  # seconds to wait for an answer
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
_LISTED = "https://huggingface.co/models"


@dataclass(frozen=True)
class Snapshot:
    """A revision of a repository on this machine.

    Attributes:
        path: the folder, or the GGUF file, that the id names.
        commit: its hash, None for a folder of this machine.
        note: something the user may not expect.
    """

    path: Path
    commit: str | None = None
    note: str | None = None


def named(given: str) -> HubId | None:
    """The id that someone means by a name, None where it can only be a path.

    A name without an organisation, as `gpt2`, is one where the cache has it: a misspelt path is
    nothing to ask the network for.
    """
    wanted = hub_id(given, bare=True)
    if wanted is None or "/" in wanted.repo or _has_folder(wanted.repo):
        return wanted
    return None


def _has_folder(repo: str) -> bool:
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return os.path.isdir(os.path.join(constants.HF_HUB_CACHE, f"models--{repo}"))


def fetch(wanted: HubId, *, revision: str | None = None, offline: bool = False) -> Snapshot:
    """Finds a model in the cache of the hub, downloading what is new unless it is offline.

    Args:
        wanted: the id; a revision that it names itself goes first.
        revision: a branch, tag or commit; by default `main`.
        offline: look into the cache only, as with HF_HUB_OFFLINE set.

    Raises:
        CheckpointError: one line on what is missing and what to do.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        raise CheckpointError(
            f"{wanted} is no path here, and the Hugging Face hub is read with transformers: "
            "pip install 'attnprobe[transformers]'"
        ) from None
    asked = wanted.revision or revision or "main"
    if offline or constants.HF_HUB_OFFLINE:
        found = _cached(wanted, asked)
        if found is None:
            raise CheckpointError(
                f"{_named(wanted, asked)} is no path here and not in the cache of the Hugging "
                f"Face hub ({constants.HF_HUB_CACHE}), and the network is not used: download it "
                "without --offline and HF_HUB_OFFLINE, or set HF_HOME"
            )
        return found
    return _online(wanted, asked)


def _online(wanted: HubId, revision: str) -> Snapshot:
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        info = HfApi().model_info(wanted.repo, revision=revision, timeout=TIMEOUT)
        names = _needed([s.rfilename for s in info.siblings or ()], wanted)
        commit = str(info.sha)
        folder = snapshot_download(
            wanted.repo,
            revision=commit,
            allow_patterns=[glob.escape(name) for name in names],
            etag_timeout=TIMEOUT,
        )
        return Snapshot(Path(folder) / wanted.inside, commit)
    except CheckpointError:
        raise
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{wanted.repo} is gated: accept its terms at https://huggingface.co/{wanted.repo}, "
            "then hf auth login or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{wanted.repo} has no revision {revision!r}: see its page") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(
            f"{wanted} is neither a path here nor a model of the Hugging Face hub: check the name "
            f"({_LISTED}); a private one needs hf auth login or HF_TOKEN"
        ) from None
    except Exception as error:  # of whichever library carries the bytes
        return _unreachable(wanted, revision, error)


def _unreachable(wanted: HubId, revision: str, error: Exception) -> Snapshot:
    """What the cache has, where the hub gives no answer."""
    why = " ".join(str(error).split())[:200] or type(error).__name__
    found = _cached(wanted, revision)
    if found is None:
        raise CheckpointError(
            f"{_named(wanted, revision)} is no path here, and the Hugging Face hub cannot be "
            f"reached ({why}): check the network or HTTPS_PROXY, or name a folder"
        ) from None
    note = (
        f"the Hugging Face hub cannot be reached: {wanted} is measured as it lies in the cache, "
        f"commit {str(found.commit)[:12]}"
    )
    return Snapshot(found.path, found.commit, note)


def _cached(wanted: HubId, revision: str) -> Snapshot | None:
    """From the cache alone; whether the weights are all there shows when they are read."""
    from huggingface_hub import errors, try_to_load_from_cache

    inside = PurePosixPath(wanted.inside)
    names = [inside / CONFIG, inside / ADAPTER]
    if inside.suffix == ".gguf":
        names = [inside]
    try:
        for name in names:
            found = try_to_load_from_cache(wanted.repo, str(name), revision=revision)
            if isinstance(found, str):
                root = Path(found).parents[len(name.parts) - 1]
                return Snapshot(root / wanted.inside, root.name)
    except (errors.HFValidationError, ValueError):  # of another library's id
        return None
    return None


def _needed(names: Sequence[str], wanted: HubId) -> list[str]:
    """The files to download: one kind of weights, and the small files beside them."""
    if wanted.inside.endswith(".gguf"):
        if wanted.inside not in names:
            raise CheckpointError(f"{wanted.repo} has no file {wanted.inside}: see its page")
        return [wanted.inside]
    folder = PurePosixPath(wanted.inside)
    here = [PurePosixPath(n) for n in names if PurePosixPath(n).parent == folder]
    if not any(path.name in (CONFIG, ADAPTER) for path in here):
        where = f"no folder {wanted.inside} with" if wanted.inside else "no"
        quantised = sorted(p.name for p in here if p.suffix == ".gguf")
        hint = f"; name one of its files, {wanted}/{quantised[0]}" if quantised else ""
        raise CheckpointError(
            f"{wanted.repo} has {where} {CONFIG}, so is no transformers model{hint}"
        )
    kinds = ADAPTER_WEIGHTS if any(p.name == ADAPTER for p in here) else MODEL_WEIGHTS
    chosen = next((kind for kind in kinds if folder / kind in here), None)
    stem, suffix = ("", "") if chosen is None else _split(chosen)
    return [
        str(path)
        for path in here
        if any(path.match(pattern) for pattern in _BESIDE)
        or (suffix and path.name.startswith(stem) and path.suffix == suffix)
    ]


def _split(name: str) -> tuple[str, str]:
    """`model.safetensors.index.json` as ("model", ".safetensors")."""
    stem, suffix, *_ = name.split(".")
    return stem, f".{suffix}"


def _named(wanted: HubId, revision: str) -> str:
    return str(wanted) if revision == "main" or wanted.revision else f"{wanted}@{revision}"
