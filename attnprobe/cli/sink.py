"""`attnprobe sink`."""

from __future__ import annotations

from attnprobe.cli.measuring import View, measure
from attnprobe.cli.options import Measuring, collected

VIEW = View("sink", ("sink",), proof=("layers", "f_attr"))


@collected(Measuring, without=("pre_gate", "layer_rank"))
def sink(options: Measuring) -> int:
    """Attention sinks: how much attention the first token gets, and which other tokens get much.

    F-Attr, the share of attention on the first token, stands beside the floor that length and mask
    alone give; a sink whose value is drained is a head that does nothing.

    \b
    Examples:
      attnprobe sink                              the packaged pair
      attnprobe sink model.pt --layer 3           its heads one by one
      attnprobe sink model.pt --text-file book.txt --length 512 --samples 16
      attnprobe sink model.pt --text "To be, or not to be" --no-bos
      attnprobe sink a.pt b.pt --format csv --table heads
    """
    return measure(VIEW, options)
