"""The matrix of a softmax and the logits that it was made of, in whatever layout it goes on.

The logits are held until the matrix meets its values, or as long as the model holds the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.masks import HIDDEN

OLD_STYLE = -1e4  # what models of 2018 add to hide a key


@dataclass(eq=False)
class Softmax:
    """A softmax that was seen, and whether its product with values was too.

    Attributes:
        path: of the module that ran it.
        n_queries, n_keys: its last two dimensions.
        of_scores: whether it was given a batch of products of two activations.
        is_other: it was none: scores met values without one, or through its logarithm.
    """

    path: str
    n_queries: int
    n_keys: int
    of_scores: bool
    is_other: bool = False
    was_read: bool = False


@dataclass(frozen=True, eq=False)
class _Step:
    """A change of layout, to be made of the logits too."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dropped: tuple[int, int] | None = None  # (dimension, first kept key) where keys are cut off

    def of(self, tensor: Tensor) -> Tensor:
        func = _RESHAPES.get(self.func, self.func)  # the logits may lie otherwise in memory
        result = func(tensor, *self.args, **self.kwargs)
        assert isinstance(result, Tensor)
        return result


_RESHAPES: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.view: Tensor.reshape,
    Tensor.view_as: Tensor.reshape_as,
}


@dataclass(frozen=True, eq=False)
class Matrix:
    """The attention matrix of a softmax, or the same in another layout.

    Attributes:
        held: the logits as the softmax was given them; nothing once they were handed on.
        changes: how often logits and matrix had been written to.
        key: the dimension of the keys.
        steps: from the layout of the softmax to this one.
    """

    softmax: Softmax
    held: list[Tensor]
    changes: tuple[int, int]
    key: int
    steps: tuple[_Step, ...] = ()
    problem: str | None = None


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; those of inference mode keep no count."""
    return 0 if tensor.is_inference() else tensor._version


def moved(
    matrix: Matrix,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Tensor,
) -> Matrix | None:
    """The matrix in another layout, None if its keys are no dimension of their own any more.

    Where the keys went is asked of a tensor without memory, by the stride that is theirs.
    """
    probe = torch.empty(source.shape, device="meta")
    n_keys, stride = source.shape[matrix.key], probe.stride(matrix.key)
    try:
        result = func(probe, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    fits = [d for d, s in enumerate(result.shape) if result.stride(d) == stride and 1 < s <= n_keys]
    if n_keys < 2 or not fits:
        return None
    key = fits[0]
    step = _Step(func, args, kwargs)
    if result.shape[key] < n_keys:
        first, rest = divmod(result.storage_offset(), stride)
        if rest or result.numel() * n_keys != probe.numel() * result.shape[key]:
            return None
        step = replace(step, dropped=(matrix.key, first))
    elif func in _SLICES and result.numel() != probe.numel():
        return None  # some queries, heads or samples only
    return replace(matrix, key=key, steps=(*matrix.steps, step))


_SLICES = {Tensor.__getitem__, Tensor.narrow, torch.narrow}


def laid_out(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """The logits in the layout of the matrix, and like them those of keys that were cut off."""
    sinks: Tensor | None = None
    (logits,) = matrix.held
    for step in matrix.steps:
        before, logits = logits, step.of(logits)
        sinks = None if sinks is None else step.of(sinks)
        if step.dropped is not None:
            dim, first = step.dropped
            kept = logits.numel() * before.shape[dim] // before.numel()
            parts = before.split([first, kept, before.shape[dim] - first - kept], dim)
            dropped = torch.cat([parts[0], parts[2]], dim)
            own = dropped.to(torch.promote_types(logits.dtype, torch.float32))
            own = own.logsumexp(dim, keepdim=True).expand(parts[1].shape)
            sinks = own if sinks is None else torch.logaddexp(sinks, own)
    return logits, sinks


def same(source: Tensor, result: Tensor, matrix: Matrix) -> bool:
    """Whether a result is the matrix it was made of, but for what it holds at hidden keys."""
    if result.shape != source.shape or result.dtype != source.dtype:
        return False
    if torch.equal(source, result):
        return True
    logits, _ = laid_out(matrix)
    return bool(((source == result) | is_hidden(logits)).all())


def is_hidden(logits: Tensor) -> Tensor:
    """True where a logit is so low that it hides its key."""
    return logits <= max(HIDDEN, torch.finfo(logits.dtype).min / 2)


def still(weights: Tensor, logits: Tensor, sinks: Tensor | None, key: int) -> bool:
    """Whether a matrix that was written to is still the softmax of its logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = logits.to(wide).logsumexp(key, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.narrow(key, 0, 1))
    again = (logits.to(wide) - total).exp()
    exact = 1e-5 if weights.dtype in (torch.float32, torch.float64) else 1e-2
    close = (again - weights).abs() <= exact
    return bool((close | is_hidden(logits)).all())


def hiding(logits: Tensor) -> Tensor:
    """Logits whose hidden keys are told from others also where -10,000 was added to hide them.

    Logits have no hole between -4,000 and -8,000 unless a mask has torn it.
    """
    low = logits < 0.8 * OLD_STYLE
    if torch.equal(low, is_hidden(logits)):
        return logits
    if bool(((logits < 0.4 * OLD_STYLE) & ~low).any()):
        return logits
    return logits.masked_fill(low, -torch.inf)
