"""The processes that torchrun starts as one command: the first writes, one alone tells an error.

Needs no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.errors import InputError

if TYPE_CHECKING:
    from attnprobe.cli.options import Measuring

KNOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what torchrun tells every process
FOLDER = "TORCHELASTIC_ERROR_FILE"  # in a folder for each process, inside one of their run
GRACE = 10.0  # seconds in which torchrun ends those that are left

_has_spoken: bool | None = None  # None where this process is no part of others


def count() -> int:
    """How many processes torchrun started, 1 without it."""
    told = [os.environ.get(name, "") for name in KNOWN]
    return int(told[-1]) if all(word.isdigit() for word in told) else 1


@contextmanager
def as_one() -> Iterator[None]:
    """Lets the processes of torchrun speak with one voice meanwhile; nothing happens without it."""
    global _has_spoken
    _has_spoken = False if count() > 1 else None
    try:
        yield
    finally:
        _has_spoken = None


def is_silent() -> bool:
    """Whether another process shows and writes what this one measured, too."""
    return _has_spoken is not None and os.environ["RANK"] != "0"


def may_say(kind: str) -> bool:
    """Whether it is for this process to say something.

    Notes are for the first, as is an interrupt, which reaches all. An error is for the one that
    meets it first, for the others may get no further; they wait to be ended, and speak if they are
    not.
    """
    global _has_spoken
    if _has_spoken is None or kind != "error":
        return not is_silent()
    if not _has_spoken and not _is_first_to_speak():
        time.sleep(GRACE)
    _has_spoken = True
    return True


def _is_first_to_speak() -> bool:
    """Whether no other process of the run on this machine has spoken."""
    told = os.environ.get(FOLDER)
    if told is None:
        return True
    try:
        (Path(told).parent.parent / "attnprobe-error").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # whatever it is, an error must not go unsaid
        return True
    return True


def check(options: Measuring) -> None:
    """Whether the options suit as many processes as there are.

    Raises:
        InputError: they would all do the same, or stdin is for all of them.
    """
    several = count() > 1
    if several and not options.tensor_parallel:
        raise InputError(
            f"torchrun started {count()} processes, and each would measure the same: add "
            "--tensor-parallel to split the model over them, or start attnprobe without torchrun"
        )
    if several and "-" in (options.text_file or ()):
        raise InputError("--text-file -: several processes cannot share stdin, name a file")


def leave() -> None:
    """Ends the group of processes once all went well; torch would complain of it otherwise."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with suppress(RuntimeError, ValueError):
            distributed.destroy_process_group()
