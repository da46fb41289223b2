"""A call that waits until its surroundings are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from attnprobe.capture.around import Ran
from attnprobe.capture.call import Gate, Site
from attnprobe.capture.raw import RawCall
from attnprobe.capture.segments import joined, stacked
from attnprobe.capture.trace import Frame


@dataclass(eq=False)
class Pending:
    """A call and what is known of its surroundings so far."""

    raw: RawCall
    given: RawCall  # before its rows were taken apart
    site: Site
    frame: Frame
    scope: str  # path of the parent, where the search for W_O ends
    versions: tuple[int, ...]
    was_folded: bool  # B·H rows with one head each, taken apart again
    consumed: Tensor | None = None
    weight: Tensor | None = None
    around: list[Ran] = field(default_factory=list)
    holders: tuple[nn.Module, ...] = ()  # its module and the one around
    gates: list[Gate] = field(default_factory=list)
    read_twice: bool = False
    pieces: list[RawCall] = field(default_factory=list)  # as they came, until they are joined
    samples: int | None = None  # how many pieces are a text, where each is the heads of a sample

    def __post_init__(self) -> None:
        self.pieces.append(self.given)

    def join(self) -> None:
        """Makes one call of the pieces that came one by one."""
        if len(self.pieces) > 1:
            are_samples = len(self.pieces) == self.samples
            self.raw = stacked(self.pieces) if are_samples else joined(self.pieces)
            self.was_folded = False
            self.versions = versions_of(self.raw)
            self.pieces = [self.raw]


def versions_of(raw: RawCall) -> tuple[int, ...]:
    """How often the tensors of a call were written to; those of inference mode keep no count."""
    tensors = [raw.query, raw.key, raw.value, raw.output]
    if raw.is_matrix and raw.mask.dense is not None:
        tensors.append(raw.mask.dense)
    return tuple(t._version if not t.is_inference() else 0 for t in tensors)
