"""Pixels and sound as floats: from a file, or drawn as a control."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.drawn import Values
from attnprobe.inputs.shapes import second_input, value_shape
from attnprobe.subject import Subject


@dataclass(frozen=True)
class Arrays:
    """(N, …) floats of a file, as the model takes them: normalised already."""

    name: str
    values: Tensor

    def draw(self, subject: Subject) -> Values:
        if subject.reads == "tokens" and second_input(subject) is None:
            raise InputError(f"{self.name} must hold whole numbers, one sample or one sample a row")
        wanted, found = value_shape(subject), tuple(self.values.shape)
        is_sound = subject.reads == "audio"  # whose length is the user's own
        axes = [n for n in range(len(wanted)) if is_sound or n < len(wanted) - 2]
        fits = len(found) == len(wanted) + 1 and found[0] > 0
        if is_sound:
            fits = fits and (len(wanted) == 1 or any(found[1 + n] == wanted[n] for n in axes))
        else:
            fits = fits and all(found[1 + n] == wanted[n] for n in axes)
        if not fits:
            raise InputError(
                f"{self.name} has the shape {' × '.join(map(str, found))}, {subject.name} reads "
                f"N × {' × '.join(map(str, wanted))}"
            )
        if not bool(torch.isfinite(self.values).all()):
            raise InputError(f"{self.name} has values that are no finite numbers")
        return Values(self.values.float(), self.name, "arrays")


def random_values(subject: Subject, samples: int, seed: int) -> Values:
    """(samples, …) drawn from the normal distribution, which normalised input resembles."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, *value_shape(subject), generator=generator)
    what = "sound" if subject.reads == "audio" else "pixels"
    size = " × ".join(map(str, values.shape[1:]))
    return Values(values, f"{what} drawn at random, {size}", "random")
