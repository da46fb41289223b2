"""The trend of a training run as a figure: a panel a metric, over training steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnprobe.audit.trend import Trend
from attnprobe.errors import InputError
from attnprobe.files import replacing
from attnprobe.render.axes import colour, marker, titled
from attnprobe.render.plots import DPI, NO_DATE, STYLE, file_name

LABELS = {
    "f_attr": "F-Attr, first-token share",
    "sink_rate": "sink rate, share of heads",
    "entropy_norm": "entropy, share of ln n",
    "erank": "effective rank, layer mean",
    "gate_mean": "mean gate",
    "m_act": "M-Act, largest |h|",
    "ppl": "perplexity",
}
_SHARES = ("f_attr", "sink_rate", "entropy_norm", "gate_mean")
COLUMNS = 3


def plot(trends: Sequence[Trend], folder: Path, format: str = "png") -> list[Path]:
    """Draws every trend into a file of its own, whole or not at all.

    Args:
        trends: what `attnprobe.audit.trend.of` gives.
        folder: made if it is not there.
        format: "png", "svg" or "pdf".

    Returns:
        The files written.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror or error}") from error
    names: list[str] = []
    written = []
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for trend in trends:
            kind = "" if trend.kind == "self" else f"-{trend.kind}"
            names.append(file_name(f"trend-{Path(trend.run).name}{kind}", names))
            written.append(folder / f"{names[-1]}.{format}")
            with replacing(written[-1]) as temporary:
                draw(trend).savefig(temporary, format=format, dpi=DPI, metadata=NO_DATE[format])
    return written


def draw(trend: Trend) -> Figure:
    """The figure of one trend."""
    columns = min(COLUMNS, len(trend.metrics)) + (len(trend.metrics) > 6)
    rows = -(-len(trend.metrics) // columns)
    figure = Figure(figsize=(2.7 * columns, 2.0 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
    for n, (ax, metric) in enumerate(zip(grid, trend.metrics, strict=False)):
        steps = [point.step for point in trend.points]
        values = [point.figures[metric] for point in trend.points]
        known = [float("nan") if v is None else v for v in values]  # a gap, not a straight line
        ax.plot(steps, known, color=colour(0), marker=marker(0), markersize=4, clip_on=False)
        titled(ax, LABELS.get(metric, metric))
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        if metric in _SHARES:
            ax.set_ylim(0, 1.08 * max((v for v in values if v is not None), default=0) or 1.0)
        if n + columns >= len(trend.metrics):
            ax.set_xlabel("training step")
            ax.tick_params(labelbottom=True)
    for ax in grid[len(trend.metrics) :]:
        ax.remove()
    kind = "" if trend.kind == "self" else f", {trend.kind} attention"
    figure.suptitle(f"{trend.run}{kind}", parse_math=False, fontsize=10)
    return figure
