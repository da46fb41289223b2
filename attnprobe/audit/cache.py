"""Results on disk under the hash of all that they depend on. A damaged entry is no entry.

An entry is two lines of JSON: its key with the checksum of the second line, and the result, a list
a column, which reads back several times faster than a result file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache as memoized
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe._version import __version__
from attnprobe.errors import InputError
from attnprobe.files import replacing

if TYPE_CHECKING:
    from attnprobe.result import Result

FORMAT = 1
PACKAGE = Path(__file__).parents[1]
#: What the figures depend on: a change to any of these files makes all entries old.
MEASURING = (
    *("adapters", "capture", "engine", "inputs", "loading", "metrics", "models", "tasks", "data"),
)
_ABOUT = ("checkpoint", "architecture", "input", "run")
_DAY = 86400.0


@dataclass(frozen=True)
class Failure:
    """What will go wrong again with the same checkpoint, input and options."""

    message: str
    path: str

    def about(self, path: str) -> str:
        """The message, for another file of the same content."""
        return self.message.replace(self.path, path) if self.path else self.message


@dataclass(frozen=True)
class Cache:
    """A folder of entries; it may be deleted at any time.

    Attributes:
        folder: made when something is first kept.
    """

    folder: Path

    def get(self, key: str) -> Result | Failure | None:
        """What was kept under a key; None if nothing, or nothing that can be trusted."""
        try:
            head, _, body = self._path(key).read_bytes().partition(b"\n")
            about = json.loads(head)
            if about["key"] != key or about["sha256"] != hashlib.sha256(body).hexdigest():
                return None
            return decode(json.loads(body))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def put(self, key: str, entry: Mapping[str, Any]) -> bool:
        """Keeps what `encode` or `encode_failure` gave, whole or not at all; False if it cannot."""
        body = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode(errors="replace")
        head = json.dumps({"key": key, "sha256": hashlib.sha256(body).hexdigest()}).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(key)) as temporary:
                temporary.write_bytes(head + b"\n" + body)
        except (OSError, InputError):
            return False
        return True

    def sweep(self) -> None:
        """Removes what writers that were killed left behind."""
        with suppress(OSError):
            for left in self.folder.glob(".*.json"):
                if time.time() - left.stat().st_mtime > _DAY:
                    left.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$ATTNPROBE_CACHE`, else `attnprobe` in the user's folder for caches."""
    if environ.get("ATTNPROBE_CACHE"):
        return Path(environ["ATTNPROBE_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "attnprobe"
    if sys.platform == "win32" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "attnprobe" / "cache"
    return Path.home() / ".cache" / "attnprobe"


def key(sha256: str, options: Mapping[str, Any]) -> str:
    """The key of a checkpoint's result.

    Args:
        sha256: of the checkpoint's bytes.
        options: all else that figures depend on, the hashes of input files among it.
    """
    everything = {"format": FORMAT, "checkpoint": sha256, "options": options, **_versions()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@memoized
def _versions() -> dict[str, str | None]:
    """Of this package, its measuring code and what runs models, none of which is imported."""
    sha = hashlib.sha256()
    files = [f for part in MEASURING for f in (PACKAGE / part).rglob("*") if f.is_file()]
    files = [f for f in files if f.suffix != ".pyc"]
    for path in sorted([*files, *PACKAGE.glob("*.py")]):
        sha.update(path.name.encode() + path.read_bytes())
    return {
        "attnprobe": __version__,
        "code": sha.hexdigest(),
        **{name: _version(name) for name in ("torch", "transformers", "peft")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def encode(result: Result) -> dict[str, Any]:
    """A result as strict JSON values, a list a column of each table."""
    import pandas as pd

    from attnprobe.result import TABLES

    def plain(column: pd.Series) -> list[Any]:
        return [None if v is pd.NA or v != v else v for v in column.tolist()]

    tables = {
        name: {str(c): plain(column) for c, column in getattr(result, name).items()}
        for name in TABLES
    }
    return {"tables": tables, **{name: getattr(result, name) for name in _ABOUT}}


def encode_failure(message: str, path: str) -> dict[str, Any]:
    """A failure as JSON values, and the path that the message speaks of."""
    return {"failure": message, "path": path}


def decode(entry: Mapping[str, Any]) -> Result | Failure:
    """The reverse of both.

    Raises:
        KeyError, TypeError, ValueError: it is the reverse of neither.
    """
    if "failure" in entry:
        return Failure(str(entry["failure"]), str(entry["path"]))
    import pandas as pd

    from attnprobe.result import TABLES, Result

    frames: dict[str, Any] = {}
    for name, columns in TABLES.items():
        dtypes, lists = _dtypes(name), entry["tables"][name]
        frames[name] = pd.DataFrame({c: _column(lists[c], dtypes[c]) for c in columns})
    return Result(**frames, **{name: entry[name] for name in _ABOUT})


def _column(values: list[Any], dtype: Any) -> Any:
    """A column of numbers with its dtype; of texts, pandas knows best what to make."""
    import pandas as pd

    if str(dtype) == "object" and values:
        return values
    return pd.array(values, dtype=dtype, copy=False)


@memoized
def _dtypes(table: str) -> dict[Any, Any]:
    """Those of a table's columns."""
    from attnprobe.result import frame

    return dict(frame(table, ()).dtypes)
