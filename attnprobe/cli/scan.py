"""`attnprobe scan`."""

from __future__ import annotations

from attnprobe.cli.measuring import View, measure
from attnprobe.cli.options import Measuring, collected

VIEW = View("scan", None)


@collected(Measuring)
def scan(options: Measuring) -> int:
    """Everything in one pass: sinks, entropy, rank, gates, massive activations and perplexity.

    \b
    Examples:
      attnprobe scan                              the packaged pair, side by side
      attnprobe scan model.pt --output results.json --output heads.csv --table heads
      attnprobe scan runs/checkpoint-500 org/name --device auto --dtype bfloat16
      attnprobe scan runs/ --quiet --format json > results.json
      attnprobe scan weights.pt --model-config shape.json --tokens ids.npy
      cat book.txt | attnprobe scan model.pt --text-file - --length 256
    """
    return measure(VIEW, options)
