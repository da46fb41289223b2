"""attnprobe: what the attention of a transformer is doing.

    import attnprobe
    result = attnprobe.scan(model, tokens)
    result.layers[["layer", "f_attr", "entropy", "erank"]]

Everything here is imported when it is first used, so that the command line starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnprobe._version import __version__
from attnprobe.errors import (
    AttnprobeError,
    CheckpointError,
    InputError,
    NothingMeasuredError,
)

if TYPE_CHECKING:
    from attnprobe.models.checkpoint import load_checkpoint
    from attnprobe.monitor import Monitor
    from attnprobe.result import Result, load_results, save_results
    from attnprobe.scanning import scan

_LAZY = {
    "scan": "attnprobe.scanning",
    "Monitor": "attnprobe.monitor",
    "Result": "attnprobe.result",
    "load_results": "attnprobe.result",
    "save_results": "attnprobe.result",
    "load_checkpoint": "attnprobe.models.checkpoint",
}

__all__ = [
    "AttnprobeError",
    "CheckpointError",
    "InputError",
    "Monitor",
    "NothingMeasuredError",
    "Result",
    "__version__",
    "load_checkpoint",
    "load_results",
    "save_results",
    "scan",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnprobe' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
