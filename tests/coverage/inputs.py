"""What each type is shown: samples without padding, padded on the right and padded on the left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sizes import PATCH, VOCABULARY, WIDTH
from torch import Tensor, nn
from zoo import Drafter, pixels

LENGTH, SHORT = 24, 15
DECODER_LENGTH, DECODER_SHORT = 20, 11


@dataclass
class Case:
    """One batch.

    Attributes:
        tokens: the first input.
        options: what else the scan is given.
        streams: (B, T) True at real tokens, by their length T.
    """

    tokens: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    streams: dict[int, Tensor] = field(default_factory=dict)

    def real(self, batch: int, length: int) -> Tensor:
        """(B, T) True at the real ones of a call's queries or keys; all of what is no stream."""
        stream = self.streams.get(length)
        if stream is None or len(stream) != batch:
            return torch.ones(batch, length, dtype=torch.bool)
        return stream


def cases(task: str, model: nn.Module) -> tuple[Case, Case]:
    """A batch of three samples, and the second of them alone.

    The third sample is the second one again, padded on the left instead of the right. An image has
    no padding: there the batch is two images, and the first of them alone.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, Drafter):
        states = torch.randn(2, 1, 2 * WIDTH, generator=generator)  # one step
        return Case(states), Case(states[:1])
    if getattr(model.config, "model_type", "") == "imagegpt":  # of pixels that are tokens
        colours = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        return Case(colours), Case(colours[:1])
    if getattr(model.config, "model_type", "") == "siglip2":
        patches = torch.randn(2, 16, 3 * PATCH * PATCH, generator=generator)
        shapes = torch.full((2, 2), 4)
        options = {"pixel_attention_mask": torch.ones(2, 16), "spatial_shapes": shapes}
        first = {name: value[:1] for name, value in options.items()}
        return Case(patches, options), Case(patches[:1], first)
    if task == "image":
        images = torch.randn(2, 3, pixels(model), pixels(model), generator=generator)
        return Case(images), Case(images[:1])
    fill = getattr(model.config, "pad_token_id", None) or 0
    whole, mask = _text(LENGTH, SHORT, fill, generator)
    padded = Case(whole, {"attention_mask": mask}, {LENGTH: mask.bool()})
    alone = Case(whole[1:2, :SHORT])
    if task == "seq2seq":
        target, seen = _text(DECODER_LENGTH, DECODER_SHORT, fill, generator)
        padded.options |= {"decoder_input_ids": target, "decoder_attention_mask": seen}
        padded.streams[DECODER_LENGTH] = seen.bool()
        alone.options["decoder_input_ids"] = target[1:2, :DECODER_SHORT]
    return padded, alone


def _text(length: int, short: int, fill: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(3, T) tokens and their mask."""
    tokens = torch.randint(10, VOCABULARY - 10, (3, length), generator=generator)
    tokens[2, -short:] = tokens[1, :short]
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, short:] = 0
    mask[2, :-short] = 0
    return tokens.masked_fill(mask == 0, fill), mask
