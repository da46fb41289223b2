"""Attention that a model writes out: scores, a softmax, and the product with the values.

A softmax is one of attention when what it is given was made of a product of two activations, and
its result, as it is or in another layout or dtype, is summed over its keys with values in such a
product. The path in between may scale, mask, cap or bias the scores at will: the softmax's own
input is what is measured. Only the matrix of one call is held, and only while the model holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.layouts import CASTS, DROPOUTS, LAYOUTS, LOG_SOFTMAXES, SOFTMAXES
from attnprobe.capture.linear import Weights
from attnprobe.capture.marks import Marks
from attnprobe.capture.masks import HIDDEN, Mask
from attnprobe.capture.products import Product, tensors_in
from attnprobe.capture.raw import RawCall

DROPS = "dropout is on in this call"
OVERWRITTEN = "its logits were overwritten after the softmax"
MANY = "its matrix has more dimensions than samples and heads, in which blocks cannot be told"
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
class _Matrix:
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


class Written:
    """Finds written-out attention in the calls of torch's functions.

    Args:
        weights: what is a parameter.
        place: the path of the module that runs.
    """

    def __init__(self, weights: Weights, place: Callable[[], str]) -> None:
        self.weights = weights
        self.place = place
        self.softmaxes: list[Softmax] = []
        self._scores: Marks[bool] = Marks()
        self._compared: set[tuple[str, torch.Size]] = set()  # where scores were made, their shape
        self._matrices: Marks[_Matrix] = Marks()

    def clear(self) -> None:
        """Forgets everything that was seen."""
        self.softmaxes.clear()
        self._scores.clear()
        self._compared.clear()
        self._matrices.clear()

    def saw(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        product: Product | None,
        is_linear: bool,
    ) -> RawCall | None:
        """The attention call that ends with this function, else None.

        Args:
            product: what `read_product` makes of the function.
            is_linear: it is a linear map.
        """
        if func is Tensor.__setitem__:
            if isinstance(args[-1], Tensor) and args[-1] in self._scores:
                self._scores.set(args[0], True)
            return None
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return None
        if func in SOFTMAXES:
            self._softmax(args, kwargs, result)
            return None
        if func in LOG_SOFTMAXES:
            self._other(args[0] if args else kwargs["input"])
            return None
        if product is not None:
            if is_linear or self.weights.has(product.right):
                return None
            call = self._attention(product, result)
            if call is None and product.sums:
                self._other(product.left)
                self._scores.set(result, True)
                self._compared.add((self.place(), result.shape))
            return call
        given = tensors_in(args, kwargs)
        self._follow(func, args, kwargs, given, result)
        if not is_linear and func not in _FRESH and any(x in self._scores for x in given):
            self._scores.set(result, True)
        return None

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        logits = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(logits, Tensor) or not isinstance(dim, int) or result.dim() < 2:
            return
        key = dim % result.dim()
        shape = [size for d, size in enumerate(result.shape) if d != key]
        # what torch.jit has scripted is not seen: scores may come back from it as a new tensor
        of_scores = logits in self._scores or (self.place(), logits.shape) in self._compared
        is_attention = of_scores and result.dim() > 2
        seen = Softmax(self.place(), shape[-1], result.shape[key], is_attention)
        if seen.n_keys > 1:
            self.softmaxes.append(seen)
        if is_attention and logits is not result:  # and was not written over
            changes = _version(logits), _version(result)
            self._matrices.set(result, _Matrix(seen, [logits], changes, key))

    def _other(self, scores: Tensor) -> None:
        """Takes note of scores that meet values, or are normalised, in a way not followed."""
        if scores in self._scores and scores.dim() > 2:
            shape = scores.shape[-2], scores.shape[-1]
            self.softmaxes.append(Softmax(self.place(), *shape, of_scores=False, is_other=True))

    def _follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        result: Tensor,
    ) -> None:
        """Marks what is the matrix too: in another layout or dtype, or with only zeros zeroed."""
        found = next(((x, m) for x in given if (m := self._matrices.get(x)) is not None), None)
        if found is None or result is found[0] or not found[1].held:
            return
        source, matrix = found
        own = bool(args) and args[0] is source
        if func in DROPOUTS:
            matrix = replace(matrix, problem=DROPS)  # in eval mode it gives its own input
        elif func in LAYOUTS and own:
            moved = _moved(matrix, func, args[1:], kwargs, source)
            if moved is None:
                return
            matrix = moved
        elif not (func in CASTS and own) and not _same(source, result, matrix):
            return
        changes = matrix.changes[0], _version(result)
        self._matrices.set(result, replace(matrix, changes=changes))

    def _attention(self, product: Product, result: Tensor) -> RawCall | None:
        left = product.left, product.left_letters
        right = product.right, product.right_letters
        for (weights, own), (value, others) in ((left, right), (right, left)):
            matrix = self._matrices.get(weights)
            if matrix is None or not matrix.held:
                continue
            if value in self._scores or value in self._matrices or self.weights.has(value):
                return None  # of other matrices, or no tokens' values
            call = _call(matrix, weights, own, value, others, product, result)
            if call is not None:
                matrix.softmax.was_read = True
                matrix.held.clear()
            return call
        return None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _moved(
    matrix: _Matrix,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Tensor,
) -> _Matrix | None:
    """The matrix in another layout, None if its keys are no dimension of their own any more.

    Where the keys went is asked of a tensor without memory, by the stride that is theirs.
    """
    probe = torch.empty(source.shape, device="meta")
    n_keys, stride = source.shape[matrix.key], probe.stride(matrix.key)
    try:
        moved = func(probe, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    fits = [d for d, s in enumerate(moved.shape) if moved.stride(d) == stride and 1 < s <= n_keys]
    if n_keys < 2 or not fits:
        return None
    key = fits[0]
    step = _Step(func, args, kwargs)
    if moved.shape[key] < n_keys:
        first, rest = divmod(moved.storage_offset(), stride)
        if rest or moved.numel() * n_keys != probe.numel() * moved.shape[key]:
            return None
        step = replace(step, dropped=(matrix.key, first))
    elif func in _SLICES and moved.numel() != probe.numel():
        return None  # some queries, heads or samples only
    return replace(matrix, key=key, steps=(*matrix.steps, step))


_SLICES = {Tensor.__getitem__, Tensor.narrow, torch.narrow}


def _laid_out(matrix: _Matrix) -> tuple[Tensor, Tensor | None]:
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


def _same(source: Tensor, result: Tensor, matrix: _Matrix) -> bool:
    """Whether a result is the matrix it was made of, but for what it holds at hidden keys."""
    if result.shape != source.shape or result.dtype != source.dtype:
        return False
    if torch.equal(source, result):
        return True
    logits, _ = _laid_out(matrix)
    return bool(((source == result) | _is_hidden(logits)).all())


def _is_hidden(logits: Tensor) -> Tensor:
    return logits <= max(HIDDEN, torch.finfo(logits.dtype).min / 2)


def _call(
    matrix: _Matrix,
    weights: Tensor,
    own: str,
    value: Tensor,
    others: str,
    product: Product,
    result: Tensor,
) -> RawCall | None:
    """The call of a matrix that is multiplied with values; None where it is no such product.

    Args:
        weights: (…, Tq, Tk) in any order.  own: its letters.
        value: (…, Tk, d_v) in any order.  others: its letters.
    """
    out = product.out_letters
    sizes = dict(zip(others, value.shape, strict=True)) | dict(zip(out, result.shape, strict=True))
    key = own[matrix.key]
    if product.contracted != key or len(result.shape) != len(out):
        return None
    alone = [c for c in own if c != key and not _has(value, others, c, sizes[c])]
    shared = [c for c in own if c != key and c not in alone]
    wide = [c for c in others if c not in own]
    if not alone or not shared or not wide or not set(own + others) - {key} <= set(out):
        return None
    query = _queries(alone, sizes, key, product.is_matmul)
    groups = [c for c in alone if c != query]
    batch, *inner = shared
    heads = [c for c in out if c in inner or c in groups]
    problem = matrix.problem
    if query is None or len(inner) > 1 or (inner and groups and heads[-1] not in groups):
        problem, query = MANY, query or alone[-1]
        heads = [c for c in out if c in own and c not in (batch, query)]
    logits, sinks = _laid_out(matrix)
    if matrix.changes[0] != _version(matrix.held[0]):
        problem = OVERWRITTEN
    elif matrix.changes[1] != _version(weights) and not _still(weights, logits, sinks, matrix.key):
        return None
    per_key_head = [c for c in heads if _has(value, others, c, sizes[c])]
    n_batch, n_heads, n_queries = sizes[batch], prod(sizes[c] for c in heads), sizes[query]
    n_keys, n_key_heads = sizes[key], prod(sizes[c] for c in per_key_head)

    def arranged(x: Tensor, letters: str, order: list[str], *shape: int) -> Tensor:
        spare = [d for d, c in enumerate(letters) if c not in order]  # broadcast: of size 1
        missing = [c for c in order if c not in letters]
        for _ in missing:
            x = x[..., None]
        x = x.permute([(letters + "".join(missing)).index(c) for c in order] + spare)
        for _ in spare:
            x = x[..., 0]
        return x.expand([sizes[c] for c in order]).reshape(shape)

    order = [batch, *heads, query, key]
    table = arranged(logits, own, order, n_batch, n_heads, n_queries, n_keys)
    if sinks is not None:
        sinks = arranged(sinks, own, order, n_batch, n_heads, n_queries, n_keys)[..., 0]
    order, width = [batch, *per_key_head, key, *wide], prod(sizes[c] for c in wide)
    value = arranged(value, others, order, n_batch, n_key_heads, n_keys, width)
    order = [batch, *heads, query, *wide]
    output = arranged(result, out, order, n_batch, n_heads, n_queries, width)
    return RawCall(
        query=output.new_empty(n_batch, n_heads, n_queries, 0),
        key=output.new_empty(n_batch, n_key_heads, n_keys, 0),
        value=value.to(output.dtype),
        output=output,
        scale=1.0,
        mask=Mask(n_queries, n_keys, dense=_hiding(table), device=table.device),
        sinks=sinks,
        is_matrix=True,
        problem=problem,
    )


def _has(value: Tensor, letters: str, letter: str, size: int) -> bool:
    """Whether the values differ along a dimension; one that they broadcast over does not count."""
    return letter in letters and (value.shape[letters.index(letter)] > 1 or size == 1)


def _queries(alone: list[str], sizes: dict[str, int], key: str, is_matmul: bool) -> str | None:
    """Which of the dimensions that the values lack are the queries; the others are heads."""
    square = [c for c in alone if sizes[c] == sizes[key]]
    if len(alone) == 1 or is_matmul:
        return alone[-1]
    return square[-1] if square else None


def _still(weights: Tensor, logits: Tensor, sinks: Tensor | None, key: int) -> bool:
    """Whether a matrix that was written to is still the softmax of its logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = logits.to(wide).logsumexp(key, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.narrow(key, 0, 1))
    again = (logits.to(wide) - total).exp()
    exact = 1e-5 if weights.dtype in (torch.float32, torch.float64) else 1e-2
    close = (again - weights).abs() <= exact
    return bool((close | _is_hidden(logits)).all())


def _hiding(logits: Tensor) -> Tensor:
    """Logits whose hidden keys are told from others also where -10,000 was added to hide them.

    Logits have no hole between -4,000 and -8,000 unless a mask has torn it.
    """
    low = logits < 0.8 * OLD_STYLE
    if torch.equal(low, _is_hidden(logits)):
        return logits
    if bool(((logits < 0.4 * OLD_STYLE) & ~low).any()):
        return logits
    return logits.masked_fill(low, -torch.inf)


# what comes out of these is no score any more, whatever goes in
_FRESH = {
    F.linear,
    F.embedding,
    F.layer_norm,
    F.group_norm,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.log_softmax,
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    getattr(F, "rms_norm", F.layer_norm),
}
