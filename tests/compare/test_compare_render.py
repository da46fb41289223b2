"""A comparison in print, as files and as a figure."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from made import made
from rich.cells import cell_len
from rich.console import Console

from attnprobe.compare import Comparison, compare
from attnprobe.errors import InputError
from attnprobe.render import compare as rendered
from attnprobe.render import compare_plot

GOLDEN = Path(__file__).with_name("golden.txt")


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return compare([made("ungated"), made("gated", gate=True, seed=1, shift=-0.1)])


@pytest.fixture(scope="module")
def three() -> Comparison:
    names = ("runs/base/step_001000", "runs/a/step_001000", "wörld │ 中文")
    return compare([made(n, seed=i, layers=3 + i, gate=i > 0) for i, n in enumerate(names)])


def printed(comparison: Comparison, width: int = 80, by_layer: bool = False, **options: str) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, **options)  # type: ignore[arg-type]
    rendered.show(comparison, console, by_layer)
    return stream.getvalue()


def test_golden_at_80_columns(pair: Comparison) -> None:
    """`python -m pytest` after `rm tests/compare/golden.txt` writes it anew."""
    found = printed(pair, by_layer=True)
    if not GOLDEN.exists():
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_line_fits(pair: Comparison, three: Comparison, width: int) -> None:
    for comparison in (pair, three):
        for line in printed(comparison, width, by_layer=True).splitlines():
            assert cell_len(line) <= width
            assert line == line.rstrip()


def test_nothing_depends_on_the_terminal(pair: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = printed(pair)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(pair) == plain
    assert "\x1b" not in plain


def test_a_console_that_knows_ascii_only(three: Comparison) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    rendered.show(three, Console(file=stream, width=80), by_layer=True)
    stream.flush()


def test_what_is_not_seen_is_said(pair: Comparison) -> None:
    text = printed(pair)
    assert "no difference seen: entropy / ln n" in text
    line = next(line for line in text.splitlines() if line.startswith("entropy / ln n"))
    assert "none seen" in line
    assert " to " in line
    assert "lower: F-Attr 0.6" in text
    assert "its floor" in text


def test_each_other_stands_beside_the_first(three: Comparison) -> None:
    text = printed(three)
    assert text.count("F-Attr         │") == 2
    assert text.count("layer erank") >= 2
    wide = printed(three, 200)
    assert wide.count("F-Attr         │") == 1


def test_a_trainers_names_leave_room_for_the_ratio() -> None:
    comparison = compare([made("checkpoint-100"), made("checkpoint-500", seed=1, shift=-0.1)])
    assert "ratio" in printed(comparison).partition("difference and ratio")[0]
    assert "│ checkpoint-100 │ checkpoint-500" in printed(comparison, 100)


def test_json_has_all_digits_and_null_for_what_is_missing(pair: Comparison) -> None:
    content = json.loads(rendered.render(pair, "json", by_layer=True))
    assert content["reference"] == "ungated"
    assert [c["paired"] for c in content["checkpoints"]] == [True, True]
    rows = {(r["checkpoint"], r["metric"]): r for r in content["model"]}
    frame = pair.model.set_index(["checkpoint", "metric"])
    assert rows["gated", "f_attr"]["low"] == frame.loc[("gated", "f_attr"), "low"]
    assert rows["gated", "f_attr"]["seen"] is True
    assert rows["gated", "erank"]["low"] is None
    assert rows["ungated", "gate_mean"]["value"] is None
    assert len(content["layers"]) == len(pair.layers)
    assert "layers" not in json.loads(rendered.render(pair, "json"))


def test_csv_reads_back(pair: Comparison) -> None:
    table = pd.read_csv(io.StringIO(rendered.render(pair, "csv", by_layer=True)))
    assert len(table) == len(pair.model) + len(pair.layers)
    assert table["value"].tolist()[0] == pair.model["value"].tolist()[0]


def test_markdown_and_latex(three: Comparison) -> None:
    text = rendered.render(three, "md")
    head = text.splitlines()[0]
    assert "runs/base/step\\_001000" in head
    assert {line.count(" | ") for line in text.splitlines()} == {head.count(" | ")}
    latex = rendered.render(three, "latex", by_layer=True)
    assert r"step\_001000: difference" in latex
    assert "& $-$0." in latex
    assert "& -0" not in latex
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert len({line.replace(r"\&", "").count("&") for line in rows}) == 1


def test_files_by_suffix(pair: Comparison, tmp_path: Path) -> None:
    for suffix, format in rendered.SUFFIXES.items():
        path = tmp_path / f"table{suffix}"
        rendered.export(pair, path)
        assert path.read_text(encoding="utf-8") == rendered.render(pair, format)
    with pytest.raises(InputError, match="end it in"):
        rendered.export(pair, tmp_path / "table.xlsx")
    with pytest.raises(InputError, match="no format"):
        rendered.render(pair, "xml")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_figure(pair: Comparison, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"figure.{suffix}"
    compare_plot.plot(pair, path)
    first = path.read_bytes()
    compare_plot.plot(pair, path)
    assert path.read_bytes() == first
    assert len(first) > 5000


def test_a_figure_of_another_format(pair: Comparison, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"end it in \.png, \.svg, \.pdf"):
        compare_plot.plot(pair, tmp_path / "figure.jpg")


def test_what_the_figure_shows(pair: Comparison, three: Comparison) -> None:
    figure = compare_plot.draw(pair)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[0] == "Attention on the first token"
    assert titles[-1] == "Ratio to ungated"
    share = figure.axes[0]
    assert [line.get_label() for line in share.get_lines()][:2] == ["ungated", "gated"]
    assert share.get_ylim()[0] == 0
    ratios = figure.axes[-1]
    hollow = [line for line in ratios.get_lines() if line.get_markerfacecolor() == "white"]
    seen = pair.model["seen"].dropna()
    assert len(hollow) == (~seen).sum()
    assert len(compare_plot.draw(three).axes) == 6


def test_a_figure_of_nothing_but_ranks() -> None:
    results = [made("a"), made("b", seed=1)]
    for result in results:
        for frame in (result.model, result.layers):
            frame[["f_attr", "entropy_norm", "sink_rate", "m_act"]] = float("nan")
        result.model["ppl"] = float("nan")
    figure = compare_plot.draw(compare(results))
    assert [ax.get_title() for ax in figure.axes] == ["Effective rank of the layer", "Ratio to a"]


def test_the_figure_has_every_stack_and_kind() -> None:
    results = [made("a"), made("b", seed=1)]
    for result in results:
        cross = result.layers.assign(kind="cross", site="x")
        result.layers = pd.concat([result.layers, cross], ignore_index=True)
        result.model = pd.concat(
            [result.model, result.model.assign(kind="cross")], ignore_index=True
        )
    figure = compare_plot.draw(compare(results))
    titles = [row.get_suptitle() for row in figure.subfigs]
    assert titles == ["decoder self-attention", "decoder cross-attention"]
    for row, kind in zip(figure.subfigs, ("self", "cross"), strict=True):
        assert row.axes[0].get_title() == "Attention on the first token"
        assert row.axes[-1].get_title() == f"Ratio to a, {kind}-attention"
