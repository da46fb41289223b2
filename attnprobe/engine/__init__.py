"""From an attention call to numbers linear in the sequence; the n × n matrix is never held."""

from __future__ import annotations

from attnprobe.engine.measuring import measure
from attnprobe.engine.stats import AttentionStats

__all__ = ["AttentionStats", "measure"]
