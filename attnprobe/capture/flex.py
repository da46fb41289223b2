"""The tap on `flex_attention`, whose masks and score changes are functions of positions.

With its own compilation off (`attnprobe.forward.evaluated`), the function ends in a higher-order
operator, which a function mode sees as it sees any other. The mask stays a rule; a score function
has its logits written out, for one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnprobe.capture.attend import attend
from attnprobe.capture.masks import Mask
from attnprobe.capture.raw import RawCall

WRITTEN_OUT = 1 << 24  # logits up to which torch's own function may write them out


def is_flex(func: Callable[..., Any]) -> bool:
    """Whether it is the operator behind `flex_attention`."""
    return type(func).__name__ == "FlexAttentionHOP"


def flex(
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *others: Any,
) -> tuple[Any, RawCall]:
    """What the operator gives, and the call; run in linear memory where the matrix is large.

    Args:
        func: the operator.
        query: (B, H, Tq, d).  key: (B | 1, K, Tk, d).  value: (B | 1, K, Tk, d_v).
        score_mod: of logit, sample, head, query and key.
        block_mask: `BlockMask.as_tuple()`, its mask function last.
    """
    n_batch, n_heads, n_queries, _ = query.shape
    n_keys = key.shape[2]
    key, value = (x.expand(n_batch, -1, -1, -1) for x in (key, value))
    mask = _rule(block_mask[-1], n_batch, n_heads, n_queries, n_keys, query.device)
    is_plain = _name(score_mod) == "_identity"
    wants_more = kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX")
    if is_plain and not wants_more and n_batch * n_heads * n_queries * n_keys > WRITTEN_OUT:
        output = attend(query, key, value, mask, scale=scale)
        nothing = query.new_empty(0, dtype=torch.float32)
        result: Any = (output, nothing, nothing)
    else:
        given = (query, key, value, score_mod, block_mask, scale, kernel_options)
        result = func(*given, *others)
    call = RawCall(query, key, value, result[0], float(scale), mask)
    if not is_plain:
        call = _written_out(call, score_mod)
    return result, call


def _written_out(call: RawCall, score_mod: Callable[..., Tensor]) -> RawCall:
    """The same call with its logits as the score function left them."""
    query, key = call.query, call.key
    n_batch, n_heads, n_queries, _ = query.shape
    n_keys = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    repeated = key.repeat_interleave(n_heads // key.shape[1], 1)
    logits = (query @ repeated.mT).to(wide) * call.scale
    places = _places(slice(0, n_queries), slice(0, n_keys), n_batch, n_heads, query.device)
    logits = score_mod(logits, *places).expand(n_batch, n_heads, n_queries, n_keys)
    mask = Mask(
        n_queries,
        n_keys,
        dense=logits,
        rule=call.mask.rule,
        rule_heads=call.mask.rule_heads,
        device=query.device,
    )
    return RawCall(
        query=query[..., :0],
        key=key[..., :0],
        value=call.value,
        output=call.output,
        scale=1.0,
        mask=mask,
        is_matrix=True,
    )


def _rule(
    mask_mod: Callable[..., Tensor],
    n_batch: int,
    n_heads: int,
    n_queries: int,
    n_keys: int,
    device: torch.device,
) -> Mask:
    """The mask of a function of sample, head, query and key."""
    if _name(mask_mod) == "noop_mask":
        return Mask(n_queries, n_keys, device=device)
    by_sample, by_head = _looks_at(mask_mod, device)
    shape = n_batch if by_sample else 1, n_heads if by_head else 1

    def block(rows: slice, keys: slice) -> Tensor:
        seen = mask_mod(*_places(rows, keys, *shape, device))
        return seen.expand(*shape, rows.stop - rows.start, keys.stop - keys.start)

    return Mask(n_queries, n_keys, rule=block, rule_heads=shape[1], device=device)


def _places(
    rows: slice, keys: slice, n_batch: int, n_heads: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Samples (B, 1, 1, 1), heads (1, H, 1, 1), queries (1, 1, Tq', 1) and keys (1, 1, 1, Tk')."""
    ends = ((0, n_batch), (0, n_heads), (rows.start, rows.stop), (keys.start, keys.stop))
    return tuple(
        torch.arange(*end, device=device).view([-1 if d == n else 1 for d in range(4)])
        for n, end in enumerate(ends)
    )


def _looks_at(mask_mod: Callable[..., Tensor], device: torch.device) -> tuple[bool, bool]:
    """Whether a mask function looks at the sample, and whether at the head."""
    places = _places(slice(0, 1), slice(0, 1), 1, 1, device)
    looked = _Looked()
    with looked:
        mask_mod(*places)
    return id(places[0]) in looked.at, id(places[1]) in looked.at


class _Looked(TorchFunctionMode):
    """Notes which tensors were handed to torch's functions as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.at: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._note(args)
        self._note((kwargs or {}).values())
        return func(*args, **(kwargs or {}))

    def _note(self, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.at.add(id(value))
            elif isinstance(value, (tuple, list)):
                self._note(value)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")
