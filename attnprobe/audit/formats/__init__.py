"""A report in the formats that people, CI systems and other programs read; one file a format.

`render` gives text; `table.show` prints to a terminal.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from attnprobe.audit.report import Report
from attnprobe.errors import InputError
from attnprobe.files import replacing

#: Format to the suffixes of files that stand for it.
FORMATS: dict[str, tuple[str, ...]] = {
    "table": (".txt",),
    "json": (".json",),
    "jsonl": (".jsonl",),
    "md": (".md",),
    "github": (),
    "junit": (".xml",),
    "sarif": (".sarif",),
    "csv": (".csv",),
}


def render(report: Report, format: str) -> str:
    """A report as text that ends with a line break, unless it is empty.

    Raises:
        InputError: an unknown format.
    """
    if format not in FORMATS:
        raise InputError(f"no format {format!r}: choose from {', '.join(FORMATS)}")
    text: str = import_module(f"attnprobe.audit.formats.{format}").render(report)
    return text


def destination(given: str) -> tuple[str, Path]:
    """The format and the file of an `--output`: `report.xml`, or `md:summary`.

    Raises:
        InputError: neither a format before a colon nor a suffix says what to write.
    """
    named, colon, rest = given.partition(":")
    if colon and named in FORMATS and rest:
        return named, Path(rest).expanduser()
    path = Path(given).expanduser()
    name = path.name.lower()
    for format, suffixes in FORMATS.items():
        if name.endswith(tuple(suffixes)) and suffixes:
            return format, path
    known = ", ".join(s for suffixes in FORMATS.values() for s in suffixes)
    raise InputError(
        f"cannot tell the format of {given}: end it in one of {known}, or write it as in "
        f"md:{given} ({', '.join(FORMATS)})"
    )


def write(report: Report, format: str, path: Path) -> None:
    """Writes a report to a file, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(render(report, format).encode("utf-8", "backslashreplace"))
