"""What a scan found: tidy frames and what they were measured on. Saved and loaded as JSON.

A figure that could not be measured is missing (NaN in a frame, null in JSON) and has its reason
in `not_measured`; it is never 0 or -1.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from attnprobe._version import __version__
from attnprobe.errors import InputError
from attnprobe.files import write_text

SCHEMA = 1
KEY = ("site", "stack", "kind", "layer", "head")
SINK = (
    "f_attr",
    "f_attr_uniform",
    "alpha_first",
    "sink_rate",
    "first4",
    "null_mass",
    "value_drain",
)
ENTROPY = (
    "entropy",
    "entropy_norm",
    "entropy_p05",
    "entropy_p50",
    "entropy_p95",
    "entropy_nosink",
    "max_logit",
    "collapsed",
)
RANK = (
    "erank",
    "erank_centered",
    "stable_rank",
    "participation",
    "num_rank",
    "mean_share",
    "rank_bound",
    "utilisation",
)
GATE = ("gate_mean", "gate_std", "gate_median")
MAIN = ("f_attr", "sink_rate", "entropy", "erank", "gate_mean", "m_act", "ppl")  # at a glance
SHARES = ("below_0.1", "from_0.1_to_0.3", "from_0.4_to_0.6", "from_0.7_to_0.9", "above_0.9")
SKIPS = ("skippable_1e-3", "skippable_1e-2", "skippable_1e-1")
SKIP_ERRORS = ("skip_error_1e-3", "skip_error_1e-2", "skip_error_1e-1")

#: Every table and its columns, in order. docs/json-schema.md tells what each column means.
TABLES: dict[str, tuple[str, ...]] = {
    "model": ("kind", *SINK, *ENTROPY, *RANK, "erank_head", *GATE, "m_act", "ppl", "nll"),
    "layers": (*KEY, "first_token", *SINK, *ENTROPY, *RANK, "erank_head", *GATE, "m_act"),
    "heads": (*KEY, *SINK, *ENTROPY, *RANK, *GATE),
    "samples": (
        *KEY,
        "sample",
        "queries",
        *(c for c in SINK if c != "sink_rate"),
        "entropy",
        "entropy_norm",
        "entropy_nosink",
        "gate_mean",
        "nll",
    ),
    "sinks": (
        *KEY[:-1],
        "position",
        "token",
        "token_id",
        "alpha",
        "alpha_max",
        "heads",
        "documents",
        "documents_total",
    ),
    "positions": (*KEY, "position_lo", "position_hi", "alpha", "keys"),
    "gates": (
        *KEY,
        "position",
        "granularity",
        "activation",
        "source",
        "mode",
        "mean",
        "std",
        "median",
        *SHARES,
        "gate_first",
        "gate_rest",
        *SKIPS,
        *SKIP_ERRORS,
        "histogram",
        "edges",
    ),
    "spectra": (*KEY, "index", "sigma"),
    "massive": (
        *KEY[:-1],
        "document",
        "position",
        "token",
        "token_id",
        "dimension",
        "value",
        "ratio",
    ),
    "not_measured": (*KEY, "metric", "reason"),
}
INTEGERS = (
    *("layer", "head", "sample", "queries", "document", "position_lo", "position_hi", "keys"),
    *("token_id", "heads", "documents", "documents_total", "index", "dimension"),
)
RANK_INTEGERS = ("num_rank", "rank_bound")
TEXT = (
    *("site", "stack", "kind", "first_token", "token", "metric", "reason"),
    *("granularity", "activation", "source", "mode", "histogram", "edges"),
)
# In JSON these columns are one list a row instead of a row an element.
PACKED = {
    "spectra": ("index", "sigma"),
    "positions": ("position_lo", "position_hi", "alpha", "keys"),
}


@dataclass(eq=False)
class Result:
    """Frames of one checkpoint on one input, and what they were measured on.

    `model` has a row a kind of attention (self, cross), `layers` one an attention layer, `heads`
    one a head. Columns are those of docs/definitions.md; `TABLES` lists them.
    """

    model: pd.DataFrame
    layers: pd.DataFrame
    heads: pd.DataFrame
    samples: pd.DataFrame
    sinks: pd.DataFrame
    positions: pd.DataFrame
    gates: pd.DataFrame
    spectra: pd.DataFrame
    massive: pd.DataFrame
    not_measured: pd.DataFrame
    checkpoint: dict[str, Any] = field(default_factory=dict)
    architecture: dict[str, Any] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Mapping[str, Sequence[Mapping[str, Any]]], **about: Any) -> Result:
        """From rows by table; a column that no row has is missing throughout."""
        frames: dict[str, Any] = {name: frame(name, rows.get(name, ())) for name in TABLES}
        return cls(**frames, **about)

    def __repr__(self) -> str:
        """One line: the checkpoint, its shape, and the main figures that are there."""
        known = [c for c in MAIN if c in self.model and self.model[c].notna().any()]
        figures = [f"{c} {self.model[c].dropna().iloc[0]:.4g}" for c in known]
        return (
            f"<Result {self.name}: {len(self.layers)} layers, {len(self.heads)} heads in all, "
            f"{self.input.get('tokens', '?')} tokens; {', '.join(figures) or 'no figure'}>"
        )

    @property
    def name(self) -> str:
        """What to call the checkpoint in a table."""
        return str(self.checkpoint.get("name", "model"))

    @property
    def measured(self) -> bool:
        """Whether there is any figure at all."""
        figures = [c for c in self.model if c != "kind"]
        tables = (self.heads, self.layers)
        names = (*KEY, *TEXT)
        by_site = any(
            table.drop(columns=[c for c in table if c in names]).notna().to_numpy().any()
            for table in tables
        )
        return by_site or bool(self.model[figures].notna().to_numpy().any())

    def figure(self, column: str, kind: str | None = None) -> float | None:
        """A figure of the model, of self-attention where there are several kinds; None if null."""
        rows = self.model
        if rows.empty or column not in rows:
            return None
        if kind is not None:
            rows = rows[rows["kind"] == kind]
        value = rows[column].iloc[0] if len(rows) else None
        return None if value is None or pd.isna(value) else float(value)

    def to_dict(self) -> dict[str, Any]:
        """The entry of `results` in the JSON file."""
        return {
            "checkpoint": self.checkpoint,
            "architecture": self.architecture,
            "input": self.input,
            "run": self.run,
            "model": _model_to_json(self.model),
            **{
                name: _records(_packed(name, getattr(self, name)))
                for name in TABLES
                if name != "model"
            },
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Result:
        """The reverse of `to_dict`; `ValueError` where a table is missing."""
        if absent := [name for name in TABLES if name not in entry]:
            raise ValueError(f"it lacks {', '.join(absent)}")  # which is not the same as empty
        rows = {name: _unpacked(name, entry.get(name, [])) for name in TABLES if name != "model"}
        rows["model"] = _model_from_json(entry.get("model", {}))
        about = {k: dict(entry.get(k, {})) for k in ("checkpoint", "architecture", "input", "run")}
        return cls.from_rows(rows, **about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one result as JSON, whole or not at all."""
        save_results([self], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Reads a file that holds one result.

        Raises:
            InputError: the file cannot be read, or holds another number of results.
        """
        results = load_results(path)
        if len(results) != 1:
            raise InputError(f"{path} holds {len(results)} results: use attnprobe.load_results")
        return results[0]


_NO_NUMBERS = {("heads", "collapsed"), ("gates", "position")}


def _check_numbers(table: str, values: pd.Series) -> None:
    """`ValueError` where a figure is a string or a truth value, which pandas takes for numbers."""
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
        return
    for value in values.tolist():
        if isinstance(value, (str, bool)):
            raise ValueError(f"{table}.{values.name} is {value!r}, which is no number")


def frame(name: str, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a frame with just the columns of a table, numbers as numbers."""
    table = pd.DataFrame(list(rows), columns=list(TABLES[name]))
    for column in TABLES[name]:
        if column not in TEXT and (name, column) not in _NO_NUMBERS:
            _check_numbers(name, table[column])
        if _is_integer(name, column):
            table[column] = pd.to_numeric(table[column]).astype("Int64")
        elif (name, column) == ("heads", "collapsed"):
            table[column] = table[column].astype("boolean")
        elif column not in TEXT and (name, column) != ("gates", "position"):
            table[column] = pd.to_numeric(table[column]).astype("float64")
    return table


def _is_integer(table: str, column: str) -> bool:
    if column == "position":  # of a token; a gate's is G1 to G5
        return table != "gates"
    return column in INTEGERS or (column in RANK_INTEGERS and table != "model")


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """The whole file of docs/json-schema.md."""
    return {
        "schema": SCHEMA,
        "tool": {"name": "attnprobe", "version": __version__, "python": sys.version.split()[0]},
        "results": [result.to_dict() for result in results],
    }


def dumps(results: Sequence[Result]) -> str:
    """Strict JSON: no NaN, no infinity; lone surrogates, as in a path that is no UTF-8, escaped."""
    text = json.dumps(_plain(to_json(results)), ensure_ascii=False, allow_nan=False, indent=1)
    return text.encode("utf-8", "backslashreplace").decode()


def save_results(results: Sequence[Result], path: str | os.PathLike[str]) -> None:
    """Writes results as JSON, whole or not at all."""
    write_text(Path(path), dumps(results) + "\n")


def load_results(path: str | os.PathLike[str]) -> list[Result]:
    """Reads what `save_results` or `--output FILE.json` wrote.

    Raises:
        InputError: the file cannot be read, is no such file, or is of a newer schema.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a result file: it is not JSON ({error})") from error
    if not isinstance(data, dict) or "results" not in data or "schema" not in data:
        raise InputError(f"{path} is not a result file: it has no 'schema' and 'results'")
    if data["schema"] != SCHEMA:
        raise InputError(
            f"{path} has schema {data['schema']}, this attnprobe reads {SCHEMA}: update attnprobe"
        )
    try:
        return [Result.from_dict(entry) for entry in data["results"]]
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} is a damaged result file: {error}") from error


def _plain(value: Any) -> Any:
    """Numbers, strings, lists and dicts only; what is not a finite number becomes None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or value is pd.NA or isinstance(value, (str, bool)):
        return None if value is pd.NA else value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    names = [str(c) for c in table.columns]
    columns = [table[name].tolist() for name in names]
    return [_plain(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _model_to_json(model: pd.DataFrame) -> dict[str, Any]:
    """Figures by name, or by kind and name where there are several kinds of attention."""
    rows = _records(model)
    if len(rows) == 1:
        return rows[0]
    return {row["kind"]: row for row in rows}


def _model_from_json(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not model:
        return []
    return list(model.values()) if "kind" not in model else [model]


def _packed(name: str, table: pd.DataFrame) -> pd.DataFrame:
    if name not in PACKED:
        return table
    columns = list(PACKED[name])
    groups = table.groupby(list(KEY), dropna=False, sort=False)[columns]
    rows = [
        {**dict(zip(KEY, key, strict=True)), **{c: group[c].tolist() for c in columns}}
        for key, group in groups
    ]
    return pd.DataFrame(rows, columns=[*KEY, *columns])


def _unpacked(name: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if name not in PACKED:
        return rows
    columns = PACKED[name]
    return [
        {**{k: row[k] for k in KEY}, **dict(zip(columns, values, strict=True))}
        for row in rows
        for values in zip(*(row[c] for c in columns), strict=True)
    ]
