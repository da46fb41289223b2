"""Whatever a library raises over a folder as one line, and nothing of what it prints meanwhile."""

from __future__ import annotations

import errno
import io
import pickle
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from types import ModuleType
from typing import Any

from safetensors import SafetensorError

from attnprobe.errors import AttnprobeError, CheckpointError, is_out_of_memory
from attnprobe.loading.folder import Folder

_DAMAGE = (pickle.UnpicklingError, struct.error, EOFError, SafetensorError)


@contextmanager
def explained(folder: Folder) -> Iterator[None]:
    """Turns whatever a library raises over a folder into one line that names it."""
    try:
        yield
    except AttnprobeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(_explanation(error, folder)) from error


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it followed."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_damage(error: BaseException) -> bool:
    """Whether bytes are not what they should be; EINVAL is a place before the start of a zip."""
    is_odd = isinstance(error, OSError) and error.errno == errno.EINVAL
    return is_odd or isinstance(error, _DAMAGE)


def _explanation(error: Exception, folder: Folder) -> str:
    where = folder.weights[0] if len(folder.weights) == 1 else folder.path
    damage = [e for e in _behind(error) if _is_damage(e)]
    if damage:
        named = re.search(r"GLOBAL (\S+)", str(damage[0]))
        if named is None:
            return f"{where} cannot be read as weights: it is damaged, copy it again"
        return (
            f"{where} holds Python objects ({named[1]}), which are never run here: "
            "save its weights as safetensors"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{folder.path} needs the package {error.name}: pip install {error.name}"
    if isinstance(error, ImportError):
        return f"{folder.path}: {line(error)}"
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return f"{folder.path} cannot be loaded by transformers: {kind}{line(error)}"


@contextmanager
def hushed(library: ModuleType) -> Iterator[None]:
    """Keeps what a library prints while it loads off stderr, and its settings as they were."""
    logging = library.utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def counting(folder: Folder) -> AbstractContextManager[Any]:
    """Keeps the bar off stderr that counts the tensors of a GGUF file, and knows no setting."""
    return redirect_stderr(io.StringIO()) if folder.is_gguf else nullcontext()


def line(error: object) -> str:
    words = " ".join(str(error).split())
    return f"{words[:300]}…" if len(words) > 300 else words or type(error).__name__
