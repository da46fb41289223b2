"""Models of transformers split over the processes of torchrun, each with some heads of a layer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from attnprobe.errors import CheckpointError, InputError
from attnprobe.loading.folder import Folder
from attnprobe.loading.options import LoadOptions

OPTION = "--tensor-parallel"
_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # maps that make keys, fused or not


def splitting(
    folder: Folder, how: LoadOptions, config: Any, device: torch.device
) -> dict[str, Any]:
    """The arguments of `from_pretrained` that split a model over all processes.

    Args:
        folder: where the weights are.
        how: the options.
        config: of transformers.
        device: that was asked for; each process gets its own of that kind.

    Raises:
        InputError: torchrun did not start this process, or the device is not what it splits over.
        CheckpointError: the library cannot split this model, or not over as many processes.
    """
    processes = _processes()
    if how.device_map is not None:
        raise InputError(f"{OPTION} and --device-map are two ways to spread a model: choose one")
    if device.type != _kind():
        raise InputError(f"{OPTION} splits a model over {_kind()}s here: leave --device out")
    if folder.is_gguf or folder.is_bare:
        refuse(folder.path, "no folder of transformers")
    configs = list(_configs(config))
    if not any(getattr(part, "base_model_tp_plan", None) for part in configs):
        raise CheckpointError(
            f"{folder.path}: transformers has no plan to split a {config.model_type} over "
            "processes: measure it in one"
        )
    for part in configs:
        _check_heads(folder, part, processes)
    return {"distributed_config": _plan(), "device_map": None}


def refuse(path: object, what: str) -> NoReturn:
    """What is no model that the library splits."""
    raise CheckpointError(f"{OPTION} splits none such: {path} is {what}, measure it in one process")


def _processes() -> int:
    """How many processes there are.

    Raises:
        InputError: nobody says.
    """
    told = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if None in told:
        raise InputError(
            f"{OPTION} splits a model over the processes of torchrun: "
            f"torchrun --nproc-per-node 2 -m attnprobe scan MODEL {OPTION}"
        )
    return int(told[-1] or 1)


def _kind() -> str:
    """The kind of device that transformers splits models over."""
    accelerator = torch._C._get_accelerator().type
    return "cpu" if accelerator == "mps" else accelerator


def _plan() -> Any:
    try:
        from transformers.distributed import DistributedConfig

        return DistributedConfig(tp_plan="auto")
    except (ImportError, TypeError):  # once it was about experts alone
        raise CheckpointError(
            f"{OPTION} needs a newer transformers: pip install -U transformers"
        ) from None


def _configs(config: Any) -> Iterator[Any]:
    """A config and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)


def _check_heads(folder: Folder, config: Any, processes: int) -> None:
    """Refuses heads of which no process would have a whole number; the library would stumble."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    split = [name for name, style in plan.items() if style == "colwise" and "attn" in name]
    counts = {"heads": getattr(config, "num_attention_heads", None)}
    if any(name.endswith(_KEYS) for name in split):
        counts["key heads"] = getattr(config, "num_key_value_heads", None)
    known = {what: n for what, n in counts.items() if isinstance(n, int)}
    most = math.gcd(*known.values())
    if not split or most % processes == 0:
        return
    told = " and ".join(f"{n} {what}" for what, n in known.items())
    advice = "measure it in one" if most == 1 else f"start as many as divide {most}"
    raise CheckpointError(
        f"{folder.path} has {told} in a layer, which {processes} processes cannot share: {advice}"
    )
