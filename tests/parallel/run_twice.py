"""A command line twice in a process of torchrun; the second process fails at last, half-way."""

from __future__ import annotations

import os
import sys
from typing import Any

from attnprobe import scanning
from attnprobe.cli import main, processes


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("nothing works")


if __name__ == "__main__":
    processes.leave = lambda: None  # a group that was ended cannot begin again in the same run
    assert main(sys.argv[1:]) == 0
    if os.environ["RANK"] == "1":
        scanning.measure = fail  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
