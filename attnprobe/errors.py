"""The errors a user is meant to read: one line each, and the exit code that goes with it."""

from __future__ import annotations


class AttnprobeError(Exception):
    """Something the user can act on. The message is one line and says what to do next."""

    exit_code = 2


class CheckpointError(AttnprobeError):
    """A checkpoint that cannot be read, or does not fit its config."""


class InputError(AttnprobeError):
    """Text, tokens or options that cannot be measured as asked."""


class TooLargeError(AttnprobeError):
    """What was asked for takes more memory than is free."""


class NothingMeasuredError(AttnprobeError):
    """The model ran, but no figure that was asked for could be taken."""

    exit_code = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU (where torch says so in words alone) or on a GPU."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or "can't allocate memory" in str(error)
