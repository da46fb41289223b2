"""The tap on attention kernels of other packages: flash-attn and xformers, where installed.

Their functions are exchanged for the pass wherever a module of Python or of the model holds them,
for `from flash_attn import flash_attn_func` keeps the function itself. They give what they always
give; what they were given is reported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.capture.masks import Mask
from attnprobe.capture.raw import RawCall
from attnprobe.capture.swap import swapped

DROPS = "dropout is on in this call"
TOO_LONG = "ALiBi slopes at this length would need the whole n × n matrix"
RAGGED = "packed sequences whose queries and keys differ in number under a causal mask"
PAGED = "keys in pages of a cache are not read"
LARGEST = 1 << 27  # elements of a bias that is written out


class KernelTap:
    """Reports calls of other packages' kernels while it is entered.

    Args:
        model: its modules may hold the functions too.
        on_call: gets every attention call.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[RawCall], None]) -> None:
        self.model, self.on_call = model, on_call
        self._undo = ExitStack()

    def __enter__(self) -> KernelTap:
        found = {id(f): (f, read) for f, read in _installed()}
        if not found:
            return self
        with ExitStack() as undo:
            stand_ins = {name: self._watched(f, read) for name, (f, read) in found.items()}
            for holder in self._holders():
                for name, value in list(vars(holder).items()):
                    if id(value) in found and value is found[id(value)][0]:
                        undo.enter_context(swapped(holder, name, stand_ins[id(value)]))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _holders(self) -> Iterator[Any]:
        for module in list(sys.modules.values()):
            if isinstance(getattr(module, "__dict__", None), dict):
                yield module
        yield from self.model.modules()

    def _watched(self, function: Callable[..., Any], read: Callable[..., RawCall]) -> Any:
        signature = inspect.signature(function)

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch._C._is_torch_function_all_disabled():
                return function(*args, **kwargs)  # it is being compared with
            with torch._C.DisableTorchFunction():
                result = function(*args, **kwargs)
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                self.on_call(read(_first(result), bound.arguments))
            return result

        return watched


def _first(result: Any) -> Tensor:
    found = result[0] if isinstance(result, (tuple, list)) else result
    assert isinstance(found, Tensor)
    return found


def _installed() -> Iterator[tuple[Callable[..., Any], Callable[..., RawCall]]]:
    """The functions that are loaded, each with its reader."""
    for names, readers in ((_FLASH_MODULES, _FLASH), (_XFORMERS_MODULES, _XFORMERS)):
        for name in names:
            module = sys.modules.get(name)
            for function, read in readers.items():
                found = getattr(module, "__dict__", {}).get(function)
                if callable(found):
                    yield found, read


# flash-attn: (B, T, H, d), the lower right corners aligned


def _flash(output: Tensor, a: dict[str, Any]) -> RawCall:
    return _dense_flash(output, a["q"], a["k"], a["v"], a)


def _flash_kv_packed(output: Tensor, a: dict[str, Any]) -> RawCall:
    k, v = a["kv"].unbind(2)
    return _dense_flash(output, a["q"], k, v, a)


def _flash_qkv_packed(output: Tensor, a: dict[str, Any]) -> RawCall:
    q, k, v = a["qkv"].unbind(2)
    return _dense_flash(output, q, k, v, a)


def _dense_flash(output: Tensor, q: Tensor, k: Tensor, v: Tensor, a: dict[str, Any]) -> RawCall:
    query, key, value, output = (x.transpose(1, 2) for x in (q, k, v, output))
    return _flash_call(query, key, value, output, a)


def _flash_varlen(output: Tensor, a: dict[str, Any]) -> RawCall:
    return _packed_flash(output, a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], a)


def _flash_varlen_kv_packed(output: Tensor, a: dict[str, Any]) -> RawCall:
    k, v = a["kv"].unbind(1)
    return _packed_flash(output, a["q"], k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], a)


def _flash_varlen_qkv_packed(output: Tensor, a: dict[str, Any]) -> RawCall:
    q, k, v = a["qkv"].unbind(1)
    return _packed_flash(output, q, k, v, a["cu_seqlens"], a["cu_seqlens"], a)


def _packed_flash(
    output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    a: dict[str, Any],
) -> RawCall:
    """All tokens as one row, each sequence a document of it; q, k and v are (T, H, d)."""
    query, key, value, output = (x.transpose(0, 1)[None] for x in (q, k, v, output))
    sides = [_ids(ends, len(x)) for ends, x in ((query_ends, q), (key_ends, k))]
    return _flash_call(query, key, value, output, a, (sides[0], sides[1]))


def _ids(ends: Tensor, total: int) -> Tensor:
    """(1, T) which sequence each token belongs to, from where they begin and end."""
    sizes = ends.long().diff()
    return torch.repeat_interleave(sizes, output_size=total)[None]


def _flash_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    a: dict[str, Any],
    documents: tuple[Tensor, Tensor] | None = None,
) -> RawCall:
    """The call of the arguments that all of flash-attn's functions share."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    problem = DROPS if a.get("dropout_p") else None
    before, after = (None if n < 0 else int(n) for n in a.get("window_size") or (-1, -1))
    causal = bool(a.get("causal"))
    offset = n_keys - n_queries
    if documents is not None and not torch.equal(*documents):
        offset = 0
        moves = causal or before is not None or after is not None
        problem = RAGGED if moves else problem
    if a.get("block_table") is not None:
        problem = PAGED
    slopes, bias = a.get("alibi_slopes"), None
    if slopes is not None:
        if query.shape[1] * n_queries * n_keys > LARGEST:
            problem = TOO_LONG
        else:
            bias = _alibi(slopes, n_queries, n_keys, offset)
    scale = a.get("softmax_scale")
    mask = Mask(
        n_queries,
        n_keys,
        causal=causal,
        offset=offset,
        window=None if before is None else before + 1,
        ahead=None if causal else after,
        documents=documents,
        dense=bias,
        device=query.device,
    )
    same = documents is not None and torch.equal(*documents)
    return RawCall(
        query,
        key,
        value,
        output,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=mask,
        softcap=a.get("softcap") or None,
        documents=documents[0] if documents is not None and same else None,
        problem=problem,
    )


def _alibi(slopes: Tensor, n_queries: int, n_keys: int, offset: int) -> Tensor:
    """(B | 1, H, Tq, Tk) minus the slope of the head times the distance."""
    query = torch.arange(n_queries, device=slopes.device)[:, None] + offset
    distance = (query - torch.arange(n_keys, device=slopes.device)).abs()
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return -slopes.float()[..., None, None] * distance


_FLASH_MODULES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
_FLASH: dict[str, Callable[..., RawCall]] = {
    "flash_attn_func": _flash,
    "flash_attn_kvpacked_func": _flash_kv_packed,
    "flash_attn_qkvpacked_func": _flash_qkv_packed,
    "flash_attn_varlen_func": _flash_varlen,
    "flash_attn_varlen_kvpacked_func": _flash_varlen_kv_packed,
    "flash_attn_varlen_qkvpacked_func": _flash_varlen_qkv_packed,
}


# xformers: (B, T, H, d), (B, T, G, H, d) with grouped heads, or (B, T, d)


def _memory_efficient(output: Tensor, a: dict[str, Any]) -> RawCall:
    given = (a["query"], a["key"], a["value"], output)
    query, key, value, output = (_heads_first(x) for x in given)
    scale = a.get("scale")
    mask = _bias_mask(a.get("attn_bias"), query, key)
    documents = mask.documents
    same = documents is not None and documents[0].shape == documents[1].shape
    return RawCall(
        query,
        key,
        value,
        output,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=mask,
        documents=documents[0] if documents is not None and same else None,
        problem=DROPS if a.get("p") else None,
    )


def _heads_first(x: Tensor) -> Tensor:
    if x.dim() == 3:
        return x[:, None]
    return x.flatten(2, 3).transpose(1, 2) if x.dim() == 5 else x.transpose(1, 2)


def _bias_mask(bias: Any, query: Tensor, key: Tensor) -> Mask:
    """The mask of an `attn_bias`: a tensor, or one of the classes of xformers by its name."""
    n_queries, n_keys = query.shape[2], key.shape[2]

    def made(**parts: Any) -> Mask:
        return Mask(n_queries, n_keys, device=query.device, **parts)

    if bias is None:
        return made()
    if isinstance(bias, Tensor):
        return made(dense=bias[:, None] if bias.dim() == 3 else bias.flatten(1, -3))
    name, below = type(bias).__name__, n_keys - n_queries
    if name == "LowerTriangularMask":
        return made(causal=True)
    if name == "LowerTriangularFromBottomRightMask":
        return made(causal=True, offset=below)
    if name == "LowerTriangularFromBottomRightLocalAttentionMask":
        return made(causal=True, offset=below, window=bias._window_size)
    if name in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        sides = (bias.q_seqinfo, n_queries), (bias.k_seqinfo, n_keys)
        ids = [_ids(torch.tensor(s.seqstart_py, device=query.device), n) for s, n in sides]
        causal = name == "BlockDiagonalCausalMask"
        if not causal or torch.equal(*ids):
            return made(causal=causal, documents=(ids[0], ids[1]))
    shape = (*query.shape[:2], n_queries, n_keys)
    return made(dense=bias.materialize(shape, dtype=query.dtype, device=query.device))


_XFORMERS_MODULES = ("xformers.ops", "xformers.ops.fmha")
_XFORMERS: dict[str, Callable[..., RawCall]] = {"memory_efficient_attention": _memory_efficient}
