"""Matrix products by whatever name they are called, as one einsum of two tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH = "abcdefghijklmnop"  # letters of the leading dimensions of a matmul, the last one first
ROW, INNER, COLUMN = "xyz"
ELLIPSIS = "ABCDEFGHIJKL"


@dataclass(frozen=True, eq=False)
class Product:
    """Two tensors and a letter for every dimension of theirs and of the result.

    Attributes:
        is_matmul: rows stand before columns, as in a matmul, and not in the order of an equation.
    """

    left: Tensor
    right: Tensor
    left_letters: str
    right_letters: str
    out_letters: str
    is_matmul: bool = True

    @property
    def contracted(self) -> str:
        """The letters that are summed over."""
        return "".join(
            c for c in self.left_letters if c in self.right_letters and c not in self.out_letters
        )

    @property
    def sums(self) -> bool:
        """Whether more than one number is summed up; an outer product is no comparison."""
        return any(self.left.shape[self.left_letters.index(c)] > 1 for c in self.contracted)


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among arguments, those in lists too; not the one a result is written to."""
    found = []
    for value in (*args, *(v for name, v in kwargs.items() if name != "out")):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(x for x in value if isinstance(x, Tensor))
    return found


def read_product(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Product | None:
    """The product that a function of torch is, None where it is none of two tensors."""
    if func is torch.einsum:
        return _einsum(args)
    if func not in _MATMULS:
        return None
    tensors = tensors_in(args, kwargs)[-2:]  # baddbmm and addmm are given what is added first
    if len(tensors) < 2 or min(x.dim() for x in tensors) < 2:
        return None
    left, right = reversed(tensors) if func is Tensor.__rmatmul__ else tensors
    lead_left, lead_right = BATCH[: left.dim() - 2][::-1], BATCH[: right.dim() - 2][::-1]
    longer = max(lead_left, lead_right, key=len)
    return Product(
        left, right, lead_left + ROW + INNER, lead_right + INNER + COLUMN, longer + ROW + COLUMN
    )


def _einsum(args: tuple[Any, ...]) -> Product | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    left, arrow, out = args[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(operands) != 2 or len(terms) != 2:
        return None
    if not arrow:
        plain = left.replace(",", "").replace("...", "")
        out = "..." * ("..." in left) + "".join(sorted(c for c in plain if plain.count(c) == 1))
    spelled, longest = [], ""
    for term, operand in zip(terms, operands, strict=True):
        extra = ELLIPSIS[: operand.dim() - len(term.replace("...", ""))][::-1]
        longest = max(longest, extra, key=len) if "..." in term else longest
        spelled.append(term.replace("...", extra))
    out = out.replace("...", longest)
    if any(len(set(term)) != len(term) for term in (*spelled, out)):
        return None  # a diagonal
    return Product(operands[0], operands[1], spelled[0], spelled[1], out, is_matmul=False)


_MATMULS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
    torch.baddbmm,
    Tensor.baddbmm,
    Tensor.baddbmm_,
    torch.addmm,
    Tensor.addmm,
}
