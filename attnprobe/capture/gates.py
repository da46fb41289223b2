"""Reads the gate behind attention exactly: from the map that makes it, and only where it fits.

A `Reading` says which map holds the gate, how its features are cut and which activation they pass.
Every reading that a map's size allows is tried, and one counts only if gate ⊙ attention output is
what W_O was given, to the rounding of its type. So a family is known by how it is built, a copy
under another name too, and a gate that is not understood is none rather than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnprobe.capture.around import GATE, Ran
from attnprobe.capture.call import Gate, Site
from attnprobe.capture.projection import compare_gate, same_as

ONLY_A_NORM = "no gate: a norm stands between the attention output and W_O, and nothing else"
A_NORM = "a norm, and no gate that could be read, stands between the attention output and W_O"
AMBIGUOUS = "several gates would fit what little of the attention output is not 0"
MOVED = "its gate was offloaded before it could be read: load the model without offloading"
NOTHING = "the attention output is 0 everywhere, which tells nothing of a gate"
PLAIN = re.compile(r"^(to_|linear_|w)?(q|k|v|query|key|value)(_proj|_lin|_linear)?$")
TRIED = 16  # tokens on which readings are tried before one is verified on all
CHUNK = 2048  # tokens verified at a time

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "half-sigmoid": lambda x: 0.5 + 0.5 * torch.sigmoid(x),
    "double-sigmoid": lambda x: 2 * torch.sigmoid(x),
    "identity": lambda x: x,
}


def _bias_of_head(module: Any, logits: Tensor) -> Tensor:
    """Beam: one bias a head."""
    bias: Tensor = module.gate_bias
    return logits + bias.view(1, 1, -1, 1)


def _squared_scale(module: Any, logits: Tensor) -> Tensor:
    """Dory: every channel times (s_gate · s_gate_scale)²."""
    scale: Tensor = (module.s_gate * module.s_gate_scale).square()
    return logits * scale.view(1, 1, *logits.shape[2:])


# What the attention module does to a gate's logits (B, T, H, d) before the activation, by the name
# of its parameter; in the model's own type, for it rounds there.
ADJUSTMENTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "": lambda module, logits: logits,
    "gate_bias": _bias_of_head,
    "s_gate": _squared_scale,
}
# The parameter whose tanh multiplies what W_O gave, by the class of the module that holds it.
TANH_BEHIND_PROJECTION = {
    "MllamaCrossAttentionDecoderLayer": "cross_attn_attn_gate",
    "IdeficsGatedCrossAttentionLayer": "alpha_cross_attn",
    "EvollaSequenceAlignerCrossAttention": "gate_attention",
}


@dataclass(frozen=True)
class Cut:
    """Which features of a map are the gate.

    Attributes:
        groups: into how many equal parts the features fall: heads, or heads that share keys.
        start, size: the place of the gate in each part.
        shape: (H | 1, d_v | 1) of the gate.
    """

    groups: int
    start: int
    size: int
    shape: tuple[int, int]

    def of(self, made: Tensor) -> Tensor:
        """(B, T, width) to (B, T, H | 1, d_v | 1)."""
        parts = made.unflatten(-1, (self.groups, -1))
        chosen = parts[..., self.start : self.start + self.size]
        return chosen.reshape(*made.shape[:-1], *self.shape)


@dataclass(frozen=True)
class Heads:
    """The sizes of a call: B, T, H and the widths of its queries and values."""

    batch: int
    length: int
    count: int
    query_width: int
    width: int

    @classmethod
    def of(cls, query: Tensor, output: Tensor) -> Heads:
        """Of the query (B, H, T, d_k) and output (B, H, T, d_v) of a call."""
        batch, count, length, width = output.shape
        return cls(batch, length, count, query.shape[-1] or width, width)

    def cuts(self, width: int) -> Iterator[Cut]:
        """Every place in which a map of so many features could hold a gate.

        A map of its own (for every element, every head, or shared by all heads); or a part of the
        map that makes the queries: over all heads, within each, or within heads that share keys.
        """
        for each in dict.fromkeys((self.width, 1)):
            size, shape = self.count * each, (self.count, each)
            if width == size:
                yield Cut(1, 0, size, shape)
            if width == each and self.count > 1:
                yield Cut(1, 0, each, (1, each))
            if width < self.count * self.query_width + size:
                continue
            for groups in range(1, self.count + 1):
                if self.count % groups or width % groups:
                    continue
                part, room = size // groups, width // groups
                behind = self.count * self.query_width // groups
                for start in dict.fromkeys((room - part, behind, 0)):
                    if start + part <= room:
                        yield Cut(groups, start, part, shape)

    def tokens(self, made: Tensor) -> Tensor | None:
        """What a map gave as (B, T, width), or None if it has no row for every token."""
        width = made.shape[-1] if made.dim() > 1 else 0
        if not width or made.numel() != self.batch * self.length * width:
            return None
        if made.shape[:2] == (self.length, self.batch) and self.length != self.batch:
            made = made.transpose(0, 1)
        return made.reshape(self.batch, self.length, width)

    def layouts(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor as large as the output in every order it could have, as (B, T, H, d_v)."""
        batch, length, count, width = self.batch, self.length, self.count, self.width
        if tensor.numel() != batch * length * count * width:
            return
        if tensor.shape == (batch, count, length, width):
            yield tensor.transpose(1, 2)
        if tensor.dim() == 3 and tensor.shape[:2] == (length, batch):
            yield tensor.transpose(0, 1).reshape(batch, length, count, width)
        if tensor.shape[0] in (batch, batch * length):
            yield tensor.reshape(batch, length, count, width)


@dataclass(frozen=True)
class Reading:
    """How a gate is made: by the map at a path, a cut, an adjustment and an activation."""

    path: str
    cut: Cut
    adjustment: str
    activation: str


@dataclass(frozen=True, eq=False)
class _Source:
    """What may hold a gate: (B | 1, T | 1, width) of a map or a parameter."""

    path: str
    made: Tensor
    activation: str | None  # that it has passed already
    is_parameter: bool = False

    def read(self, module: nn.Module, reading: Reading, made: Tensor | None = None) -> Tensor:
        """(B, T, H | 1, d_v | 1) the gate by a reading, at least float32; of some tokens only if
        `made` is given."""
        logits = reading.cut.of(self.made if made is None else made)
        logits = ADJUSTMENTS[reading.adjustment](module, logits)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.activation else ACTIVATIONS[reading.activation](logits)

    def readings(self, module: nn.Module, heads: Heads) -> Iterator[Reading]:
        for cut in heads.cuts(self.made.shape[-1]):
            for adjustment in ADJUSTMENTS:
                if adjustment and (cut.shape[0] == 1 or not _is_here(module, adjustment)):
                    continue
                for activation in (self.activation,) if self.activation else ACTIVATIONS:
                    yield Reading(self.path, cut, adjustment, activation)


class GateReader:
    """Reads the gates of one model; what held at a site is tried first the next time."""

    def __init__(self) -> None:
        self._known: dict[Site, Reading] = {}

    def read(
        self,
        site: Site,
        module: nn.Module,
        around: list[Ran],
        query: Tensor,
        output: Tensor,
        consumed: Tensor,
        real: Tensor,
    ) -> Gate | str | None:
        """The gate of one call, None if there is none, or why it is unknown.

        Args:
            site: of the call.
            module: in which it was made.
            around: what ran around it.
            query: (B, H, T, d_k) of the call.
            output: (B, H, T, d_v) what it gave.
            consumed: (B, T, H, d_v) what W_O was given.
            real: (B, T) the tokens that are measured.
        """
        known = self._known.get(site)
        is_same = same_as(consumed, output)
        if known is None and is_same and bool(output.any()):
            return None
        heads = Heads.of(query, output)
        sources = list(_sources(module, around, heads))
        pairs = list(_pairs(around, heads, output, consumed))
        for source in sources:
            if known is not None and source.path == known.path:
                values = source.read(module, known)
                if any(_misfit(values, source, *pair) is not None for pair in pairs):
                    return _gate(source, known, values, heads)
        if is_same:
            return NOTHING if sources and not bool(output.any()) else None
        for before, after in pairs:
            found = _search(module, sources, heads, before, after)
            if isinstance(found, str):
                return found
            if found is not None:
                source, reading = found
                self._known[site] = reading
                return _gate(source, reading, source.read(module, reading), heads)
        norms = [part for part in around if part.late and part.is_norm]
        if any(_makes(norm, output, consumed, heads) for norm in norms):
            return ONLY_A_NORM
        if any(norm.inputs[0].numel() == output.numel() for norm in norms):
            return A_NORM
        return compare_gate(consumed, output, real)


def fits(part: Ran, query: Tensor, output: Tensor) -> bool:
    """Whether what ran before a call could hold its gate, by its width and its name."""
    heads = Heads.of(query, output)
    if part.output is None or part.output.dim() < 2:
        return False
    width = part.output.shape[-1]
    if PLAIN.match(part.name) and width <= heads.count * heads.query_width:
        return False
    return next(heads.cuts(width), None) is not None


def _is_here(module: nn.Module, name: str) -> bool:
    """Whether a module has a parameter, and it was not moved away behind the forward pass."""
    parameter = getattr(module, name, None)
    return parameter is not None and not parameter.is_meta


def gate_behind(module: nn.Module) -> Gate | str | None:
    """The tanh gate that a module of a known class puts behind W_O, or why it is unknown."""
    name = TANH_BEHIND_PROJECTION.get(type(module).__name__)
    if name is None:
        return None
    if not _is_here(module, name):
        return MOVED
    values = getattr(module, name).detach().tanh().reshape(1, 1, -1)  # (1, 1, d_model | 1)
    return Gate(
        values=values,
        position="G5",
        granularity="head" if values.shape[-1] == 1 else "element",
        source="input-independent",
        activation="tanh",
    )


def _gate(source: _Source, reading: Reading, values: Tensor, heads: Heads) -> Gate:
    shape = reading.cut.shape
    granularity = "head" if shape[1] == 1 else "element"
    return Gate(
        values=values,
        position="G1",
        granularity="head-shared" if shape[0] < heads.count else granularity,
        source="input-independent" if source.is_parameter else "query",
        activation=reading.activation,
    )


def _sources(module: nn.Module, around: list[Ran], heads: Heads) -> Iterator[_Source]:
    """What may hold the gate, what is called a gate first."""
    for part in sorted(around, key=lambda part: GATE.search(part.name) is None):
        made = None if part.output is None else heads.tokens(part.output)
        if made is not None and next(heads.cuts(made.shape[-1]), None) is not None:
            yield _Source(part.path, made, part.activation)
    for name, parameter in module.named_parameters(recurse=False):
        if GATE.search(name) and not parameter.is_meta:
            yield _Source(name, parameter.detach().reshape(1, 1, -1), None, is_parameter=True)


def _pairs(
    around: list[Ran], heads: Heads, output: Tensor, consumed: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a gate may have been applied to and what came of it, (B, T, H, d_v) each.

    Before it the attention output, or what a module made of it; behind it what W_O was given, or
    what a module (a norm) was given that made W_O's input of it.
    """
    late = [part for part in around if part.late]
    befores, afters = [output.transpose(1, 2)], [consumed]
    for part in late:
        if part.output is not None and part.output.data_ptr() == consumed.data_ptr():
            afters += [x for given in part.inputs for x in heads.layouts(given)]
        for tensor in (*part.inputs, *(() if part.output is None else (part.output,))):
            befores += heads.layouts(tensor)
    seen = set()
    for after in afters:
        for before in befores:
            name = (*_address(before), *_address(after))
            if name not in seen and before.data_ptr() != after.data_ptr():
                seen.add(name)
                yield before, after


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride()


def _search(
    module: nn.Module, sources: list[_Source], heads: Heads, before: Tensor, after: Tensor
) -> tuple[_Source, Reading] | str | None:
    """The reading that fits best, None if none fits, or why it cannot be told."""
    rows = before.flatten(0, 1)  # (B·T, H, d_v)
    told = (rows != 0).flatten(1).any(1) & rows.isfinite().flatten(1).all(1)
    chosen = told.nonzero().flatten()
    if not len(chosen):
        return None
    chosen = chosen[torch.linspace(0, len(chosen) - 1, min(TRIED, len(chosen))).long()]

    def of_chosen(x: Tensor) -> Tensor:  # (1, n, …)
        whole = x.expand(heads.batch, heads.length, *x.shape[2:])
        return whole.flatten(0, 1)[chosen.to(x.device)][None]

    some_before, some_after = of_chosen(before), of_chosen(after)
    found: list[tuple[float, _Source, Reading, Tensor]] = []
    for source in sources:
        some = of_chosen(source.made)
        for reading in source.readings(module, heads):
            values = source.read(module, reading, some)
            misfit = _misfit(values, source, some_before, some_after)
            if misfit is not None:
                found.append((misfit, source, reading, values))
    found.sort(key=lambda entry: entry[0])
    for misfit, source, reading, values in found:
        if _misfit(source.read(module, reading), source, before, after) is None:
            continue
        for other, _, _, others in found:
            if other == misfit and not torch.equal(values + 0 * others, others + 0 * values):
                return AMBIGUOUS
        return source, reading
    return None


def _misfit(values: Tensor, source: _Source, before: Tensor, after: Tensor) -> float | None:
    """Mean relative error of values ⊙ before against after, None where it is more than rounding.

    Args:
        values: (B | 1, T | 1, H | 1, d_v | 1) a gate.
        before: (B, T, H, d_v) what it may have been applied to.
        after: (B, T, H, d_v) what came of it.
    """
    coarse = max((source.made, before, after), key=lambda x: torch.finfo(x.dtype).eps).dtype
    relative = max(8e-6, 4 * torch.finfo(coarse).eps)
    floor = torch.finfo(coarse).smallest_normal
    total, count = 0.0, 0
    values = values.expand(*before.shape[:2], *values.shape[2:])
    for start in range(0, before.shape[1], CHUNK):
        here = slice(start, start + CHUNK)
        given = before[:, here].to(values.dtype)
        gated = given * values[:, here]
        error = (after[:, here].to(values.dtype) - gated).abs()
        told = given.isfinite()
        if bool((told & ~(error <= relative * gated.abs() + floor * (1 + given.abs()))).any()):
            return None
        total += float((error / (gated.abs() + floor)).where(told, torch.zeros_like(error)).sum())
        count += int(told.sum())
    return total / count if count else None


def _makes(norm: Ran, output: Tensor, consumed: Tensor, heads: Heads) -> bool:
    """Whether a module was given the attention output and gave what W_O was given."""
    if norm.output is None or norm.output.data_ptr() != consumed.data_ptr():
        return False
    return any(same_as(given, output) for given in heads.layouts(norm.inputs[0]))
