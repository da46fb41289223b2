"""`attnprobe entropy`."""

from __future__ import annotations

from attnprobe.cli.measuring import View, measure
from attnprobe.cli.options import Measuring, collected

# A collapsed head may be a sink or an induction head: the mass on the first token tells which.
VIEW = View("entropy", ("entropy", "sink"), proof=("layers", "entropy"))


@collected(Measuring, without=("pre_gate", "layer_rank", "epsilon"))
def entropy(options: Measuring) -> int:
    """Attention entropy: how widely heads look, and which have collapsed onto a single token.

    In nats, and as a share of what looking evenly at every visible token would give.

    \b
    Examples:
      attnprobe entropy                           the packaged pair
      attnprobe entropy model.pt --head 0-3
      attnprobe entropy model.pt --random-tokens --length 256
      attnprobe entropy model.pt -o entropy.md --plots figures --plot-format svg
    """
    return measure(VIEW, options)
