"""What a PEFT adapter stands on. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from attnprobe.errors import CheckpointError
from attnprobe.loading import hub
from attnprobe.loading.folder import Folder
from attnprobe.loading.places import foreign, hub_id

BASE = "base_model_name_or_path"


def find_base(folder: Folder, *, offline: bool = False) -> hub.Snapshot:
    """The base model of an adapter: a folder as named or beside the adapter, or from the hub.

    Raises:
        CheckpointError: there is none.
    """
    named = folder.config.get(BASE)
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{folder.path} is a PEFT adapter without {BASE}: write it there")
    for path in (Path(named).expanduser(), folder.path / named):
        if os.path.exists(path):
            place = foreign(path)
            if place is None:
                raise CheckpointError(
                    f"{path}, the base of {folder.path}, is no transformers model"
                )
            return hub.Snapshot(place)
    wanted = hub_id(named, bare=True)
    if wanted is None:
        raise CheckpointError(
            f"{folder.path} is a PEFT adapter over {named}, which does not exist here: "
            f"set {BASE} in its adapter_config.json"
        )
    revision = folder.config.get("revision")
    return hub.fetch(
        wanted, revision=revision if isinstance(revision, str) else None, offline=offline
    )
