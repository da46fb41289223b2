"""Everything that goes to stderr in words, and the exit code that an error stands for."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer

from attnprobe.cli import processes
from attnprobe.errors import AttnprobeError, is_out_of_memory

INTERRUPTED, FAILED, NOTHING_MEASURED = 130, 2, 3
_GRAVEST_FIRST = (INTERRUPTED, FAILED, 1, NOTHING_MEASURED)


def gravest(*codes: int) -> int:
    """The exit code that wins over the others."""
    return next((code for code in _GRAVEST_FIRST if code in codes), 0)


def say(kind: str, message: str) -> None:
    """One line on stderr: `attnprobe: error: …`; of several processes one says it."""
    if not processes.may_say(kind):
        return
    line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    with suppress(OSError, ValueError):  # nobody may be listening any more
        print(f"attnprobe: {kind}: {line}", file=sys.stderr, flush=True)


def fault(error: BaseException) -> str:
    """An error as one line; one that no code of ours foresaw says where to look."""
    if isinstance(error, AttnprobeError):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory: try a smaller --batch-size, a shorter --length or --device cpu"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the output'}: no space is left on the device"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text} (--verbose shows the traceback)"


def show_traceback(error: BaseException) -> None:
    """The traceback on stderr, for --verbose."""
    if not processes.may_say("error"):
        return
    with suppress(OSError, ValueError):
        traceback.print_exception(error, file=sys.stderr)


@contextmanager
def reporting(*, verbose: bool) -> Iterator[None]:
    """Turns every error within into one line and an exit code.

    Warnings and log lines of libraries, which speak to programmers, are there under --verbose only.
    """

    def warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        say("warning", str(message))

    with warnings.catch_warnings(), _logs(verbose=verbose):
        warnings.simplefilter("default" if verbose else "ignore")
        warnings.showwarning = warn
        try:
            yield
        except KeyboardInterrupt:
            say("interrupted", "stopped before it was done")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(0) from None
        except Exception as error:
            if isinstance(error, typer.Exit):
                raise
            if verbose:
                show_traceback(error)
            say("error", fault(error))
            raise typer.Exit(getattr(error, "exit_code", FAILED)) from None


@contextmanager
def _logs(*, verbose: bool) -> Iterator[None]:
    """Whether libraries may log warnings, such as a kernel that is not installed."""
    before = logging.root.manager.disable
    if not verbose:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def silence_stdout() -> None:
    """Lets stdout lead nowhere once its reader went away, so that no later flush fails."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
