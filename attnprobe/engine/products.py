"""Products of our own making, by the faster of the two matrix libraries torch comes with.

On x86 CPUs other than Intel's the library behind `torch.matmul` keeps to half the vector width;
the other one, oneDNN, takes little more than half the time on a block of queries and keys, or of
tokens and the vocabulary. It is reached through a
private operator, here only, and only if it is there and gives the right numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (1024, 512, 256)  # keys at once: a new shape costs the library milliseconds and megabytes
ROWS = 128  # with fewer queries it gains nothing


@contextmanager
def exact() -> Iterator[None]:
    """float32 products in float32, where torch was told that less will do (TF32, bfloat16)."""
    libraries = (torch.backends.cuda, torch.backends.mkldnn)
    backends: list[Any] = [getattr(library, "matmul", None) for library in libraries]
    if not all(hasattr(backend, "fp32_precision") for backend in backends):  # torch before 2.9
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, own in zip(backends, before, strict=True):
            backend.fp32_precision = own


def logits(query: Tensor, key: Tensor, out: Tensor) -> Tensor:
    """(n, r, c) products of n (r, d) queries and n (c, d) keys, written to `out`."""
    if len(query) > 1 or query.shape[1] < ROWS or not _suits(query):
        return torch.bmm(query, key.mT, out=out)
    rows, columns, found = query[0], key[0], out[0]
    start = 0
    for width in WIDTHS:
        while start + width <= len(columns):
            keys = slice(start, start + width)
            found[:, keys] = _product(rows, columns[keys])
            start += width
    if start < len(columns):
        torch.mm(rows, columns[start:].mT, out=found[:, start:])
    return out


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(r, c) what `F.linear` makes of (r, d) rows and a (c, d) weight, by the faster library."""
    if len(rows) < ROWS or not (_suits(rows) and _suits(weight)):
        return F.linear(rows, weight, bias)
    product = _product(rows, weight)
    return product if bias is None else product.add_(bias)


def _suits(rows: Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.device.type == "cpu" and works()


@cache
def works() -> bool:
    """Whether this torch has the operator as we know it."""
    rows = torch.arange(35.0).sin().view(5, 7)
    columns = torch.arange(21.0).cos().view(3, 7)
    try:
        found = _product(rows, columns)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return found.shape == (5, 3) and torch.allclose(
        found.double(), rows.double() @ columns.double().mT, rtol=0, atol=1e-5
    )


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    """(r, c) products of (r, d) and (c, d); the one place that names the operator."""
    return torch.ops.mkldnn._linear_pointwise(rows, columns, None, "none", [], "")
