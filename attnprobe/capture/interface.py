"""The tap on transformers' attention interface: every model that goes through it is seen as it is.

While the tap is on, whatever attention function a model looks up is replaced by one that computes
the same in linear memory and reports the call, and whatever mask it makes stays a rule. Nothing of
the model is changed, and nothing of the library stays changed. At its first call every site is held
against the function that was replaced; one that does something else gets that function back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.capture.attend import attend
from attnprobe.capture.lazymask import LazyMask
from attnprobe.capture.maskrules import lazily, of_block_mask
from attnprobe.capture.masks import Mask
from attnprobe.capture.raw import RawCall
from attnprobe.capture.swap import swapped

ROWS = 4  # queries held against the library's own function in the beginning, middle and end,
WEIGHTS = 1 << 18  # and more where they have no more weights than this
FILLED = 1 << 22  # weights at a time of queries that see no key
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF = 5e-2
NOT_TOKENS = re.compile(r"Channel|AttentionResidual")
NO_TOKENS = "what attends there are channels or depths, not tokens"
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")
BY_QUERY = ("position_bias", "sinks")  # arguments that hold something for every query


class InterfaceTap:
    """Reports attention calls of one model while it is entered.

    Args:
        model: whose calls are reported; other models of the process run as ever.
        on_call: gets every attention call.
        on_other: gets the reason why the running module's attention is none over tokens.
        known: gives an earlier mask of the very same parts, of which more may be known.
    """

    def __init__(
        self,
        model: nn.Module,
        on_call: Callable[[RawCall], None],
        on_other: Callable[[str], None],
        known: Callable[[Mask], Mask] = lambda mask: mask,
    ) -> None:
        self.model, self.on_call, self.on_other = model, on_call, on_other
        self.known = known
        self._modules = {id(module) for module in model.modules()}
        self._checked: dict[int, bool] = {}  # by module: whether ours gives what its own does
        self._undo = ExitStack()

    def __enter__(self) -> InterfaceTap:
        library = sys.modules.get("transformers.modeling_utils")
        interface = getattr(library, "AttentionInterface", None)
        if interface is None or not hasattr(interface, "__getitem__"):
            return self
        with ExitStack() as undo:
            self._patch_attention(undo, interface)
            masking = sys.modules.get("transformers.masking_utils")
            if masking is not None:
                self._patch_masks(undo, masking)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _patch_attention(self, undo: ExitStack, interface: Any) -> None:
        item = interface.__getitem__

        def found(registry: Any, name: str) -> Any:
            return self._wrap(item(registry, name))

        undo.enter_context(swapped(interface, "__getitem__", found))
        if (get := getattr(interface, "get_interface", None)) is not None:
            # the one place that knows a model's own eager function
            undo.enter_context(
                swapped(interface, "get_interface", lambda *a, **k: self._wrap(get(*a, **k)))
            )

    def _patch_masks(self, undo: ExitStack, masking: ModuleType) -> None:
        interface: Any = masking.AttentionMaskInterface
        item = interface.__getitem__
        undo.enter_context(
            swapped(
                interface,
                "__getitem__",
                lambda registry, name: lazily(item(registry, name), masking),
            )
        )

    def _wrap(self, original: Any) -> Any:
        if isinstance(original, _Attention) or not callable(original):
            return original
        return _Attention(self, original)

    def attention(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Stands in for `original`; shapes are those of transformers' interface."""

        def own() -> Any:
            return original(module, query, key, value, attention_mask, **kwargs)

        if id(module) not in self._modules:
            with torch._C.DisableTorchFunction():  # nor is it the other tap's business
                return own()
        if NOT_TOKENS.search(type(module).__name__):
            self.on_other(NO_TOKENS)
            with torch._C.DisableTorchFunction():
                return own()
        if self._checked.get(id(module)) is False:
            return own()  # the tap on torch's functions looks on
        call = _read(original, module, query, key, value, attention_mask, kwargs)
        if call is None:
            return own()
        call = replace(call, mask=self.known(call.mask))
        with torch._C.DisableTorchFunction():
            output = attend(
                call.query,
                call.key,
                call.value,
                call.mask,
                scale=call.scale,
                softcap=call.softcap,
                sinks=call.sinks,
            )
            few = partial(_ask, original, (module, query, key, value), attention_mask, kwargs)
            try:
                _fill(output, call.mask, few)
                if id(module) not in self._checked:
                    self._checked[id(module)] = _agrees(output, call.mask, few)
            except Exception:  # it cannot be asked about a few queries: then it is asked about all
                self._checked[id(module)] = False
        if not self._checked[id(module)]:
            return own()
        self.on_call(replace(call, output=output))
        weights = None
        if kwargs.get("output_attentions"):  # whoever asks for them may go on with them
            with torch._C.DisableTorchFunction():
                weights = own()[1]
        return output.transpose(1, 2).contiguous(), weights


class _Attention:
    """An attention function of transformers while the tap is on."""

    def __init__(self, tap: InterfaceTap, original: Callable[..., Any]) -> None:
        self.tap, self.original = tap, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tap.attention(self.original, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _read(
    original: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    kwargs: dict[str, Any],
) -> RawCall | None:
    """The call as its arguments tell it, the output not yet known; None where they do not."""
    if any(x.dim() != 4 for x in (query, key, value)) or kwargs.get("dropout"):
        return None
    n_batch, n_heads = query.shape[:2]
    key_heads = max(key.shape[1], value.shape[1])
    if n_heads % key_heads or key.shape[0] != n_batch:
        return None
    is_packed = any(kwargs.get(name) is not None for name in PACKED)
    if is_packed and attention_mask is None and _name(original).startswith("flash"):
        return None
    scale = kwargs.get("scaling")
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    if sinks is not None:
        sinks = sinks.view(1, -1, 1) if sinks.dim() == 1 else sinks[..., 0]
    mask = _mask(original, module, query, key, attention_mask, kwargs)
    if mask is None:
        return None
    return RawCall(
        query=query,
        key=key.expand(-1, key_heads, -1, -1),
        value=value.expand(-1, key_heads, -1, -1),
        output=query,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=mask,
        softcap=kwargs.get("softcap"),
        sinks=sinks,
    )


def _mask(
    original: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    given: Any,
    kwargs: dict[str, Any],
) -> Mask | None:
    """The mask of a call as the replaced function would have read it."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    bias = kwargs.get("position_bias")
    plain = Mask(n_queries, n_keys, dense=bias, device=query.device)
    if isinstance(given, LazyMask):
        rule = given.source.rule
        is_whole = (given.shape[-2], given.shape[-1]) == (n_queries, n_keys)
        given = rule if rule is not None and is_whole else given.source.dense()
    if isinstance(given, Mask):
        return given if bias is None else replace(given, dense=bias)
    if given is None:
        causal = _is_causal(original, module, n_queries, kwargs)
        # what a function of someone else's hides of its own accord cannot be known
        return replace(plain, causal=causal) if _is_of_library(original) or not causal else None
    if not isinstance(given, Tensor):  # of flex attention
        rule = of_block_mask(given, n_queries, n_keys, query.device)
        return replace(rule, dense=bias)
    if given.dim() == 2 and given.shape == (query.shape[0], n_keys):  # of flash attention
        causal = _is_causal(original, module, n_queries, kwargs)
        if causal and not _is_of_library(original):
            return None
        window = kwargs.get("sliding_window") if causal else None
        offset = n_keys - n_queries  # flash attention aligns the lower right corners
        padding = None if bool(given.all()) else given.bool()
        return replace(plain, causal=causal, offset=offset, window=window, key_padding=padding)
    given = given.reshape((1,) * (4 - given.dim()) + tuple(given.shape))[..., :n_keys]
    if bias is None:
        return replace(plain, dense=given)
    if given.dtype == torch.bool:
        return replace(plain, dense=torch.where(given, bias, torch.finfo(bias.dtype).min))
    return replace(plain, dense=bias + given)


def _is_causal(
    original: Callable[..., Any], module: nn.Module, n_queries: int, kwargs: dict[str, Any]
) -> bool:
    """Whether a function without a mask hides what comes later; eager ones do not."""
    if "eager" in _name(original):
        return False
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return bool(is_causal) and n_queries > 1


def _is_of_library(function: Callable[..., Any]) -> bool:
    return getattr(function, "__module__", "").startswith("transformers.")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _agrees(output: Tensor, mask: Mask, ask: Callable[[slice, Mask], Tensor]) -> bool:
    """Whether the replaced function gives the same for a few queries."""
    n_batch, n_heads, length, _ = output.shape
    n_rows = max(ROWS, WEIGHTS // (n_batch * n_heads * mask.n_keys))
    for start in {0, max(0, length // 2 - n_rows // 2), max(0, length - n_rows)}:
        rows = slice(start, min(start + n_rows, length))
        ours, theirs = output[:, :, rows].float(), ask(rows, mask).float()
        seen = mask.visible(rows, slice(0, mask.n_keys), slice(None), slice(None))
        if seen is not None:  # rows that see nothing are its own already
            ours, theirs = (x.masked_fill(~seen.any(-1)[..., None], 0) for x in (ours, theirs))
        allowed = TOLERANCE.get(output.dtype, HALF) * max(float(theirs.abs().amax()), 1e-6)
        if ours.shape != theirs.shape or not float((ours - theirs).abs().amax()) <= allowed:
            return False
    return True


def _fill(output: Tensor, mask: Mask, ask: Callable[[slice, Mask], Tensor]) -> None:
    """Gives rows that see no key what the replaced function puts there: some models read them."""
    if mask.empty is None:
        return
    n_batch, n_heads, length, _ = output.shape
    step = max(1, FILLED // (n_batch * n_heads * mask.n_keys))
    for start in sorted({row - row % step for row in mask.empty.any(0).nonzero()[:, 0].tolist()}):
        rows = slice(start, min(start + step, length))
        empty = mask.empty[:, None, rows, None]  # (B | 1, 1, r, 1)
        output[:, :, rows] = torch.where(empty, ask(rows, mask), output[:, :, rows])


def _ask(
    original: Callable[..., Any],
    given: tuple[nn.Module, Tensor, Tensor, Tensor],
    attention_mask: Any,
    kwargs: dict[str, Any],
    rows: slice,
    mask: Mask,
) -> Tensor:
    """(B, H, r, d_v) what the replaced function gives for a few queries."""
    module, query, key, value = given
    part = {n: _of_rows(x, rows) if n in BY_QUERY else x for n, x in kwargs.items()}
    few = (query[:, :, rows], key, value, _rows(attention_mask, mask, rows))
    return original(module, *few, **part)[0].transpose(1, 2)


def _of_rows(argument: Any, rows: slice) -> Any:
    is_by_row = isinstance(argument, Tensor) and argument.dim() == 4 and argument.shape[2] > 1
    return argument[:, :, rows] if is_by_row else argument


def _rows(given: Any, mask: Mask, rows: slice) -> Any:
    """The mask of a few queries as the library itself would make it."""
    if isinstance(given, LazyMask):
        return given.source.rows(rows)
    if isinstance(given, Tensor):
        return _of_rows(given, rows)
    if given is None and not mask.causal:
        return None
    every = slice(None)
    return replace(mask, dense=None).visible(rows, slice(0, mask.n_keys), every, every)
