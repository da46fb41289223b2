"""Whether a run fits into memory, said before it starts: bytes of weights and of a batch.

An estimate from below, so that nothing that would run is refused: it knows the weights, some copies
of a layer's hidden states and the logits where they are made all at once, not every scratch tensor
of every model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnprobe.errors import TooLargeError
from attnprobe.loading.folder import BYTES, elements
from attnprobe.logits import can_be_narrowed, unembedding

_FLOATS = ("F64", "F32", "F16", "BF16")
_COPIES = 16  # of hidden states in float32 that a layer and its statistics hold at a time


def available(device: torch.device) -> int | None:
    """Bytes that are free on a device, None where nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    if device.type != "cpu":
        return None
    return min(filter(None, (_of_machine(), _of_container())), default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:")), None)


def _of_container() -> int | None:
    """What a cgroup has left, its page cache counted as free."""
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cache = sum(
            int(x.split()[1]) for x in stat if x.split()[0] in ("inactive_file", "slab_reclaimable")
        )
    except (OSError, ValueError, IndexError):
        return None
    return None if most == "max" else max(1, int(most) - used + cache)


def bytes_of_weights(weights: Iterable[Path], dtype: torch.dtype | None) -> int:
    """Bytes that weights take once loaded, floating ones in `dtype`; None keeps their own."""
    files = tuple(weights)
    counts = elements(files)
    if counts is None:
        return sum(file.stat().st_size for file in files)
    return sum(
        number * (dtype.itemsize if dtype is not None and kind in _FLOATS else BYTES.get(kind, 1))
        for kind, number in counts.items()
    )


def check_weights(
    name: str, weights: Iterable[Path], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Refuses weights that do not fit on a device.

    Raises:
        TooLargeError: naming the flag that would make them fit.
    """
    files = tuple(weights)
    room, needed = available(device), bytes_of_weights(files, dtype)
    if room is None or needed <= room:
        return
    half = bytes_of_weights(files, torch.bfloat16)
    if half <= room and half < needed:
        advice = "use --dtype bfloat16"
    else:
        advice = "use --device-map auto, which spreads it over devices, memory and disk"
    raise TooLargeError(
        f"the weights of {name} take {_size(needed)}, {device} has {_size(room)} free: {advice}"
    )


def check_batch(name: str, model: nn.Module, batch: int, length: int, device: torch.device) -> None:
    """Refuses a batch of tokens that does not fit beside the weights.

    Args:
        name: of the model, for the message.
        model: of transformers.
        batch: samples a forward pass.
        length: tokens a sample.
        device: where it runs.

    Raises:
        TooLargeError: naming the flag that would make it fit.
    """
    room = available(device)
    one = length * _bytes_a_token(model)
    if room is None or batch * one <= room:
        return
    if batch > 1 and one <= room:
        advice = f"use --batch-size {max(1, room // one)}"
    else:
        advice = f"use --batch-size 1 --length {max(1, room // max(1, one // length))} or less"
    raise TooLargeError(
        f"a pass of {name} over {batch} × {length} tokens takes {_size(batch * one)} or more, "
        f"{device} has {_size(room)} free: {advice}"
    )


def _bytes_a_token(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, "hidden_size", None) or 0
    dtype = getattr(model, "dtype", torch.float32)
    all_at_once = unembedding(model) is not None and not can_be_narrowed(model)
    vocabulary = (getattr(text, "vocab_size", None) or 0) if all_at_once else 0
    return int(width) * 4 * _COPIES + int(vocabulary) * dtype.itemsize


def _size(count: int) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    power = min((len(str(count)) - 1) // 3, len(units) - 1)
    return f"{count / 1000**power:.{1 if power else 0}f} {units[power]}"
