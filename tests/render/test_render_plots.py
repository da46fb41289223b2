"""Plots: the right files, whole or not at all, with what the data have and nothing else."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from attnprobe.errors import InputError
from attnprobe.render import axes, plots
from attnprobe.render.parts import Part, parts
from attnprobe.render.plots import file_name, plot
from attnprobe.result import Result, frame

Make = Callable[..., Result]
MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer pixels: nobody looks at these."""
    monkeypatch.setattr(plots, "DPI", 30)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_pair_has_everything(tmp_path: Path, scanned: dict[str, Result]) -> None:
    written = plot([scanned["ungated"], scanned["gated"]], tmp_path / "deep" / "er")
    assert names(written) == [
        "overview.png",
        *("ungated-f_attr.png", "gated-f_attr.png"),
        *("ungated-positions.png", "gated-positions.png"),
        "f_attr-by-layer.png",
        *("ungated-entropy.png", "gated-entropy.png"),
        *("ungated-spectra.png", "gated-spectra.png"),
        "gated-gates.png",
    ]
    assert sorted(p.name for p in written[0].parent.iterdir()) == sorted(names(written))
    assert all(path.read_bytes().startswith(MAGIC["png"]) for path in written)


@pytest.mark.parametrize(
    ("view", "format", "files"),
    [
        ("sink", "png", ["a-f_attr", "a-positions", "f_attr-by-layer"]),
        ("entropy", "pdf", ["a-entropy"]),
        ("rank", "svg", ["a-spectra"]),
        ("gate", "pdf", ["a-gates"]),
    ],
)
def test_a_view_has_its_own(
    view: str, format: str, files: list[str], tmp_path: Path, handmade: Make
) -> None:
    written = plot([handmade("a", layers=2, heads=2, gate=True)], tmp_path, view, format)
    assert names(written) == [f"{name}.{format}" for name in files]
    assert all(path.read_bytes().startswith(MAGIC[format]) for path in written)


def test_the_same_plot_twice_is_the_same_file(tmp_path: Path, handmade: Make) -> None:
    first, second = (
        plot([handmade(layers=2)], tmp_path / part, "entropy", "svg")[0].read_bytes()
        for part in ("a", "b")
    )
    assert first == second


def test_odd_shapes_are_drawn(tmp_path: Path, scanned: dict[str, Result], handmade: Make) -> None:
    deep = handmade("deep", layers=100, heads=4, gate=True)
    for results in (
        [handmade(layers=1, heads=1)],
        [deep],
        [scanned["both"], scanned["silu"]],
        [handmade(f"m{n}", layers=2, heads=2) for n in range(8)],
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert plot(results, tmp_path, "sink")
    assert plot([deep], tmp_path, "gate")
    assert plot([scanned["silu"]], tmp_path, "gate")


def test_names_cannot_leave_the_folder(tmp_path: Path, handmade: Make) -> None:
    odd = ["../../etc/x", "$\\frac{1", "中文\n", "a/b", "a-b", "." * 300]
    results = [handmade(name, layers=2, heads=2) for name in odd]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = plot(results, tmp_path, "entropy")
    assert len(set(written)) == len(odd)
    assert all(path.parent == tmp_path and path.exists() for path in written)
    assert names(written)[0] == "etc-x-entropy.png"
    assert names(written)[3:5] == ["a-b-entropy.png", "a-b-2-entropy.png"]


def test_file_names_are_short() -> None:
    assert len(file_name("x" * 500)) == 60
    assert file_name("…") == "model"


def test_what_was_not_measured_is_not_drawn(tmp_path: Path, handmade: Make) -> None:
    result = handmade(layers=2)
    for name in ("positions", "spectra", "gates"):
        setattr(result, name, frame(name, []))
    result.heads["entropy_norm"] = np.nan
    assert names(plot([result], tmp_path)) == [
        "overview.png",
        "ungated-f_attr.png",
        "f_attr-by-layer.png",
    ]
    assert plot([Result.from_rows({})], tmp_path) == []
    assert plot([], tmp_path) == []


def test_missing_heads_leave_a_gap(handmade: Make) -> None:
    result = handmade(layers=3, heads=3)
    result.heads.loc[result.heads["layer"] == 1, "f_attr"] = np.nan
    (part,) = parts(result)
    image = axes.heat_map(Figure().subplots(), part, "f_attr", 1.0, "viridis")
    values = image.get_array()
    assert values is not None
    assert values.shape == (3, 3)
    assert np.ma.getmaskarray(values)[1].all()
    assert np.ma.count_masked(values) == 3


def test_the_floor_over_position_is_that_of_uniform_attention(scanned: dict[str, Result]) -> None:
    """Drawn only where the measured floor says which mask it was: 48 causal tokens, 48 keys."""
    causal = axes.uniform_alpha(parts(scanned["ungated"])[0])
    assert causal is not None
    dense = np.tril(1 / np.arange(1, 49)[:, None] * np.ones(48))
    np.testing.assert_allclose(causal[1], [dense[k:, k].mean() for k in range(48)], rtol=1e-12)
    both = scanned["both"]
    flat = axes.uniform_alpha(Part(both, "decoder", "cross"))
    assert flat is not None
    assert set(flat[1]) == {1 / 48}


def test_no_floor_is_drawn_where_the_mask_is_not_known(handmade: Make) -> None:
    assert axes.uniform_alpha(parts(handmade())[0]) is None  # its floor is of 64 tokens, not of 16


def test_text_is_never_smaller_than_eight_points(handmade: Make) -> None:
    sizes = [v for k, v in plots.STYLE.items() if k.endswith("size") and not k.startswith("lines")]
    assert min(sizes) >= 8


def test_bad_requests_are_named(tmp_path: Path, handmade: Make) -> None:
    with pytest.raises(InputError, match="unknown view 'x': choose from sink"):
        plot([handmade()], tmp_path, "x")
    with pytest.raises(InputError, match="unknown plot format 'gif': choose from png, svg, pdf"):
        plot([handmade()], tmp_path, "sink", "gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot make .*file"):
        plot([handmade()], tmp_path / "file")


def test_pyplot_stays_out() -> None:
    code = "import sys, attnprobe.render.plots; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
