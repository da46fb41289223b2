"""The masks that transformers makes, as rules.

The library describes a mask by a function of sample, head, query and key, put together from a few
known ones. Those are read by their names; any other is asked block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnprobe.capture.lazymask import LazyMask, MaskSource
from attnprobe.capture.masks import Mask


def lazily(original: Any, library: ModuleType) -> Any:
    """A function of transformers that makes dense masks, as one that makes the same lazily.

    Args:
        original: what the library would have called.
        library: `transformers.masking_utils`.
    """
    if original not in (library.sdpa_mask, library.eager_mask):
        return original  # those of flash and flex attention make no dense tensor

    def make(*args: Any, **kwargs: Any) -> Any:
        wanted = _Wanted.of(library, *args, **kwargs)
        if wanted is None:
            return original(*args, **kwargs)
        rule = wanted.rule()
        if wanted.may_be_none(rule, is_sdpa=original is library.sdpa_mask):
            return original(**kwargs)
        source = MaskSource(rule, lambda rows: original(**wanted.of_rows(rows, kwargs)))
        is_boolean = original is library.sdpa_mask
        dtype = torch.bool if is_boolean else kwargs.get("dtype", torch.float32)
        shape = (wanted.n_batch, 1, rule.n_queries, rule.n_keys)
        return LazyMask(source, shape, dtype, wanted.device)

    return make


@dataclass(frozen=True)
class _Wanted:
    """What a mask function of the library was asked for; positions count from the offsets."""

    library: ModuleType
    n_batch: int
    n_queries: int
    n_keys: int
    query_offset: int
    key_offset: int
    function: Callable[..., Any]
    padding: Tensor | None  # (B, n) True at real keys
    is_vmapped: bool
    device: torch.device
    skips_causal: bool
    skips_full: bool

    @classmethod
    def of(
        cls,
        library: ModuleType,
        batch_size: Any = None,
        q_length: Any = None,
        kv_length: Any = None,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Any = None,
        attention_mask: Any = None,
        use_vmap: bool = False,
        device: Any = "cpu",
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        **others: Any,
    ) -> _Wanted | None:
        """None where it was asked in a way that this does not know (another version's)."""
        lengths = (batch_size, q_length, kv_length)
        if not all(isinstance(n, int) for n in lengths) or "cache_position" in others:
            return None
        if attention_mask is not None and attention_mask.dim() != 2:
            return None
        n_keys, key_offset = int(kv_length), int(kv_offset)
        padding = library.prepare_padding_mask(attention_mask, n_keys, key_offset)
        if padding is not None:
            padding = padding[:, key_offset : key_offset + n_keys].bool()
        return cls(
            library=library,
            n_batch=int(batch_size),
            n_queries=int(q_length),
            n_keys=n_keys,
            query_offset=int(q_offset),
            key_offset=key_offset,
            function=mask_function or library.causal_mask_function,
            padding=None if padding is None or bool(padding.all()) else padding,
            is_vmapped=use_vmap,
            device=torch.device(device),
            skips_causal=allow_is_causal_skip,
            skips_full=allow_is_bidirectional_skip,
        )

    def rule(self) -> Mask:
        """What the mask says."""
        plain = Mask(
            self.n_queries,
            self.n_keys,
            offset=self.query_offset - self.key_offset,
            key_padding=self.padding,
            device=self.device,
        )
        parts = _read(self.function)
        rule = None if parts is None else self._put_together(plain, parts)
        return rule if rule is not None else replace(plain, rule=self._block)

    def _put_together(self, mask: Mask, parts: list[tuple[str, Any]]) -> Mask | None:
        names = [name for name, _ in parts]
        if len(set(names)) < len(names) or {"documents", "chunks"} <= set(names):
            return None
        if "remapped" in names and "documents" not in names:
            return None
        given = dict(parts)
        if "causal" in given:
            mask = replace(mask, causal=True)
        if (window := given.get("window")) is not None and window < self.n_keys:
            mask = replace(mask, window=window)
        if (reach := given.get("reach")) is not None and reach + 1 < self.n_keys:
            mask = replace(mask, window=reach + 1, ahead=reach)
        if (ids := given.get("documents")) is not None:
            if ids.shape[-1] != self.n_queries or self.n_queries != self.n_keys:
                return None
            ids = ids.expand(self.n_batch, -1)
            mask = replace(mask, documents=(ids, ids))
        if (chunks := given.get("chunks")) is not None:
            mask = replace(mask, documents=self._chunks(*chunks))
        return mask

    def _chunks(self, size: int, start: Tensor) -> tuple[Tensor, Tensor] | None:
        """(B, Tq) and (B, Tk) numbers of the chunks; None where all is in one."""
        query = torch.arange(self.n_queries, device=self.device) + self.query_offset
        key = torch.arange(self.n_keys, device=self.device) + self.key_offset
        start = start.to(self.device).expand(self.n_batch)[:, None]
        ids = [torch.div(x - start, size, rounding_mode="floor") for x in (query, key)]
        same = all(bool((x == ids[0][0, 0]).all()) for x in ids)
        return None if same else (ids[0], ids[1])

    def _block(self, rows: slice, keys: slice) -> Tensor:
        """(B, 1, Tq', Tk') by the library's own way to look at a mask function."""
        with torch._C.DisableTorchFunction():
            return self.library.sdpa_mask(
                batch_size=self.n_batch,
                q_length=rows.stop - rows.start,
                kv_length=keys.stop - keys.start,
                q_offset=self.query_offset + rows.start,
                kv_offset=self.key_offset + keys.start,
                mask_function=self.function,
                attention_mask=None,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False,
                use_vmap=self.is_vmapped,
                device=self.device,
            )

    def may_be_none(self, rule: Mask, *, is_sdpa: bool) -> bool:
        """Whether the library would give None and leave it to the attention function."""
        parts = (rule.window, rule.ahead, rule.key_padding, rule.documents, rule.rule)
        if any(part is not None for part in parts):
            return False
        if rule.causal:
            is_square = rule.n_queries == rule.n_keys and rule.offset == 0
            return is_sdpa and self.skips_causal and is_square
        return self.skips_full

    def of_rows(self, rows: slice, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The library's arguments for a run of queries, never answered by None."""
        return {
            **kwargs,
            "q_length": rows.stop - rows.start,
            "q_offset": self.query_offset + rows.start,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }


def _read(function: Any) -> list[tuple[str, Any]] | None:
    """The known parts that a mask function of the library is made of, None if it has others."""
    name = getattr(function, "__qualname__", "").removesuffix(".<locals>.inner_mask")
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    held = _held(function)
    if name == "causal_mask_function":
        return [("causal", None)]
    if name == "bidirectional_mask_function":
        return []
    if name == "sliding_window_overlay":
        return [("window", int(held["sliding_window"]))]
    if name == "sliding_window_bidirectional_overlay":
        return [("reach", int(held["sliding_window"]))]
    if name == "chunked_overlay":
        return [("chunks", (int(held["chunk_size"]), held["left_padding"]))]
    if name == "packed_sequence_mask_function":
        return [("documents", held["packed_sequence_mask"])]
    if name == "remap_positions_for_packed_sequence":
        # within a document, positions that start anew are as far apart as those that do not
        inner = _read(held["mask_function"])
        return None if inner is None else [*inner, ("remapped", None)]
    if name == "and_masks.<locals>.and_mask":
        parts: list[tuple[str, Any]] = []
        for part in held["mask_functions"]:
            inner = _read(part)
            if inner is None:
                return None
            parts += [p for p in inner if p not in (("causal", None),) or p not in parts]
        return parts
    return None


def _held(function: Any) -> dict[str, Any]:
    """What a nested function has of the one around it."""
    cells = function.__closure__ or ()
    return {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, cells, strict=True)}


def of_block_mask(block_mask: Any, n_queries: int, n_keys: int, device: torch.device) -> Mask:
    """A `BlockMask` of flex attention as a rule; heads are taken to share it."""

    def block(rows: slice, keys: slice) -> Tensor:
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)[None, :]
        sample = torch.arange(block_mask.shape[0], device=device)[:, None, None, None]
        head = torch.zeros((), dtype=torch.long, device=device)
        seen = block_mask.mask_mod(sample, head, query, key)
        whole = 1, 1, len(query), key.shape[1]  # it may look at the queries and the keys only
        return seen.expand(torch.broadcast_shapes(seen.shape, whole))

    return Mask(n_queries, n_keys, rule=block, device=device)
