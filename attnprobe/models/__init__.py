"""The project's own transformers, gated and ungated, and the files they are kept in."""

from __future__ import annotations

from attnprobe.models.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from attnprobe.models.config import GateConfig, ModelConfig
from attnprobe.models.gate import Gate
from attnprobe.models.transformer import Decoder, EncoderDecoder, build

__all__ = [
    "Checkpoint",
    "Decoder",
    "EncoderDecoder",
    "Gate",
    "GateConfig",
    "ModelConfig",
    "build",
    "load_checkpoint",
    "save_checkpoint",
]
