"""A layer, a few, or some heads that were asked for: each head has its row and its own figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnprobe.render.parts import only_layer
from attnprobe.result import Result

Print = Callable[..., str]
Make = Callable[..., Result]


def body(text: str, title: str) -> list[list[str]]:
    """The cells of the table whose head holds `title`, the rule left out."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if title in line and "│" in line)
    rows = []
    for line in lines[start + 2 :]:
        if "│" not in line:
            break
        rows.append(line.replace("│", " ").split())
    return rows


@pytest.mark.parametrize(
    ("view", "title", "figure", "table", "column"),
    [
        ("sink", "F-Attr", "{:.3f}", "heads", "f_attr"),
        ("entropy", "H/ln n", "{:.3f}", "heads", "entropy_norm"),
        ("rank", "erank", "{:.1f}", "heads", "erank"),
        ("gate", "mean", "{:.3f}", "gates", "mean"),
        ("scan", "F-Attr", "{:.3f}", "heads", "f_attr"),
    ],
)
def test_one_layer_lists_its_heads(
    view: str,
    title: str,
    figure: str,
    table: str,
    column: str,
    scanned: dict[str, Result],
    printed: Print,
) -> None:
    result = scanned["gated"]
    rows = body(printed([result], view, layer=1, width=200), title)
    frame = getattr(result, table)
    own = frame[(frame["layer"] == 1) & frame["head"].notna()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "all"]
    for row, value in zip(rows, own[column], strict=False):
        assert figure.format(value) in row
    whole = result.layers[result.layers["layer"] == 1]["gate_mean" if view == "gate" else column]
    assert figure.format(whole.item()) in rows[-1]


def test_a_few_layers_are_listed_head_by_head(handmade: Make, printed: Print) -> None:
    result = handmade(layers=2, heads=3)
    result.run["layers"] = [0, 1]
    rows = body(printed([result], "sink"), "F-Attr")
    assert [row[:2] for row in rows] == [[n, h] for n in "01" for h in ("0", "1", "2", "all")]


def test_some_heads_of_all_layers_are_listed(handmade: Make, printed: Print) -> None:
    result = handmade(layers=3, heads=4)
    result.heads = result.heads[result.heads["head"].isin([1, 3])]
    rows = body(printed([result], "sink"), "F-Attr")
    assert [row[:2] for row in rows] == [[n, h] for n in "012" for h in ("1", "3", "all")]


def test_too_many_heads_are_told_where_they_are(handmade: Make, printed: Print) -> None:
    result = handmade(layers=40, heads=4)
    assert "each head:" not in printed([result], "sink")
    result.run["layers"] = list(range(40))
    text = printed([result], "sink")
    assert [row[0] for row in body(text, "F-Attr")] == [str(n) for n in range(40)]
    assert "each head: fewer layers at a time, or --format csv --table heads" in text


def test_one_layer_of_many_heads_is_listed_all_the_same(handmade: Make, printed: Print) -> None:
    text = printed([only_layer(handmade(layers=3, heads=200), 0)], "sink")
    assert len(body(text, "F-Attr")) == 201


def test_a_head_that_one_checkpoint_lacks_has_an_empty_cell(handmade: Make, printed: Print) -> None:
    narrow, wide = handmade("narrow", layers=1, heads=2), handmade("wide", layers=1, heads=3)
    lines = printed([narrow, wide], "sink").splitlines()
    (row,) = [line for line in lines if line.startswith("   2 │")]
    _, left, right = row.split("│")
    assert not left.strip()
    assert f"{wide.heads['f_attr'].iloc[2]:.3f}" in right


def test_collapsed_heads_are_marked_and_counted(handmade: Make, printed: Print) -> None:
    text = printed([only_layer(handmade(), 0)], "entropy")
    rows = body(text, "H/ln n")
    assert [row[0] for row in rows if "yes" in row] == ["2"]
    assert rows[-1][0] == "all"
    assert "1" in rows[-1]
    assert "Collapsed heads" not in text


def test_each_stack_has_its_heads(scanned: dict[str, Result], printed: Print) -> None:
    text = printed([scanned["both"]], "sink", layer=1)
    for part in ("encoder self", "decoder self", "decoder cross"):
        assert f"{part}-attention · layer 1" in text
    assert text.count("\n all │") == 3


@pytest.mark.parametrize("view", ["sink", "entropy", "rank", "gate", "scan"])
@pytest.mark.parametrize("width", [40, 80])
def test_every_line_fits(view: str, width: int, scanned: dict[str, Result], printed: Print) -> None:
    text = printed([scanned["ungated"], scanned["gated"]], view, layer=0, width=width)
    assert max(map(len, text.splitlines())) <= width
