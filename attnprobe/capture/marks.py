"""Values attached to tensors for as long as these live."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Marks(Generic[T]):
    """A mapping from tensors, told apart by identity, that keeps none of them alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def set(self, tensor: Tensor, value: T) -> None:
        """Marks a tensor."""
        name = id(tensor)

        def forget(_: weakref.ref[Tensor]) -> None:
            self._found.pop(name, None)

        self._found[name] = (weakref.ref(tensor, forget), value)

    def get(self, tensor: Tensor) -> T | None:
        """The mark of a tensor, None where it has none."""
        found = self._found.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None

    def clear(self) -> None:
        """Takes every mark off."""
        self._found.clear()
