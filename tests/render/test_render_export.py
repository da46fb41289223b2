"""Files for other programs and for papers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.errors import InputError
from attnprobe.render import export as module
from attnprobe.render.export import combined, export, render
from attnprobe.result import TABLES, Result, frame, load_results

Make = Callable[..., Result]
NASTY = ["<s>", "a|b", "$x_1$", "50%&#", "\n", "\\", "^~{}", '"', "*b*", "中", "null", None]


@pytest.fixture(scope="module")
def nasty() -> Result:
    """A result whose tokens and name mean something in every format."""
    place = {"site": "l", "stack": "decoder", "kind": "self", "layer": 0, "alpha_max": 0.9}
    counts = {"heads": 1, "documents": 2, "documents_total": 3}
    rows = [
        {**place, **counts, "position": i, "token": token, "token_id": i, "alpha": 0.1 + i / 7}
        for i, token in enumerate(NASTY)
    ]
    return Result.from_rows({"sinks": rows}, checkpoint={"name": "run_1|a&b\n"})


@pytest.mark.parametrize("table", TABLES)
def test_csv_reads_back_with_identical_numbers(table: str, scanned: dict[str, Result]) -> None:
    results = list(scanned.values())
    back = pd.read_csv(io.StringIO(render(results, "csv", table)))
    want = combined(results, table)
    assert list(back) == list(want) == ["checkpoint", *TABLES[table]]
    assert len(back) == len(want) == sum(len(getattr(r, table)) for r in results)
    for column in want.select_dtypes("number"):
        assert back[column].isna().tolist() == want[column].isna().tolist()
        assert back[column].dropna().tolist() == want[column].dropna().tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_csv_keeps_every_digit(values: list[float]) -> None:
    rows = [{"site": "l", "layer": n, "f_attr": value} for n, value in enumerate(values)]
    text = render([Result.from_rows({"layers": rows})], "csv")
    back = pd.read_csv(io.StringIO(text))
    assert back["f_attr"].tolist() == values


def test_csv_lists_are_json(scanned: dict[str, Result]) -> None:
    back = pd.read_csv(io.StringIO(render([scanned["gated"]], "csv", "gates")))
    assert [json.loads(text) for text in back["histogram"]] == (
        scanned["gated"].gates["histogram"].tolist()
    )


def test_csv_keeps_tokens(nasty: Result) -> None:
    text = render([nasty], "csv", "sinks")
    back = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""])
    assert back["token"].tolist()[:-1] == NASTY[:-1]
    assert pd.isna(back["token"].iloc[-1])


def test_json_is_what_load_results_reads(tmp_path: Path, scanned: dict[str, Result]) -> None:
    export(list(scanned.values()), tmp_path / "a.json", "heads")
    loaded = load_results(tmp_path / "a.json")
    assert [r.name for r in loaded] == list(scanned)
    pd.testing.assert_frame_equal(loaded[0].heads, scanned["ungated"].heads)
    json.loads(render(list(scanned.values()), "json"), parse_constant=pytest.fail)


def test_a_name_that_is_not_utf_8_survives_json(tmp_path: Path, handmade: Make) -> None:
    name = os.fsdecode(b"model-\xff")  # half a surrogate pair, as Python reads such file names
    export([handmade(name)], tmp_path / "a.json")
    assert load_results(tmp_path / "a.json")[0].name == name
    assert r"model-\udcff" in render([handmade(name)], "csv")


def test_jsonl_has_a_row_a_line(scanned: dict[str, Result]) -> None:
    lines = render([scanned["ungated"]], "jsonl", "layers").splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert rows[0]["gate_mean"] is None
    assert rows[0]["f_attr"] == scanned["ungated"].layers["f_attr"][0]


def test_markdown_is_one_table(nasty: Result) -> None:
    lines = render([nasty], "md", "sinks").splitlines()
    bars = {line.replace("\\\\", "").replace(r"\|", "").count("|") for line in lines}
    assert len(bars) == 1
    assert lines[0].startswith("| checkpoint | layer | position |")
    assert lines[2].startswith(r"| run\_1\|a&b\\n | 0 | 0 | &lt;s&gt; | 0 | 0.1000 |")
    assert "| – |" in lines[-1]


def test_latex_is_escaped(nasty: Result) -> None:
    text = render([nasty], "latex", "sinks")
    assert r"run\_1\textbar{}a\&b\textbackslash{}n & 0 & 0 & \textless{}s\textgreater{}" in text
    assert r"\$x\_1\$" in text
    assert r"50\%\&\#" in text
    assert r"\textasciicircum{}\textasciitilde{}\{\}" in text
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == len(NASTY)
    assert all(line.endswith(r" \\") for line in body)
    assert {line.replace(r"\&", "").count("&") for line in body} == {9}


def test_reading_formats_round_and_leave_out_what_is_empty(handmade: Make) -> None:
    head, _, first, *_ = render([handmade()], "md", "layers").splitlines()
    assert "gate_mean" not in head
    assert "site" not in head
    assert "| 0.07410 |" in first
    assert "| 120 |" in first


def test_kinds_are_kept_where_there_are_several(scanned: dict[str, Result]) -> None:
    assert "| stack | kind |" in render([scanned["both"]], "md", "layers")
    assert "| site |" not in render([scanned["both"]], "md", "layers")


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".md", ".tex", ".latex", ".parquet"])
def test_every_table_in_every_format(
    table: str, suffix: str, tmp_path: Path, scanned: dict[str, Result]
) -> None:
    empty = Result.from_rows({}, checkpoint={"name": "empty"})
    for results in ([scanned["gated"], scanned["ungated"], empty], [empty]):
        path = tmp_path / f"out{suffix.upper()}"
        export(results, path, table)
        no_row = suffix == ".jsonl" and combined(results, table).empty
        assert bool(path.stat().st_size) is not no_row
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_parquet_reads_back(tmp_path: Path, scanned: dict[str, Result]) -> None:
    export(list(scanned.values()), tmp_path / "a.parquet", "gates")
    back = pd.read_parquet(tmp_path / "a.parquet")
    want = combined(list(scanned.values()), "gates")
    assert back["mean"].tolist() == want["mean"].tolist()
    assert back["histogram"].map(list).tolist() == want["histogram"].tolist()


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, scanned: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'attnprobe\[parquet\]'"):
        export([scanned["gated"]], tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_results_of_one_name_stay_apart(handmade: Make) -> None:
    assert combined([handmade("m"), handmade("m")], "model")["checkpoint"].tolist() == [
        *("m #1", "m #2")
    ]


def test_results_are_left_as_they_were(scanned: dict[str, Result]) -> None:
    before = scanned["gated"].to_dict()
    for name in ("json", "jsonl", "csv", "md", "latex"):
        render([scanned["gated"]], name, "gates")
    assert scanned["gated"].to_dict() == before


@pytest.mark.parametrize("format", ["csv", "json"])
def test_an_unknown_table_names_the_choices(format: str, handmade: Make) -> None:
    with pytest.raises(InputError, match=r"no table 'head': choose from model, layers, heads"):
        render([handmade()], format, "head")


def test_an_unknown_format_names_the_choices(handmade: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose from json, jsonl, csv, md, latex"):
        render([handmade()], "xml")
    with pytest.raises(InputError, match=r"end it in \.json, \.jsonl, \.csv"):
        export([handmade()], tmp_path / "a.xlsx")


def test_a_path_that_cannot_be_written_is_named(handmade: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*nowhere"):
        export([handmade()], tmp_path / "nowhere" / "a.csv")


def test_integers_stay_integers() -> None:
    rows = [{"site": "l", "layer": 0, "head": None, "num_rank": 7}]
    text = render([Result.from_rows({"layers": rows})], "csv")
    assert pd.read_csv(io.StringIO(text), dtype=str)["num_rank"].tolist() == ["7"]
    assert frame("layers", rows)["num_rank"].dtype == "Int64"


def test_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, attnprobe.render; "
        "print([m for m in ('pandas', 'rich', 'matplotlib', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tables_and_files_need_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys, attnprobe.render.table, attnprobe.render.export; "
        "print([m for m in ('matplotlib', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
