"""One idea a file: each metric takes attention calls, adds them up and gives rows of tables."""

from __future__ import annotations

from attnprobe.metrics.activation import Activation
from attnprobe.metrics.base import Metric, Tables
from attnprobe.metrics.entropy import Entropy
from attnprobe.metrics.gate import Gates
from attnprobe.metrics.perplexity import Perplexity
from attnprobe.metrics.rank import Rank
from attnprobe.metrics.sink import Sink

METRICS: dict[str, type[Metric]] = {
    metric.name: metric for metric in (Sink, Entropy, Rank, Gates, Activation, Perplexity)
}

__all__ = ["METRICS", "Metric", "Tables"]
