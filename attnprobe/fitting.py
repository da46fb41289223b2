"""What is wrong with an input that a model does not run on, found by trying others.

What a model can take is in no config: how many samples of sound its convolutions swallow, how many
positions a table in its code has. Where a pass fails, the model is run by itself on the same input;
if it fails there too, the nearest size on which it runs is what the user is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnprobe.errors import InputError
from attnprobe.forward import (
    DECODER_MASK,
    DECODER_TOKENS,
    ForwardInputs,
    batch_size_for,
    device_of,
    evaluated,
)
from attnprobe.inputs import Inputs
from attnprobe.inputs.drawn import default_length
from attnprobe.inputs.shapes import sizes, value_shape
from attnprobe.loading.explaining import line
from attnprobe.subject import Subject

PATIENCE = 20.0  # seconds of trying; what ran by then is told
FIRST = ""  # the name of what the model reads first, among its other arguments


def misfit(subject: Subject, inputs: Inputs, batch_size: int | None = None) -> str | None:
    """One line on why a model does not run on an input, None if it does.

    Args:
        subject: the model.
        inputs: on which a pass failed.
        batch_size: of the pass.
    """
    device = device_of(subject.model)
    whole = ForwardInputs(inputs.tokens, inputs.attention_mask, None, dict(inputs.kwargs))
    size = batch_size or batch_size_for(whole, device)
    with evaluated(subject.model):
        for start in range(0, len(whole), size):
            batch = whole.batch(slice(start, start + size), device)
            if (error := _error(subject.model, batch)) is not None:
                return _told(subject, batch, error, str(inputs.about.get("source")))
    return None


def _told(subject: Subject, batch: ForwardInputs, error: Exception, source: str) -> str:
    one = batch.batch(slice(0, 1), batch.tokens.device)
    failing = one if _error(subject.model, one) is not None else batch
    trial = _Trial(subject.model, failing)
    parts = list(_parts(subject, failing))
    for part in parts:
        if (found := part.nearest(trial)) is not None:
            return part.told(subject.name, found)
    odd = [part for part in parts if part.what != "tokens" and part.own != part.usual]
    made = "".join(f", but was made for {p.what} of N × {sizes(p.usual)}" for p in odd)
    why = f"{type(error).__name__}: {line(error)}"
    return f"{subject.name} does not run on {source}{made} ({why})"


def _error(model: nn.Module, inputs: ForwardInputs) -> Exception | None:
    """What the model alone raises."""
    try:
        inputs.forward(model, logits=False)
    except Exception as error:  # of any kind: it is code of the model's family
        return error
    return None


def _tensors(inputs: ForwardInputs) -> dict[str, Tensor]:
    """All tensors that a model is given, by argument."""
    named = {FIRST: inputs.tokens, "attention_mask": inputs.attention_mask, **inputs.kwargs}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


@dataclass
class _Trial:
    """Runs a model on an input whose sizes are changed."""

    model: nn.Module
    inputs: ForwardInputs

    def __post_init__(self) -> None:
        self.until = time.monotonic() + PATIENCE

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def runs(self, names: tuple[str, ...], shape: Mapping[int, int]) -> bool:
        """Whether it runs where arguments have other sizes: dimension to size."""
        given = _tensors(self.inputs)
        changed = {name: _resized(given[name], shape) for name in names}
        kwargs = {**self.inputs.kwargs, **changed}
        first = kwargs.pop(FIRST, self.inputs.tokens)
        mask = kwargs.pop("attention_mask", self.inputs.attention_mask)
        return _error(self.model, ForwardInputs(first, mask, None, kwargs)) is None


def _resized(values: Tensor, shape: Mapping[int, int]) -> Tensor:
    """Cut, or begun again from its start, along some dimensions."""
    for dim, size in shape.items():
        index = torch.arange(size, device=values.device) % values.shape[dim]
        values = values.index_select(dim, index)
    return values


@dataclass(frozen=True)
class _Found:
    """A size on which the model runs.

    Attributes:
        shape: (…) of a sample.
        is_bound: whether all beyond it would do, too, as far as was tried.
    """

    shape: tuple[int, ...]
    is_bound: bool


@dataclass(frozen=True)
class _Part:
    """Arguments whose sizes go together: text and its mask, the pixels, the sound.

    Attributes:
        names: of the arguments.
        what: for messages: "tokens", "pixels", "sound".
        own: (…) sizes of a sample.
        usual: (…) sizes of one that the model was made for.
    """

    names: tuple[str, ...]
    what: str
    own: tuple[int, ...]
    usual: tuple[int, ...]

    def nearest(self, trial: _Trial) -> _Found | None:
        """The sizes nearest to the own ones on which it runs; None where these are not to blame."""
        odd = [dim for dim, (a, b) in enumerate(zip(self.own, self.usual, strict=True)) if a != b]
        shape = {dim + 1: self.usual[dim] for dim in odd}
        if not odd or not trial.runs(self.names, shape):
            return None
        is_bound = True
        for dim in odd:
            bad, good = self.own[dim], self.usual[dim]
            if trial.runs(self.names, {**shape, dim + 1: bad}):
                shape[dim + 1] = bad
                continue
            while abs(good - bad) > 1 and not trial.is_over:
                middle = (bad + good) // 2
                if trial.runs(self.names, {**shape, dim + 1: middle}):
                    good = middle
                else:
                    bad = middle
            shape[dim + 1] = good
            usual = self.usual[dim]
            far = 2 * usual if self.own[dim] < usual else max(1, usual // 2)
            if trial.is_over or not trial.runs(self.names, {**shape, dim + 1: far}):
                is_bound, shape[dim + 1] = False, good if trial.is_over else usual
        found = tuple(shape.get(dim + 1, size) for dim, size in enumerate(self.own))
        return _Found(found, is_bound)

    def told(self, name: str, found: _Found) -> str:
        """One line on what the model of that name takes."""
        is_more = math.prod(found.shape) > math.prod(self.own)
        bound = (" or more" if is_more else " or less") if found.is_bound else ""
        if self.what == "tokens":
            length, most = found.shape[0], "at least" if is_more else "at most"
            takes = f"takes {most} {length}" if found.is_bound else f"runs on {length}"
            return (
                f"a sample has {self.own[0]} tokens, {name} {takes}: use --length {length}{bound}"
            )
        return (
            f"{name} takes {self.what} of N × {sizes(found.shape)}{bound}, "
            f"not N × {sizes(self.own)}"
        )


def _parts(subject: Subject, inputs: ForwardInputs) -> Iterator[_Part]:
    """What a model reads, each with the sizes that it was made for."""
    given = _tensors(inputs)
    text = [name for name in (*DECODER_TOKENS, DECODER_MASK) if name in given]
    if inputs.is_text:
        text = [name for name in (FIRST, "attention_mask", *text) if name in given]
    for name, values in given.items():
        if not values.is_floating_point() or values.dim() < 2 or name in text:
            continue
        try:
            usual = value_shape(subject)
        except InputError:  # its config does not say
            continue
        what = "sound" if subject.reads == "audio" else "pixels"
        if len(usual) == values.dim() - 1:
            yield _Part((name,), what, tuple(values.shape[1:]), usual)
    if text:
        own = given[text[0]].shape[1]
        usual_length = default_length(subject)
        yield _Part(
            tuple(text), "tokens", (own,), (usual_length if usual_length != own else -(-own // 2),)
        )
