"""Pixels and sound as floats: from a file, or drawn as a control."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.drawn import FEWEST_SAMPLES, Values
from attnprobe.inputs.shapes import second_input, sizes, value_shape
from attnprobe.subject import Subject

DEFAULT_VALUES = 2**22  # pixels and the like in all: 16 images of 224 × 224 in three colours


@dataclass(frozen=True)
class Arrays:
    """(N, …) floats of a file, as the model takes them: normalised already."""

    name: str
    values: Tensor

    def draw(self, subject: Subject) -> Values:
        if subject.reads == "tokens" and second_input(subject) is None:
            raise InputError(f"{self.name} must hold whole numbers, one sample or one sample a row")
        self._check(subject)
        if not bool(torch.isfinite(self.values).all()):
            raise InputError(f"{self.name} has values that are no finite numbers")
        kwargs = {}
        grows = "interpolate_pos_encoding" in inspect.signature(subject.model.forward).parameters
        if grows and tuple(self.values.shape[-2:]) != value_shape(subject)[-2:]:
            kwargs = {"interpolate_pos_encoding": True}  # images of another size than in training
        return Values(self.values.float(), self.name, "arrays", kwargs)

    def _check(self, subject: Subject) -> None:
        """Channels and dimensions; sizes are a model's own business, and sound may have any."""
        if subject.reads not in ("tokens", "image", "audio"):
            return
        wanted, found = value_shape(subject), tuple(self.values.shape)
        fits = len(found) == len(wanted) + 1 and 0 not in found
        own = found[1:]
        if subject.reads == "audio":
            fits = fits and (len(own) == 1 or any(a == b for a, b in zip(own, wanted, strict=True)))
        else:
            fits = fits and own[:-2] == wanted[:-2]
        if not fits:
            raise InputError(
                f"{self.name} has the shape {sizes(found)}, {subject.name} reads "
                f"N × {sizes(wanted)}"
            )


def default_count(subject: Subject) -> int:
    """How many are drawn where nothing is said: fewer of films, which are large."""
    return min(FEWEST_SAMPLES, max(2, DEFAULT_VALUES // math.prod(value_shape(subject))))


def random_values(subject: Subject, samples: int, seed: int) -> Values:
    """(samples, …) drawn from the normal distribution, which normalised input resembles."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, *value_shape(subject), generator=generator)
    what = "sound" if subject.reads == "audio" else "pixels"
    return Values(values, f"{what} drawn at random, {sizes(tuple(values.shape[1:]))}", "random")
