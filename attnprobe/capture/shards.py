"""Attention whose heads are split over processes, made whole before anything is told of it.

Under tensor parallelism every process attends with heads of its own, and W_O, whose columns lie
beside them, sums over all. Which heads a process holds is read from W_O's parameter, which knows
its whole shape and how it is cut. Every process makes the same whole call of the parts and goes on
as if it were alone. What they do next they agree on before each gathering, call by call, so that
none waits for what the others never send.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnprobe.capture.call import AttentionCall, Gate, Projection, Site
from attnprobe.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WHOLE, PART = "whole", "part"
UNKNOWN = "its heads are split over processes, and which of them are here W_O does not tell"
UNEVEN = "its heads are split over processes unevenly, or seen differently there"
COPIED = "its keys are the same in several processes: which heads share which cannot be told"
BY_HEAD = "its mask is a rule that differs by head, of which each process knows its own part"
OTHER_GATES = "what is read of its gate differs between the processes"
ADRIFT = "the processes of the model do not run the same pass: give all the same tokens and options"


@dataclass(frozen=True)
class _Part:
    """What a process says of its part of a call.

    Attributes:
        path: of the site.
        kind: WHOLE where it holds all heads, PART, or why that cannot be told.
        shapes: of the tensors that are put together.
        gate: all of it but the values; None where there is none.
        reasons: of the call.
    """

    path: str
    kind: str
    shapes: tuple[Any, ...]
    gate: tuple[Any, ...] | None
    reasons: dict[str, str]


class Shards:
    """Makes the calls of one model whole.

    Args:
        model: split over processes, each of which runs it on the same tokens.
        split: its parameters that are cut along what they read, W_O's among them.
    """

    def __init__(self, model: nn.Module, split: list[DTensor]) -> None:
        self.model = model
        self._split = {p.to_local().data_ptr(): p for p in split if p.to_local().numel()}
        self._plain = {p.data_ptr() for p in model.parameters() if not _is_split(p)}
        self._tells = any(map(_is_split, model.parameters()))
        self._group = split[0].device_mesh.get_group() if split else None
        self._projections: dict[tuple[Site, int], Projection] = {}

    @classmethod
    def of(cls, model: nn.Module) -> Shards | None:
        """None for a model that is whole in this process."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        split: list[Any] = [p for p in model.parameters() if _is_split(p) and _reads_part(p)]
        is_split = bool(split) or (getattr(model, "tp_size", None) or 1) > 1  # of transformers
        if len({p.device_mesh for p in split}) > 1:
            split = []  # whose parts lie with whom is not known
        return cls(model, split) if is_split else None

    def agree(self, digest: str) -> None:
        """Makes sure that all processes are given the same input.

        Raises:
            InputError: they are not.
        """
        if self._group is not None and len(set(self._told(digest))) > 1:
            raise InputError(ADRIFT)

    def whole(self, call: AttentionCall) -> AttentionCall:
        """The call with the heads of all processes; every one of them must make it.

        Where they cannot be put together the reason is in `reasons["all"]`.

        Raises:
            InputError: the processes are at different calls.
        """
        if self._group is None:
            kind = self._kind(call)
            return call if kind == WHOLE else _refused(call, {**call.reasons, "all": kind})
        parts: list[_Part] = self._told(self._part(call))
        if len({part.path for part in parts}) > 1:
            raise InputError(ADRIFT)
        reasons: dict[str, str] = {}
        for part in reversed(parts):
            reasons |= part.reasons
        kinds = {part.kind for part in parts}
        if unknown := kinds - {WHOLE, PART}:
            reasons.setdefault("all", min(unknown))
        elif len(kinds) > 1 or len({part.shapes for part in parts}) > 1:
            reasons.setdefault("all", UNEVEN)
        if "all" in reasons:
            return _refused(call, reasons)
        if kinds == {PART}:
            same_gates = len({part.gate for part in parts}) == 1
            call = self._joined(replace(call, reasons=reasons), same_gates)
        return replace(call, projection=self._projection(call))

    def _part(self, call: AttentionCall) -> _Part:
        tensors = (call.query, call.key, call.value, call.output, call.consumed, call.sinks)
        dense, gate = call.mask.dense, call.gate
        shapes = tuple(None if x is None else tuple(x.shape) for x in (*tensors, dense))
        told = None
        if gate is not None:
            about = (gate.position, gate.granularity, gate.source, gate.activation, gate.mode)
            told = (*about, tuple(gate.values.shape))
        return _Part(call.site.path, self._kind(call), shapes, told, call.reasons)

    def _kind(self, call: AttentionCall) -> str:
        """WHOLE, PART, or why it cannot be told which."""
        if not self._tells:
            return UNKNOWN  # an older library cuts parameters that do not know of it
        scope = self.model.get_submodule(call.site.path.partition("#")[0].rpartition(".")[0])
        if not any(map(_is_split, scope.parameters())):
            return WHOLE  # nothing around it is split
        if call.projection is None or call.consumed is None:
            return UNKNOWN
        place = call.projection.weight.data_ptr()
        held = self._split.get(place)
        if held is None:
            return WHOLE if place in self._plain else UNKNOWN
        width = call.consumed.shape[-2] * call.consumed.shape[-1]
        if width == held.shape[1]:
            return WHOLE
        if width != held.to_local().shape[1]:
            return UNKNOWN
        return BY_HEAD if call.mask.rule_heads > 1 else PART

    def _projection(self, call: AttentionCall) -> Projection | None:
        """W_O with the columns of all heads; gathered once."""
        known = call.projection
        held = None if known is None else self._split.get(known.weight.data_ptr())
        if known is None or held is None:
            return known
        name = (call.site, known.weight.data_ptr())
        if name not in self._projections:
            self._projections[name] = Projection(held.full_tensor().detach(), call.heads)
        return self._projections[name]

    def _joined(self, call: AttentionCall, same_gates: bool) -> AttentionCall:
        """The parts of a call put together, head by head in the order of the processes."""
        heads = call.heads
        reasons = dict(call.reasons)
        keys, values = self._shares(call.key), self._shares(call.value)
        if _are_equal(keys) and _are_equal(values):
            # every process has the keys of all heads, whose groups then are no longer in order
            if call.key.shape[1] > 1:
                reasons["all"] = COPIED
            keys, values = keys[:1], values[:1]
        gate = call.gate
        if gate is not None or not same_gates:
            gate = self._gate(gate, heads) if gate is not None and same_gates else None
            if gate is None:
                reasons["gate"] = OTHER_GATES
        mask, sinks = call.mask, call.sinks
        if mask.dense is not None and mask.dense.shape[1] == heads:
            mask = replace(mask, dense=self._by_head(mask.dense, 1))
        if sinks is not None:
            sinks = self._by_head(sinks.expand(-1, heads, -1), 1)
        assert call.consumed is not None
        return replace(
            call,
            query=self._by_head(call.query, 1),
            key=torch.cat(keys, 1),
            value=torch.cat(values, 1),
            output=self._by_head(call.output, 1),
            consumed=self._by_head(call.consumed, 2),
            mask=mask,
            sinks=sinks,
            gate=gate,
            reasons=reasons,
        )

    def _gate(self, gate: Gate, heads: int) -> Gate | None:
        """The gate of all heads, None where its shared values are not the same everywhere."""
        if gate.position == "G5" or gate.values.dim() < 4:
            parts = self._shares(gate.values)
            return gate if _are_equal(parts) else None
        if gate.values.shape[2] == 1 < heads:
            return gate if _are_equal(self._shares(gate.values)) else None
        return replace(gate, values=self._by_head(gate.values, 2))

    # what is sent

    def _by_head(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._shares(tensor), dim)

    def _shares(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, which all have the same shape."""
        count = dist.get_world_size(self._group)
        shares = [tensor.new_empty(tensor.shape) for _ in range(count)]
        if tensor.numel():  # of a matrix that the model wrote out itself there is no query
            dist.all_gather(shares, tensor.contiguous(), group=self._group)
        return shares

    def _told(self, said: Any) -> list[Any]:
        """What every process says."""
        heard: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(heard, said, group=self._group)
        return heard


def _refused(call: AttentionCall, reasons: dict[str, str]) -> AttentionCall:
    return replace(call, projection=None, consumed=None, gate=None, reasons=reasons)


def _are_equal(shares: list[Tensor]) -> bool:
    return all(torch.equal(shares[0], share) for share in shares[1:])


def _is_split(parameter: Tensor) -> bool:
    """Whether processes hold parts of a parameter, as a DTensor says."""
    placements = getattr(parameter, "placements", ())
    return any(not placement.is_replicate() for placement in placements)


def _reads_part(parameter: Any) -> bool:
    """Whether a parameter is that of a linear map whose process reads a part of its input."""
    if parameter.dim() != 2 or len(parameter.placements) != 1:
        return False
    (placement,) = parameter.placements
    return type(placement).__name__ == "Shard" and placement.dim % 2 == 1
