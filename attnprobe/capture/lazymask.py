"""A mask of transformers, kept as a rule until something needs the tensor itself.

A model hands its mask from where it is made to where it is used; most never look into it. What
does (a bias added to it, attention code of the model's own) gets the very tensor that transformers
would have made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnprobe.capture.masks import Mask

_aten = torch.ops.aten


class MaskSource:
    """A rule and the tensor that spells it out, made when it is first asked for.

    Args:
        rule: what the mask says.
        make: (B, 1, r, Tk) a run of its rows, made by the library itself.
    """

    def __init__(self, rule: Mask, make: Callable[[slice], Tensor]) -> None:
        self._rule = rule
        self._make = make
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """(B, 1, Tq, Tk) the tensor itself."""
        if self._dense is None:
            self._dense = self.rows(slice(0, self._rule.n_queries))
        return self._dense

    def rows(self, rows: slice) -> Tensor:
        """(B, 1, r, Tk) some of its rows."""
        if self._dense is not None:
            return self._dense[:, :, rows]
        with torch._C.DisableTorchFunction():
            return self._make(rows)

    @property
    def rule(self) -> Mask | None:
        """The rule, while it is sure to hold: whoever had the tensor may have written to it."""
        return self._rule if self._dense is None else None


class LazyMask(Tensor):
    """(B, 1, Tq, Tk) of the dtype that the model expects; `source` holds the rule."""

    source: MaskSource

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        source: MaskSource,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LazyMask:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.source = source
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(args[0], LazyMask) and _leaves_whole(func, args):
            mask = args[0]
            return cls(mask.source, tuple(mask.shape), mask.dtype, mask.device)

        def plain(x: Any) -> Any:
            return x.source.dense() if isinstance(x, LazyMask) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def _leaves_whole(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation gives the whole mask again, as `mask[:, :, :, :n_keys]` often does."""
    shape = args[0].shape
    if torch.is_inference_mode_enabled():  # no second tensor can stand for the first there
        return False
    if func in (_aten.alias.default, _aten.detach.default):
        return True
    if func is _aten.expand.default:
        return list(args[1]) == list(shape)
    if func is _aten.slice.Tensor:
        given = list(args[1:]) + [0, None, None, 1][len(args) - 1 :]
        dim, start, stop, step = given
        return start in (None, 0) and (stop is None or stop >= shape[dim]) and step == 1
    return False
