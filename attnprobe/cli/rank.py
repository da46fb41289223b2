"""`attnprobe rank`."""

from __future__ import annotations

from attnprobe.cli.measuring import View, measure
from attnprobe.cli.options import Measuring, collected

# A drained sink hides from every rank figure: value drain stands beside them.
VIEW = View("rank", ("rank", "sink"), proof=("layers", "erank"))


@collected(Measuring, without=("epsilon", "layer_rank"))
def rank(options: Measuring) -> int:
    """Effective rank: how many directions heads and layers really write to.

    Every figure stands beside its bound: no head gated before its output projection can exceed
    the width of its values, a layer can.

    \b
    Examples:
      attnprobe rank                              the packaged pair
      attnprobe rank --layer 3                    one layer in depth: its spectrum
      attnprobe rank model.pt --pre-gate
      attnprobe rank model.pt --format csv --table spectra
    """
    return measure(VIEW, options)
