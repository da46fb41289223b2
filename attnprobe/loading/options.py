"""How a checkpoint is to be loaded. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnprobe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What the verbs' options of the same names say.

    Attributes:
        model_config: the shape of a bare state dict: a mapping or a JSON file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        dtype: of the weights: `float32`, `bfloat16`, `float16`, or `auto` as in the file.
        revision: branch, tag or commit of a model of the hub.
        offline: whether the network is left alone even for one.
        trust_remote_code: whether a model's own Python code is run.
        device_map: how accelerate spreads it over devices, memory and disk: `auto`, `balanced`,
            `sequential`, or a mapping of modules to devices; None keeps it on `device`.
        tensor_parallel: whether the processes of torchrun each hold a part of every layer.
    """

    model_config: str | Path | Mapping[str, Any] | None = None
    device: str = "cpu"
    dtype: str = "auto"
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    device_map: str | Mapping[str, Any] | None = None
    tensor_parallel: bool = False


def check_local(path: str | Path, revision: str | None) -> None:
    """Whether what lies on this machine can be had as asked.

    Raises:
        CheckpointError: a revision, which only models of the hub have.
    """
    if revision is not None and os.path.exists(path):
        raise CheckpointError(
            f"--revision {revision} is for models of the hub, and a path on this machine has none: "
            f"leave it out, or name a model of the hub as org/name@{revision}"
        )
