"""What `show` prints: fits, says what was found, needs neither colour nor Unicode."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from rich.cells import cell_len
from rich.console import Console

from attnprobe.errors import InputError
from attnprobe.render.table import VIEWS, show
from attnprobe.result import TABLES, Result, frame

Print = Callable[..., str]
Make = Callable[..., Result]

PAIR = """\
ungated · 2 layers × 4 heads · no gate · 1.23 M parameters
  F-Attr 0.46, 6.2× the floor of 0.074: 7 of 8 heads sink on the first token
  (worst: layer 0 head 2, 0.80)
gated · 2 layers × 4 heads · element gate at G1 · 1.23 M parameters
  F-Attr 0.035, below the floor of 0.074: no head sinks on the first token on
  average (highest: layer 0 head 2, 0.060)

      │ ungated                          │ gated
layer │ F-Attr  floor  heads  worst head │ F-Attr  floor  heads  worst head
──────┼──────────────────────────────────┼─────────────────────────────────
    0 │  0.530  0.074  ▃▅▇▄     h2 0.800 │  0.040  0.074  ▁▁▁▁     h2 0.060
    1 │  0.393  0.074  ▄▂▃▅     h3 0.533 │  0.029  0.074  ▁▁▁▁     h3 0.040
──────┼──────────────────────────────────┼─────────────────────────────────
 mean │  0.462  0.074                    │  0.035  0.074

Sinks: keys that get more than 0.3 of the attention of the queries that see them
checkpoint │ layer  position  token  heads  documents  mean  most
───────────┼─────────────────────────────────────────────────────
ungated    │ 0             0  <s>        4   60 of 64  0.60  0.90
           │ 1             0  <s>        4   60 of 64  0.60  0.90
heads, documents: in how many it sinks; mean, most: its attention there

F-Attr: mean share of attention on the first token; floor: what length and mask
alone would give it; heads: F-Attr, one block a head, ▁ 0 to █ 1

measured on back-copy · 64 × 64 tokens · cpu · float32 · 1.2 s and 1.2 s
"""


def widest(text: str) -> int:
    return max(cell_len(line) for line in text.splitlines())


def test_a_pair_side_by_side(handmade: Make, printed: Print) -> None:
    pair = [handmade(layers=2), handmade("gated", layers=2, gate=True, strength=0.06)]
    assert printed(pair, "sink") == PAIR


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [40, 80])
def test_every_line_fits(
    view: str, width: int, scanned: dict[str, Result], handmade: Make, printed: Print
) -> None:
    deep = handmade("a/very/long/path/to/checkpoints/of-a-large-model.pt", layers=100, heads=32)
    small = list(scanned.values())
    for results in (*([r] for r in small), small[:2], small, [deep]):
        assert widest(printed(results, view, width)) <= width


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_cut_off_at_80_columns(
    view: str, scanned: dict[str, Result], printed: Print
) -> None:
    text = printed(list(scanned.values()), view)
    assert "…" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("view", VIEWS)
def test_a_console_without_unicode_gets_ascii(
    view: str, scanned: dict[str, Result], handmade: Make
) -> None:
    results = [*scanned.values(), handmade("modèle 中", gate=True)]
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(results, view, Console(file=stream, width=80))
    stream.flush()
    assert widest(raw.getvalue().decode("ascii")) <= 80


def test_no_colour_says_the_same(
    handmade: Make, monkeypatch: pytest.MonkeyPatch, printed: Print
) -> None:
    results = [handmade(), handmade("gated", gate=True, strength=0.06)]
    plain = printed(results, "scan")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(results, "scan", force_terminal=True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert printed(results, "scan", force_terminal=True) == plain
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in printed(results, "scan", force_terminal=True)


@pytest.mark.parametrize("view", ["sink", "entropy", "scan"])
def test_the_floor_stands_beside_every_share(
    view: str, scanned: dict[str, Result], printed: Print
) -> None:
    for count in range(1, 5):
        for line in printed(list(scanned.values())[:count], view).splitlines():
            if "layer │" in line:
                assert line.count("F-Attr") == line.count("F-Attr  floor")


def test_headlines_tell_far_from_near(handmade: Make, printed: Print) -> None:
    def headline(strength: float) -> str:
        return printed([handmade(strength=strength)], "sink").partition("\n\n")[0]

    assert "4.7× the floor of 0.074: 9 of 16 heads sink" in headline(0.8)
    assert "at the floor of 0.074: no head sinks" in headline(0.17)
    assert "below the floor of 0.074" in headline(0.06)


def test_where_some_heads_are_listed_none_is_said_of_the_others(
    handmade: Make, printed: Print
) -> None:
    every = handmade()
    some = replace(every, heads=every.heads[every.heads["head"] == 2])
    assert "2 of 4 heads listed sink on the first" in printed([some], "sink")
    assert "heads listed" not in printed([every], "sink")


def test_short_documents_make_no_claim_about_heads(handmade: Make, printed: Print) -> None:
    result = handmade()
    for table in (result.heads, result.layers, result.model):
        table["sink_rate"] = float("nan")
    text = printed([result], "sink")
    assert "too short to tell which heads sink" in text
    assert "heads sink on" not in text


def test_heads_on_short_documents_are_not_counted(handmade: Make, printed: Print) -> None:
    result = handmade()
    for table in (result.heads, result.layers):  # as a short text beside a picture
        short = table["layer"] == 0
        table.loc[short, "sink_rate"] = float("nan")
        table.loc[short, "alpha_first"] = 0.9
    text = " ".join(printed([result], "sink").split())
    assert "5 of 12 heads sink on the first token (worst: layer 1 head " in text
    assert "; too short to tell for 4 heads more" in text


def test_both_quantiles_are_explained(scanned: dict[str, Result], printed: Print) -> None:
    text = " ".join(printed([scanned["both"]], "entropy").split())
    assert "5 %: H that 5 % of the queries stay below; 95 %: H that 95 % stay below" in text


def test_a_name_of_two_words_is_written_as_words(handmade: Make, printed: Print) -> None:
    result = handmade(token="class token")
    result.layers["stack"] = "vision"
    result.layers["first_token"] = "class token"
    text = " ".join(printed([result], "sink").split())
    assert "on the first token (class token)" in text
    assert "│ 0 class token " in text


def test_a_sink_shows_its_token_escaped(handmade: Make, printed: Print) -> None:
    text = printed([handmade(token="\x1b[2J\n[bold] ‮")], "sink")
    assert r"\x1b[2J\n[bold]␣" in text
    assert "\x1b" not in text


def test_names_are_not_markup(handmade: Make, printed: Print) -> None:
    text = printed([handmade("[red]x[/red]\r:smile:"), handmade("b")], "scan")
    assert r"[red]x[/red]\r:smile:" in text


def test_many_sinks_are_put_together_by_position(handmade: Make, printed: Print) -> None:
    text = printed([handmade(layers=40)], "sink")
    (line,) = [line for line in text.splitlines() if line.startswith("0-39 ")]
    assert line.split() == ["0-39", "│", "0", "<s>", "160", "60", "of", "64", "0.60", "0.90"]


def test_sinks_on_different_first_tokens_are_one_line(handmade: Make, printed: Print) -> None:
    result = handmade(layers=1)
    row = result.sinks.iloc[0].to_dict()
    rows = [{**row, "token": chr(97 + i), "token_id": i, "documents": 2} for i in range(20)]
    result.sinks = frame("sinks", rows)
    text = printed([result], "sink")
    assert "20: a b c" in text
    assert "≥ 4   40 of 64" in text


def test_massive_activations_are_listed(handmade: Make, printed: Print) -> None:
    result = handmade()
    place = {"site": "layers.1.attention", "stack": "decoder", "kind": "self", "position": 0}
    value = {"token": "<s>", "token_id": 0, "dimension": 17, "value": -412.5, "ratio": 2210.0}
    result.massive = frame(
        "massive", [{**place, **value, "layer": n, "document": d} for n in (1, 2) for d in (0, 1)]
    )
    for view in ("sink", "scan"):
        text = printed([result], view)
        (line,) = [line for line in text.splitlines() if "-412" in line]
        assert line.split() == ["1-2", "│", "0", "<s>", "17", "2", "-412", "2210"]


def test_collapsed_heads_stand_beside_their_sink_mass(handmade: Make, printed: Print) -> None:
    text = printed([handmade()], "entropy")
    assert "1 of 16 heads collapsed" in text
    table = text.partition("Collapsed heads\n")[2].splitlines()
    assert table[0].split() == ["layer", "│", "head", "H/ln", "n", "F-Attr", "floor"]
    assert table[2].split() == ["0", "│", "2", "0.020", "0.800", "0.074"]


def test_rank_of_one_layer_is_shown_in_depth(scanned: dict[str, Result], printed: Print) -> None:
    text = printed([scanned["ungated"]], "rank", layer=-1)
    assert "layer 2 only" in text
    assert [line.split()[0] for line in text.splitlines() if "█" in line and "%" in line] == [
        *("0", "1", "2", "3", "all")
    ]
    assert "effective rank" in text.partition("▲")[2]
    assert "No head gated" not in text
    text = printed([scanned["gated"]], "rank", layer=-1)
    assert "No head gated" in text
    assert "here 8" in text


def test_a_scan_of_one_layer_is_shown_in_depth(scanned: dict[str, Result], printed: Print) -> None:
    result = scanned["gated"]
    measured = result.layers["layer"] == 1
    for name in set(TABLES) - {"model"}:
        assert name in vars(result)
    part = Result.from_dict(result.to_dict())
    part.layers, part.heads = part.layers[measured], part.heads[part.heads["layer"] == 1]
    part.run["layers"] = [1]
    assert "Singular values of the layer's output" in printed([part], "rank")


def test_the_footnote_stands_under_every_rank(scanned: dict[str, Result], printed: Print) -> None:
    for view in ("rank", "scan"):
        text = " ".join(printed([scanned["gated"]], view).split())
        assert "No head gated at G1–G4 can exceed its width d_v, here 8" in text
        assert "is told of layers" in text


def test_an_unknown_layer_is_named(scanned: dict[str, Result], printed: Print) -> None:
    with pytest.raises(InputError, match="no layer 99 in ungated: it has layers 0-2"):
        printed([scanned["ungated"]], "rank", layer=99)


def test_an_unknown_view_is_named(scanned: dict[str, Result], printed: Print) -> None:
    with pytest.raises(InputError, match="choose from sink, entropy, rank, gate, scan"):
        printed([scanned["ungated"]], "sinks")


def test_gates_say_what_they_are(scanned: dict[str, Result], printed: Print) -> None:
    text = printed([scanned["ungated"], scanned["gated"], scanned["silu"]], "gate")
    assert "element gate at G1 (sigmoid): mean 0." in text
    assert "head gate at G1 (silu): mean" in text
    assert text.count("no gate at this attention layer (layers 0-2)") == 1


def test_an_ungated_model_has_one_quiet_line(scanned: dict[str, Result], printed: Print) -> None:
    lines = printed([scanned["ungated"]], "scan").splitlines()
    assert len([line for line in lines if "no gate at" in line]) == 1


def test_reasons_are_put_together(handmade: Make, printed: Print) -> None:
    result = handmade(layers=1)
    keys = {"stack": "decoder", "kind": "self"}
    rows = [
        {**keys, "site": f"l.{n}", "layer": n, "metric": "all", "reason": "linear attention"}
        for n in (0, 1, 2, 4, 5, 6)
    ]
    rows.append({"metric": "model", "reason": "only some layers were measured"})
    rows += [{"site": f"m.{n}", "metric": "all", "reason": "no call"} for n in range(5)]
    result.not_measured = frame("not_measured", rows)
    text = " ".join(printed([result], "sink").split())
    assert "no figure: linear attention (layers 0-2, 4-6)" in text
    assert "· 1 of 6 layers × 4 heads ·" in text
    assert "figures of the model: only some layers were measured not" in text
    assert "no figure: no call (m.0; m.1; m.2; and 2 more)" in text


def test_kinds_and_stacks_are_told_apart(scanned: dict[str, Result], printed: Print) -> None:
    text = printed([scanned["both"]], "sink")
    titles = ["encoder self-attention", "decoder self-attention", "decoder cross-attention"]
    assert [line for line in text.splitlines() if line in titles] == titles
    assert "self-attention: F-Attr" in text
    assert "cross-attention: F-Attr" in text


def test_results_with_different_layers_share_a_table(handmade: Make, printed: Print) -> None:
    text = printed([handmade(layers=2), handmade("deep", layers=3)], "sink")
    (last,) = [line for line in text.splitlines() if line.startswith("    2 │")]
    assert last.split("│")[1].strip() == ""


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_not_there_is_not_shown(
    view: str, scanned: dict[str, Result], printed: Print
) -> None:
    empty = Result.from_rows({}, checkpoint={"name": "nothing"})
    assert printed([empty], view).startswith("nothing\n")
    rows = {"layers": [{**_KEY, "gate_mean": None}], "heads": [{**_KEY, "head": 0}]}
    bare = Result.from_rows(
        {**rows, "not_measured": [{**_KEY, "metric": "all", "reason": "soft cap"}]}
    )
    assert "no figure: soft cap (layer 0)" in printed([bare], view)
    printed([bare, scanned["gated"], empty], view)


_KEY: dict[str, Any] = {"site": "l", "stack": "decoder", "kind": "self", "layer": 0, "head": None}


def test_only_what_was_asked_for_is_there(scanned: dict[str, Result], printed: Print) -> None:
    entry = scanned["gated"].to_dict()
    only_gate = Result.from_dict(
        {**entry, "model": {}, "heads": [], "spectra": [], "positions": []}
    )
    for column in set(only_gate.layers) - {"site", "stack", "kind", "layer", "gate_mean"}:
        only_gate.layers[column] = pd.NA
    assert "F-Attr" not in printed([only_gate], "scan")
    assert "gate" in printed([only_gate], "scan")


def test_no_results_print_nothing(printed: Print) -> None:
    assert printed([], "scan") == ""


def test_inputs_that_differ_are_told_apart(handmade: Make, printed: Print) -> None:
    first, second = handmade("a"), handmade("b")
    second.input["length"], second.input["tokens"] = 32, 1999
    text = printed([first, second], "sink")
    assert "a: measured on back-copy · 64 × 64 tokens · cpu" in text
    assert "b: measured on back-copy · 64 × 32 tokens · 1,999 real tokens · cpu" in text


def test_two_of_one_name_are_numbered(handmade: Make, printed: Print) -> None:
    text = printed([handmade("m"), handmade("m")], "sink")
    assert "m #1 ·" in text
    assert "m #2 ·" in text
    mixed = [handmade("m"), handmade("m", gate=True), handmade("m", gate=True)]
    header = [line for line in printed(mixed, "gate").splitlines() if line.startswith("      │")]
    assert header[0].split() == ["│", "m", "#2", "│", "m", "#3"]


def test_a_cell_that_stands_for_several_heads_says_so(handmade: Make, printed: Print) -> None:
    assert "a block for the highest of every 3 heads" in " ".join(
        printed([handmade(heads=64)], "sink").split()
    )
