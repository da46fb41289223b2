"""From an attention call to numbers linear in the sequence; the n × n matrix is never held."""

from __future__ import annotations

from attnprobe.capture.call import AttentionCall
from attnprobe.engine import blocks, fused
from attnprobe.engine.stats import AttentionStats

__all__ = ["AttentionStats", "measure"]


def measure(call: AttentionCall, *, exact_max_logit: bool = False) -> AttentionStats:
    """The statistics of one call, by the faster engine where its softmax allows.

    Args:
        call: the call.
        exact_max_logit: the largest logit is wanted too, which only `blocks` comes by.
    """
    if not exact_max_logit and fused.supports(call):
        return fused.measure(call)
    return blocks.measure(call)
