"""F-Attr of several checkpoints on one figure: who has it, on which scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from attnprobe.render.parts import Key, Part
from attnprobe.result import Result

Named = Sequence[tuple[str, Result]]
Owned = Sequence[tuple[int, str, Part]]  # number of the checkpoint, which its colour goes by; name


def known(part: Part, column: str) -> bool:
    """Whether any head has the figure."""
    return bool(part.rows("heads")[column].notna().any())


def with_share(named: Named, key: Key) -> Owned:
    """The checkpoints in which this kind of attention has an F-Attr."""
    own = [(n, label, Part(result, *key)) for n, (label, result) in enumerate(named)]
    return [(n, label, part) for n, label, part in own if part.layers and known(part, "f_attr")]


def share_top(named: Named) -> float:
    """The upper end of the F-Attr scale, the same in all heat maps of a call."""
    largest = max((float(r.heads["f_attr"].max()) for _, r in named if len(r.heads)), default=1.0)
    return next((top for top in (0.1, 0.25, 0.5) if largest <= top), 1.0)


def colour_bar(
    figure: Figure, image: Any, grid: Sequence[Any], unit: str, own: Sequence[Part]
) -> None:
    """A scale, with the floor marked where all layers have the same."""
    height = figure.bbox.height / figure.dpi
    bar = figure.colorbar(image, ax=grid, label=unit, pad=0.03, aspect=max(15, 8 * height))
    bar.outline.set_visible(False)
    floors = [v for p in own for v in p.figures("f_attr_uniform").values() if v is not None]
    if floors and max(floors) - min(floors) < 1e-6:
        bar.ax.axhline(floors[0], color="white", linewidth=2.5)
        bar.ax.axhline(floors[0], color="black", linewidth=1, linestyle="--")
        bar.ax.annotate(
            "floor",
            (0, floors[0]),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
        )
