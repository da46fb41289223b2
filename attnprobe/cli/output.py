"""Where results go: stdout, files and plots, all found to be writable before anything is run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.cli.options import Measuring
from attnprobe.cli.reporting import silence_stdout
from attnprobe.cli.trimming import trimmed
from attnprobe.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from attnprobe.result import Result

SUFFIXES = (".json", ".jsonl", ".csv", ".md", ".tex", ".latex", ".parquet")
FIRST_PLOT_FORMAT = "png"
PIPE_WIDTH = 80


@dataclass(frozen=True)
class Outputs:
    """What is written where."""

    format: str
    files: tuple[Path, ...]
    table: str
    plots: Path | None
    plot_format: str

    @classmethod
    def of(cls, options: Measuring, default_table: str) -> Outputs:
        """Checks the output options.

        Raises:
            InputError: a file cannot be written, or has a suffix that stands for no format.
        """
        files = tuple(path.expanduser() for path in options.output or ())
        for path in files:
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(
                    f"cannot tell the format of {path} from its suffix: "
                    f"use one of {', '.join(SUFFIXES)}"
                )
            check_writable(path)
            if path.suffix.lower() == ".parquet":
                _check_parquet()
        plots = plots_folder(options.plots, options.plot_format)
        holds_table = options.format not in ("table", "json") or any(
            path.suffix.lower() != ".json" for path in files
        )
        if options.table is not None and not holds_table:
            raise InputError(
                "--table chooses what a csv, md, latex or parquet holds: "
                "add --format csv, or an --output with such a suffix"
            )
        return cls(
            options.format, files, options.table or default_table, plots, options.plot_format
        )

    def write(self, results: Sequence[Result], view: str, layer: int | None = None) -> None:
        """Files and plots first, so that they are there even when nobody reads stdout."""
        from attnprobe.render import export, table

        for path in self.files:
            export.export(results, path, self.table)
        if self.plots is not None:
            from attnprobe.render import plots

            plots.plot(results, self.plots, view, self.plot_format)
        if self.format == "table":
            show(lambda console: table.show(results, view, console, layer=layer))
        else:
            write_stdout(export.render(results, self.format, self.table))


def plots_folder(given: str | Path | None, format: str) -> Path | None:
    """Where plots go, found to be possible; None where none are asked for.

    Raises:
        InputError: it is no folder, cannot be made, or is missing though a format is given.
    """
    if given is None:
        if format != FIRST_PLOT_FORMAT:
            raise InputError("--plot-format is of plots: add --plots DIR")
        return None
    folder = Path(given).expanduser()
    _check_folder(folder)
    return folder


def show(draw: Any) -> None:
    """Calls `draw(console)` with a console on stdout; a reader that goes away ends it quietly."""
    try:
        with trimmed():
            draw(stdout_console())
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except SystemExit as stop:  # what rich makes of a broken pipe
        if not isinstance(stop.__context__, OSError):
            raise
        silence_stdout()


def write_stdout(text: str) -> None:
    """Text for other programs: UTF-8 whatever the terminal speaks."""
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8")
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def stdout_console() -> Console:
    """As wide as the terminal or COLUMNS says, 80 columns in a pipe or a file."""
    from rich.console import Console

    is_set = os.environ.get("COLUMNS", "").isdigit()
    width = None if is_set or sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False)


def check_writable(path: Path) -> None:
    """Makes sure that a file can be put there, by making one beside it and taking it away.

    Raises:
        InputError: it cannot, or something is there that is no file to be replaced.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise InputError(f"cannot write {path}: it is {what}")
    _probe(path.parent, path)


def _check_folder(folder: Path) -> None:
    """Makes sure that a folder is there or can be made, without making it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write plots to {folder}: it is no folder")
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    _probe(there, folder)


def _probe(folder: Path, wanted: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"cannot write {wanted}: there is no folder {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write {wanted}: {error.strerror or error}") from None


def _check_parquet() -> None:
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise InputError(".parquet needs pyarrow: pip install 'attnprobe[parquet]'")
