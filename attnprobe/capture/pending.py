"""A call that waits until its surroundings are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise, starmap

import torch
from torch import Tensor, nn

from attnprobe.capture.around import Ran
from attnprobe.capture.attend import attend
from attnprobe.capture.call import Gate, Site
from attnprobe.capture.matrix import version
from attnprobe.capture.projection import as_heads, same_as
from attnprobe.capture.raw import RawCall
from attnprobe.capture.segments import arrangements, follows, joined
from attnprobe.capture.trace import Frame

IN_PIECES = (
    "its calls are of samples or of heads one by one, and which of the two cannot be told in a "
    "batch of as many samples as heads: try another batch size"
)
CLOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
HALF = 2e-2


@dataclass(eq=False)
class Pending:
    """A call and what is known of its surroundings so far.

    What it was given must stay as it was until the call is complete. Its output may be changed in
    place on the way to W_O, as by a gate: then it is attended again.
    """

    raw: RawCall
    given: RawCall  # before its rows were taken apart
    site: Site
    frame: Frame
    scope: str  # path of the parent, where the search for W_O ends
    was_folded: bool  # B·H rows with one head each, taken apart again
    consumed: Tensor | None = None
    weight: Tensor | None = None
    around: list[Ran] = field(default_factory=list)
    holders: tuple[nn.Module, ...] = ()  # its module and the one around
    gates: list[Gate] = field(default_factory=list)
    read_twice: bool = False
    pieces: list[RawCall] = field(default_factory=list)  # as they came, until they are joined
    texts: set[tuple[int, ...]] = field(default_factory=set)  # (B, T) of texts that it may be over
    samples: int | None = None  # B, where the pieces are as long as a text

    def __post_init__(self) -> None:
        self.pieces.append(self.given)
        self._take_note()

    def _take_note(self) -> None:
        self._given = _versions(self.raw)
        self._output = version(self.raw.output)
        self._few = _few(self.raw.output).clone()

    def read(self, consumed: Tensor, weight: Tensor) -> None:
        """Takes note of what W_O is given."""
        self.consumed, self.weight = consumed, weight
        self._read_at = version(consumed)

    @property
    def is_spoilt(self) -> bool:
        """Whether something that the figures need was written over."""
        is_late = self.consumed is not None and version(self.consumed) != self._read_at
        return is_late or _versions(self.raw) != self._given

    def mend(self) -> bool:
        """Attends again if the output was written over; whether it is what the call gave."""
        raw = self.raw
        if not self._was_written_over():
            return True
        if raw.problem:
            return False
        with torch._C.DisableTorchFunction():
            output = attend(
                raw.query,
                raw.key,
                raw.value,
                raw.mask,
                scale=raw.scale,
                softcap=raw.softcap,
                sinks=raw.sinks,
            ).to(raw.output.dtype)
        self.raw = replace(raw, output=output)
        counted = raw.mask.sees_any()[:, None, :, None].expand(*output.shape[:1], 1, -1, 1)
        error = (_few(output) - self._few).abs().masked_fill(~_few(counted), 0).amax()
        allowed = CLOSE.get(output.dtype, HALF) * max(1.0, float(_few(output).abs().amax()))
        return float(error) <= allowed

    def _was_written_over(self) -> bool:
        output = self.raw.output
        if not output.is_inference():
            return output._version != self._output
        return not torch.allclose(_few(output), self._few, rtol=0, atol=0, equal_nan=True)

    def fold_again(self) -> None:
        """Leaves rows as they were given, windows of one head."""
        spoilt = self.is_spoilt or self._was_written_over()
        self.raw, self.was_folded = self.given, False
        self.pieces = [self.given]
        self._take_note()
        if spoilt:
            self._given = ()

    def join(self, input: Tensor | None = None) -> bool:
        """Makes one call of the pieces that came one by one; whether it is told which.

        Args:
            input: of a linear map, by which heads are told from samples where it is W_O; without
                one it has to be decided.
        """
        if len(self.pieces) == 1:
            return True
        found = [] if self.samples is None else arrangements(self.pieces, self.samples)
        told = [raw for raw in found if input is not None and _reads(input, raw)] or found
        if len(told) > 1 and input is not None:
            return False
        if len(told) == 1:
            self.raw = told[0]
        elif not told and all(starmap(follows, pairwise(self.pieces))):
            self.raw = joined(self.pieces)
            rows, _, length, _ = self.raw.query.shape
            if (rows, length) in self.texts:  # windows, and no documents
                self.raw = replace(self.raw, documents=None)
        else:
            self.raw = replace(self.pieces[0], problem=IN_PIECES)
        self.was_folded = False
        self._take_note()
        self.pieces = [self.raw]
        return True


def _reads(input: Tensor, raw: RawCall) -> bool:
    """Whether a linear map is given the very output of a call."""
    consumed = as_heads(input, raw.output)
    return consumed is not None and same_as(consumed, raw.output)


def _versions(raw: RawCall) -> tuple[int, ...]:
    """How often what a call was given was written to."""
    tensors = [raw.query, raw.key, raw.value]
    if raw.is_matrix and raw.mask.dense is not None:
        tensors.append(raw.mask.dense)
    return tuple(map(version, tensors))


def _few(output: Tensor) -> Tensor:
    """(B, H, 3, d_v) the first, the middle and the last query of (B, H, T, d_v)."""
    length = output.shape[2]
    return output[:, :, [0, length // 2, length - 1]]
