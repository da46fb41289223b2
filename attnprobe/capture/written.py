"""Attention that a model writes out: scores, a softmax, and the product with the values.

A softmax is one of attention when what it is given was made of a product of two activations, and
its result, as it is or in another layout or dtype, is summed over its keys with values in such a
product. The path in between may scale, mask, cap or bias the scores at will: the softmax's own
input is what is measured. Only the matrix of one call is held, and only while the model holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnprobe.capture.layouts import CASTS, DROPOUTS, LAYOUTS, LOG_SOFTMAXES, SOFTMAXES
from attnprobe.capture.linear import Weights
from attnprobe.capture.marks import Marks
from attnprobe.capture.masks import Mask
from attnprobe.capture.matrix import Matrix, Softmax, hiding, laid_out, moved, same, still, version
from attnprobe.capture.products import Product, tensors_in
from attnprobe.capture.raw import RawCall

DROPS = "dropout is on in this call"
OVERWRITTEN = "its logits were overwritten after the softmax"
MANY = "its matrix has more dimensions than samples and heads, in which blocks cannot be told"


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
        self._matrices: Marks[Matrix] = Marks()

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
            changes = version(logits), version(result)
            self._matrices.set(result, Matrix(seen, [logits], changes, key))

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
            if (other := moved(matrix, func, args[1:], kwargs, source)) is None:
                return
            matrix = other
        elif not (func in CASTS and own) and not same(source, result, matrix):
            return
        changes = matrix.changes[0], version(result)
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


def _call(
    matrix: Matrix,
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
    logits, sinks = laid_out(matrix)
    if matrix.changes[0] != version(matrix.held[0]):
        problem = OVERWRITTEN
    elif matrix.changes[1] != version(weights) and not still(weights, logits, sinks, matrix.key):
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
        mask=Mask(n_queries, n_keys, dense=hiding(table), device=table.device),
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
