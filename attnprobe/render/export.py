"""Tables as files for other programs and for papers: JSON, CSV, Markdown, LaTeX, Parquet.

JSON is whole results, as `attnprobe.load_results` reads them; the others hold one table. JSON, CSV
and Parquet keep every digit. Markdown and LaTeX are for reading: four significant digits, without
empty columns, without lists, and without the module path where layer and kind say enough.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from attnprobe.errors import InputError
from attnprobe.files import replacing
from attnprobe.render.names import labels, printable, token_text
from attnprobe.render.numbers import MISSING, significant
from attnprobe.result import TABLES, TEXT, Result, dumps

LISTS = ("histogram", "edges")
DIGITS = 4
MARKDOWN_ESCAPES = str.maketrans({c: f"\\{c}" for c in r"\`*_[]|~"} | {"<": "&lt;", ">": "&gt;"})
_MINUS = re.compile(r"^-(?=\d)")  # outside of math it would be set as a hyphen
_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "␣": r"\textvisiblespace{}",
    }
)


def combined(results: Sequence[Result], table: str) -> pd.DataFrame:
    """One table of all results, the column `checkpoint` first.

    Raises:
        InputError: there is no such table.
    """
    if table not in TABLES:
        raise InputError(f"no table {table!r}: choose from {', '.join(TABLES)}")
    frames = []
    for name, result in zip(labels(results), results, strict=True):
        frame = getattr(result, table).reset_index(drop=True)
        frame.insert(0, "checkpoint", name)
        frames.append(frame.astype({c: "string" for c in frame if _is_text(table, c)}))
    if not frames:
        return pd.DataFrame(columns=["checkpoint", *TABLES[table]])
    filled = [frame for frame in frames if not frame.empty]
    return pd.concat(filled or frames[:1], ignore_index=True)


def _is_text(table: str, column: str) -> bool:
    return (
        (column in TEXT and column not in LISTS)
        or column == "checkpoint"
        or ((table, column) == ("gates", "position"))
    )


def export(results: Sequence[Result], path: str | os.PathLike[str], table: str = "layers") -> None:
    """Writes results to a file whose suffix chooses the format, whole or not at all.

    Args:
        results: one a checkpoint.
        path: ends in .json (whole results, whatever `table` is), .jsonl, .csv, .md, .tex, .latex
            or .parquet.
        table: one of `attnprobe.result.TABLES`.

    Raises:
        InputError: an unknown suffix or table, a path that cannot be written, or a missing package.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        _parquet(combined(results, table), path)
    elif suffix in SUFFIXES:
        text = render(results, SUFFIXES[suffix], table)
        with replacing(path) as temporary:
            temporary.write_bytes(text.encode())
    else:
        raise InputError(
            f"cannot tell the format of {path}: end it in {', '.join((*SUFFIXES, '.parquet'))}"
        )


def render(results: Sequence[Result], format: str, table: str = "layers") -> str:
    """Results as text, for standard output.

    Args:
        results: one a checkpoint.
        format: "json" (whole results), "jsonl", "csv", "md" or "latex".
        table: one of `attnprobe.result.TABLES`.

    Raises:
        InputError: an unknown format or table.
    """
    if format not in FORMATS:
        raise InputError(f"no format {format!r}: choose from {', '.join(FORMATS)}")
    if format == "json":
        if table not in TABLES:
            combined(results, table)  # the same error as everywhere
        text = dumps(results) + "\n"
    else:
        text = _WRITERS[format](combined(results, table))
    # half a surrogate pair, which a byte tokenizer can give, has no UTF-8; in JSON this escapes it
    return text.encode("utf-8", "backslashreplace").decode()


def as_csv(frame: pd.DataFrame) -> str:
    for column in (c for c in LISTS if c in frame):
        frame = frame.assign(**{column: frame[column].map(_list_text)})
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _list_text(value: object) -> str | None:
    return json.dumps(value) if isinstance(value, list) else None


def _jsonl(frame: pd.DataFrame) -> str:
    """One object a row, all digits, null where a figure is missing."""
    plain = frame.astype(object).where(frame.notna(), None)
    rows = plain.to_dict("records")
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def as_markdown(frame: pd.DataFrame) -> str:
    frame = _readable(frame)
    align = ["---:" if _is_number(frame[c]) else "---" for c in frame]
    lines = [
        list(map(str, frame)),
        align,
        *_cells(frame, lambda text: text.translate(MARKDOWN_ESCAPES)),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_latex(frame: pd.DataFrame) -> str:
    frame = _readable(frame)
    head = [str(c).translate(_LATEX) for c in frame]
    body = _cells(frame, lambda text: text.translate(_LATEX), missing="--")
    numbers = [_is_number(frame[c]) for c in frame]
    align = "".join("r" if n else "l" for n in numbers)
    body = [
        [_MINUS.sub("$-$", cell) if n else cell for cell, n in zip(line, numbers, strict=True)]
        for line in body
    ]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            rf"\begin{{tabular}}{{{align}}}",
            r"\toprule",
            " & ".join(head) + r" \\",
            r"\midrule",
            *(" & ".join(line) + r" \\" for line in body),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _parquet(frame: pd.DataFrame, path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise InputError("writing .parquet needs pyarrow: pip install 'attnprobe[parquet]'")
    with replacing(path) as temporary:
        frame.to_parquet(temporary, engine="pyarrow", index=False)


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    """Without lists, without what is empty throughout, and without a key that says nothing."""
    empty = [c for c in frame if frame[c].isna().all()]
    same = [c for c in ("stack", "kind") if c in frame and frame[c].nunique(dropna=False) == 1]
    told = frame["layer"].notna().all() if "layer" in frame else False
    path = ["site"] if told and "site" in frame else []
    return frame.drop(columns=list({*empty, *same, *path, *(c for c in LISTS if c in frame)}))


def _cells(
    frame: pd.DataFrame, escape: Callable[[str], str], missing: str = MISSING
) -> list[list[str]]:
    columns = [[_cell(c, v, escape, missing) for v in frame[c].tolist()] for c in map(str, frame)]
    return [list(row) for row in zip(*columns, strict=True)]


def _cell(column: str, value: object, escape: Callable[[str], str], missing: str) -> str:
    if value is None or pd.isna(value):  # type: ignore[call-overload]
        return missing
    if column == "token":
        return escape(token_text(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return significant(value, DIGITS)
    return escape(printable(int(value) if isinstance(value, float) else value))


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


_WRITERS: Mapping[str, Callable[[pd.DataFrame], str]] = {
    "jsonl": _jsonl,
    "csv": as_csv,
    "md": as_markdown,
    "latex": as_latex,
}
#: What `render` can give.
FORMATS = ("json", *_WRITERS)
#: Which of them a file's suffix chooses; .parquet is written to files only.
SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".md": "md",
    ".tex": "latex",
    ".latex": "latex",
}
