"""The overview has every stack and kind, every checkpoint, and says what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnprobe.render import axes, overview
from attnprobe.result import Result

Make = Callable[..., Result]


def drawn(*results: Result) -> Figure:
    figure = overview.draw([(result.name, result) for result in results])
    assert figure is not None
    return figure


def lines_of(figure: Figure) -> list[dict[str, Any]]:
    """The lines over layers of each panel that has them, by name."""
    panels = [ax for ax in figure.axes if ax.get_xlabel() == "layer"]
    return [{str(line.get_label()): line for line in ax.get_lines()} for ax in panels]


def note(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


def test_every_stack_and_kind_is_drawn(scanned: dict[str, Result]) -> None:
    both = scanned["both"]
    figure = drawn(scanned["ungated"], both)
    titles = [row.get_suptitle() for row in figure.subfigs]
    for row, part in zip(titles, ("decoder self", "encoder self", "decoder cross"), strict=False):
        assert row.startswith(f"{part}-attention")
    panels = lines_of(figure)
    assert [set(panel) & {"ungated", "both"} for panel in panels] == [
        {"ungated", "both"},
        {"both"},
        {"both"},
    ]
    keys = (("decoder", "self"), ("encoder", "self"), ("decoder", "cross"))
    for panel, (stack, kind) in zip(panels, keys, strict=True):
        own = both.layers[(both.layers["stack"] == stack) & (both.layers["kind"] == kind)]
        np.testing.assert_allclose(panel["both"].get_ydata(), own["f_attr"], rtol=1e-12)


def test_a_checkpoint_has_one_colour_in_all_panels(scanned: dict[str, Result]) -> None:
    panels = lines_of(drawn(scanned["ungated"], scanned["both"]))
    assert {panel["both"].get_color() for panel in panels} == {axes.colour(1)}


def test_a_checkpoint_that_lacks_the_first_stack_is_drawn(
    scanned: dict[str, Result], handmade: Make
) -> None:
    encoder = handmade("encoder", layers=2)
    for name in ("layers", "heads", "positions", "gates", "spectra"):
        getattr(encoder, name)["stack"] = "encoder"
    figure = drawn(encoder, scanned["ungated"])
    assert [set(p) & {"encoder", "ungated"} for p in lines_of(figure)] == [
        {"ungated"},
        {"encoder"},
    ]
    assert note(figure) == ""


def test_one_kind_has_the_gate_beside_it(scanned: dict[str, Result]) -> None:
    figure = drawn(scanned["ungated"], scanned["gated"])
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[:2] == ["ungated", "gated"]
    assert titles[-2:] == ["Attention on the first token", "How far the gate is open"]
    assert note(figure) == ""


def test_what_is_left_out_is_said(scanned: dict[str, Result], handmade: Make) -> None:
    many = [handmade(f"m{n}", layers=2, heads=2) for n in range(5)]
    assert note(drawn(*many)) == (
        "Heads are drawn of the first 3 of 5 checkpoints; each has its own file."
    )
    silent = handmade("silent")
    silent.heads["f_attr"] = np.nan
    assert note(drawn(many[0], silent)) == "Not on it, for no F-Attr was measured: silent."
    assert "not between 0 and 1 have a file of their own: silu" in note(drawn(scanned["silu"]))
    both = Result.from_dict(scanned["both"].to_dict())
    both.heads.loc[both.heads["kind"] == "cross", "f_attr"] = pd.NA
    assert note(drawn(both)) == "No F-Attr was measured of decoder cross-attention."


def test_the_floor_of_one_layer_is_a_line(handmade: Make) -> None:
    (panel,) = lines_of(drawn(handmade(layers=1)))
    floor = panel[axes.FLOOR]
    assert len(set(floor.get_xdata())) == 2
    assert set(floor.get_ydata()) == {0.0741}


def test_one_legend_names_all_checkpoints_of_several_stacks(scanned: dict[str, Result]) -> None:
    figure = drawn(scanned["ungated"], scanned["both"])
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["ungated", "both", axes.FLOOR]


def test_without_f_attr_there_is_no_overview(handmade: Make) -> None:
    silent = handmade()
    silent.heads["f_attr"] = np.nan
    assert overview.draw([("silent", silent)]) is None


def test_a_share_below_one_is_not_rounded_to_it(handmade: Make) -> None:
    result = handmade(layers=1, heads=2)
    result.heads["f_attr"] = [0.9961, 1.0]
    written = [text.get_text() for text in drawn(result).axes[0].texts]
    assert written == [">.99", "1.00"]
