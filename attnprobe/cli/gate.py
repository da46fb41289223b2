"""`attnprobe gate`."""

from __future__ import annotations

from attnprobe.cli.measuring import View, measure
from attnprobe.cli.options import Measuring, collected

VIEW = View("gate", ("gate",), table="gates", proof=("gates", "mean"))


@collected(Measuring, without=("pre_gate", "layer_rank", "epsilon"))
def gate(options: Measuring) -> int:
    """Gates: how far they are closed, on which tokens, and what could be skipped.

    A checkpoint without gates is passed over when others have them.

    \b
    Examples:
      attnprobe gate                              the gated one of the packaged pair
      attnprobe gate model.pt --layer -1          the heads of the last layer
      attnprobe gate model.pt --output gates.json --plots figures
    """
    return measure(VIEW, options)
