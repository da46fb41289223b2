"""Every softmax-attention call of a forward pass, seen once and handed on."""

from __future__ import annotations

from attnprobe.capture.call import AttentionCall, Gate, Projection, Site
from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask
from attnprobe.capture.recorder import Recorder

__all__ = ["AttentionCall", "Documents", "Gate", "Mask", "Projection", "Recorder", "Site"]
