"""The masks of one pass as rules: a tensor that many layers share is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask, as_rule, spelled_out
from attnprobe.capture.matrix import hiding

KEPT = 4  # masks that layers alternate between; a bias of every layer's own is not held for long


class Rules:
    """Knows the masks of a pass again."""

    def __init__(self) -> None:
        # by what the model made, which is kept, and so its address
        self._known: dict[Hashable, tuple[Mask, Mask]] = {}
        self._found: dict[Mask, tuple[Documents, Documents, Mask]] = {}
        self._last: dict[Hashable, Mask] = {}  # by sizes, what the layer before had

    def known(self, mask: Mask) -> Mask:
        """The mask with what it hides told, or an earlier one of the same parts.

        Of an earlier one more may be known.
        """
        if self._is_known(mask):
            return mask
        name = _name_of(mask)
        made = self._known.pop(name, None) or (mask, _telling(mask))
        self._known[name] = made
        while len(self._known) > KEPT:
            _, last = self._known.pop(next(iter(self._known)))
            self._found.pop(last, None)
        return made[1]

    def of(self, mask: Mask, queries: Documents, keys: Documents, *, is_own: bool) -> Mask:
        """A mask with its visibility as a rule where it is a known one, found once if shared.

        Args:
            mask: the mask.
            queries, keys: the documents on both sides.
            is_own: no other layer has this tensor, as with a matrix that was written out.
        """
        if mask.dense is None:
            return mask
        if is_own:
            return self._like_last(mask, queries, keys)
        found = self._found.get(mask)
        if found is None or not (_equal(found[0], queries) and _equal(found[1], keys)):
            found = (queries, keys, as_rule(mask, queries, keys))
            if self._is_known(mask):
                self._found[mask] = found
        return found[2]

    def _is_known(self, mask: Mask) -> bool:
        return any(mask is own for _, own in self._known.values())

    def _like_last(self, mask: Mask, queries: Documents, keys: Documents) -> Mask:
        name = (queries.ids.shape, keys.ids.shape, queries is keys)
        last = self._last.get(name)
        rule = None if last is None else spelled_out(mask, last, queries.valid)
        if rule is None:
            rule = as_rule(mask, queries, keys)
            if rule.dense is None or rule.adds_only:
                self._last[name] = replace(rule, dense=None, adds_only=False)
        return rule


def _telling(mask: Mask) -> Mask:
    """A mask whose hidden keys are told from others also where -10,000 hides them."""
    if mask.dense is None or not mask.dense.is_floating_point():
        return mask
    dense = hiding(mask.dense)
    return mask if dense is mask.dense else replace(mask, dense=dense)


def _equal(one: Documents, other: Documents) -> bool:
    return one is other or torch.equal(one.ids, other.ids)


def _name_of(mask: Mask) -> Hashable:
    sizes = (mask.n_queries, mask.n_keys, mask.causal, mask.offset, mask.window, mask.ahead)
    tensors = (mask.key_padding, *(mask.documents or ()), mask.dense)
    return (*sizes, mask.adds_only, *map(_address, tensors), _function(mask.rule), mask.rule_heads)


def _address(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version


def _function(rule: Callable[..., Tensor] | None) -> Hashable:
    return None if rule is None else id(rule)
