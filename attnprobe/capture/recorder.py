"""Records the attention calls of a forward pass and hands each on, complete, while it runs.

A call waits until its module ends (longer, until the parent ends, if W_O lies outside), so that
projection and gate are known. One layer's tensors are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from attnprobe.capture.around import Ran, feeds_forward
from attnprobe.capture.call import AttentionCall, Gate, Site
from attnprobe.capture.completion import UNTOLD, Completion
from attnprobe.capture.documents import Documents
from attnprobe.capture.folding import unfolded
from attnprobe.capture.gates import fits
from attnprobe.capture.interface import InterfaceTap
from attnprobe.capture.kernels import KernelTap
from attnprobe.capture.pending import IN_PIECES, Pending
from attnprobe.capture.projection import as_heads, read_gate, same_as
from attnprobe.capture.raw import RawCall
from attnprobe.capture.rules import Rules
from attnprobe.capture.sdpa import SdpaTap
from attnprobe.capture.segments import follows, is_behind, is_next
from attnprobe.capture.sites import Sites, stack_of
from attnprobe.capture.streams import NO_TEXT, Streams
from attnprobe.capture.trace import Frame, ModuleTrace, within
from attnprobe.models.gate import Gate as GateModule

UNREAD = (
    "a softmax over scores was seen in it, but not where its matrix is multiplied with values "
    "(mixed heads, blocks, or a matrix changed after the softmax)"
)
NO_SOFTMAX = "it weighs values by scores that no softmax was seen to make attention of"
CHUNKED = "its queries come in parts, call by call: their places among the tokens cannot be told"


class Recorder:
    """Captures one model; enter it around every forward pass, one pass at a time.

    Args:
        model: the model.
        on_call: gets every AttentionCall, in order.
        on_block: gets the first site inside a block and the block's output (B, T, d_model); a
            block is the innermost numbered module around a site, as in `layers.3`.
    """

    def __init__(
        self,
        model: nn.Module,
        on_call: Callable[[AttentionCall], None],
        on_block: Callable[[Site, Tensor], None],
    ) -> None:
        self.model = model
        self.on_call, self.on_block = on_call, on_block
        self.sites = Sites()
        self._trace = ModuleTrace(model, _unseen(self._on_exit))
        self._tap = SdpaTap(self._on_attention, self._on_linear, self._owner, self._on_unread)
        self.unread: dict[str, str] = {}  # paths of softmaxes whose product was not seen
        self._interface = InterfaceTap(
            model, _unseen(self._on_attention), self._on_other, lambda mask: self._rules.known(mask)
        )
        self._kernels = KernelTap(model, self._on_attention)
        self.excluded: dict[str, str] = {}  # paths of attention over other things than tokens
        self._completion = Completion(model, self.sites)
        self._start({})

    @property
    def ran(self) -> set[str]:
        """Paths of the modules that ran in any pass."""
        return self._trace.ran

    def _start(self, streams: dict[str, Documents]) -> None:
        self._streams = Streams(streams)
        self._rules = Rules()
        self._completion.start(self._streams, self._rules)
        self._pending: list[Pending] = []
        self._calls: dict[str, int] = {}
        # the run of a module in which it last called; its tensors go when it ends
        self._called: WeakValueDictionary[str, Frame] = WeakValueDictionary()
        self._early_gates: dict[str, list[Gate]] = {}
        self._blocks: dict[str, Site] = {}
        self._sizes: set[tuple[str, int, int]] = set()  # of the calls that hold no matrix

    def watch(self, streams: dict[str, Documents]) -> Recorder:
        """Sets the documents of the next pass, by stack; "" is the stream of the tokens."""
        self._start(streams)
        return self

    def __enter__(self) -> Recorder:
        self._trace.__enter__()
        self._tap.__enter__()
        self._interface.__enter__()
        self._kernels.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kernels.__exit__(kind, error, traceback)
        self._interface.__exit__(kind, error, traceback)
        self._tap.__exit__(kind, error, traceback)
        self._trace.__exit__(kind, error, traceback)
        if error is None:
            self._flush(lambda pending: True)
            self._look_for_unread()
        self._start({})

    # what the taps report

    def _on_attention(self, raw: RawCall) -> None:
        raw = self._streams.beside_others(raw)
        if not raw.is_matrix:
            raw = replace(raw, mask=self._rules.known(raw.mask))
        self._streams.reads_more |= self._trace.reads_features
        owner = self._owning_frame()
        frame = self._trace.running[-1] if self._trace.running else owner
        if raw.is_matrix:
            frame = owner  # a module of its own may do no more than multiply
        else:
            self._sizes.add((owner.path, raw.query.shape[2], raw.key.shape[2]))
        if self._continue(frame, raw):
            return
        if any(p.frame is frame and _is_next_part(p.given, raw) for p in self._pending):
            self.unread[frame.path] = CHUNKED
        self._flush(lambda pending: pending.frame is frame)  # a call in the same module follows
        count = self._calls[frame.path] = self._calls.get(frame.path, -1) + 1
        path = f"{frame.path}#{count}" if count else frame.path
        is_cross = bool(getattr(frame.module, "is_cross_attention", False))
        is_beside = self._called.get(frame.path) is frame
        if not is_beside and self.sites.goes_on(path, raw.mask):
            mask = replace(raw.mask, causal=True, offset=raw.mask.n_keys - 1)
            untold = None if self._streams.are_whole else UNTOLD
            raw = replace(raw, mask=mask, problem=raw.problem or untold)
        self._called[frame.path] = frame
        frame.calls.append(tuple(raw.query.shape[:3]))
        site = self.sites.name(
            path,
            raw.mask,
            is_cross,
            raw.learned_keys,
            is_beside,
            has_source="decoder" in self._streams.by_stack,
        )
        numbered = [f for f in self._trace.running if f.path.rpartition(".")[2].isdigit()]
        around = [f for f in numbered if f is not frame] or numbered
        if around:
            self._blocks.setdefault(around[-1].path, site)
        folded = unfolded(raw, self._samples(), self._streams.by_stack.get(""))
        pending = Pending(
            raw=folded,
            given=raw,
            was_folded=folded is not raw,
            site=site,
            frame=frame,
            scope=frame.path.rpartition(".")[0],
            gates=self._early_gates.pop(frame.path, []),
        )
        near = self._trace.running[-2:]
        pending.holders = tuple(f.module for f in reversed(near))
        pending.around = [r for f in near for r in f.ran if fits(r, folded.query, folded.output)]
        if raw.weight is not None:
            pending.read(pending.raw.output.transpose(1, 2), raw.weight)
        self._pending.append(pending)

    def _continue(self, frame: Frame, raw: RawCall) -> bool:
        """Whether a call goes on with the last one, on the next piece of the same tensors."""
        last = self._pending[-1] if self._pending else None
        if last is None or last.frame is not frame or last.consumed is not None:
            return False
        length = raw.query.shape[2]
        if last.samples is None and not (stack_of(frame.path) or "").startswith(NO_TEXT):
            texts = {(*own.ids.shape,) for own in self._streams.by_stack.values()}
            last.samples = next((batch for batch, own in texts if own == length), None)
            last.texts = set() if self._streams.reads_more else texts
        if not (is_next if last.samples else follows)(last.pieces[-1], raw):
            return False
        last.pieces.append(raw)
        return True

    def _may_be_samples(self, calls: list[tuple[int, ...]]) -> bool:
        """Whether heads that came one by one may as well be samples, whose heads came as rows."""
        texts = {(own.ids.shape[0], 1, own.ids.shape[1]) for own in self._streams.by_stack.values()}
        return len(set(calls)) == 1 and calls[0] in texts and len(calls) == calls[0][0] > 1

    def _owner(self) -> str:
        return self._owning_frame().path

    def _owning_frame(self) -> Frame:
        """The running module, or the one that it is a bare operation of, as nn.Softmax is."""
        for frame in reversed(self._trace.running):
            parts = (*frame.module.children(), *frame.module.parameters(recurse=False))
            if parts:
                return frame
        return Frame("", self.model, ())

    def _look_for_unread(self) -> None:
        """Takes note of softmaxes that look like attention and were not found to be."""
        modules = dict(self.model.named_modules())
        lengths = self._streams.lengths
        for seen in self._tap.softmaxes:
            own = (seen.path, seen.n_queries, seen.n_keys)
            if seen.was_read or own in self._sizes:
                continue
            is_square = {seen.n_queries, seen.n_keys} <= (lengths or {seen.n_keys})
            is_named = "att" in type(modules.get(seen.path)).__name__.lower()
            if seen.of_scores or (is_square and (is_named or seen.is_other)):
                self.unread.setdefault(seen.path, NO_SOFTMAX if seen.is_other else UNREAD)

    def _on_unread(self, reason: str) -> None:
        self.unread.setdefault(self._owner(), reason)

    def _on_other(self, reason: str) -> None:
        self.excluded[self._trace.running[-1].path if self._trace.running else ""] = reason

    def _samples(self) -> int | None:
        """B, which what is no text tells by the model's first input."""
        if "" in self._streams.by_stack:
            return len(self._streams.by_stack[""].ids)
        given = self._trace.running[0].inputs if self._trace.running else ()
        tensor = next((x for x in given if isinstance(x, Tensor) and x.dim() > 1), None)
        return None if tensor is None else len(tensor)

    def _on_linear(self, input: Tensor, weight: Tensor) -> None:
        running = self._trace.running[-1].path if self._trace.running else ""
        if not isinstance(input, Tensor):
            return
        if self._trace.running:
            input = self._trace.running[-1].whole(input)
        self._match(running, input, weight)
        for frame in self._readers():
            if not any(p.frame is frame for p in self._pending):
                frame.read.append(input)

    def _readers(self) -> list[Frame]:
        """The modules that a linear map belongs to: the running one, and the one it is part of."""
        frames = self._trace.running[-2:]
        bare = len(frames) == 2 and next(frames[1].module.children(), None) is None
        return frames if bare else frames[-1:]

    def _match(self, running: str, input: Tensor, weight: Tensor) -> None:
        for pending in self._pending:
            if pending.consumed is not None:
                pending.read_twice |= pending.raw.weight is None and _is_same(
                    input, pending.consumed
                )
                continue
            if pending.frame.was_given(input) or not within(running, pending.scope):
                continue
            if not pending.join(input):
                continue
            self._fold_again(pending, input)
            consumed = as_heads(
                self._streams.without_padding(input, pending.raw), pending.raw.output
            )
            if consumed is None:
                continue
            if within(running, pending.frame.path) or same_as(consumed, pending.raw.output):
                pending.read(consumed, weight)
                for frame in self._trace.running:
                    if frame is not pending.frame and within(frame.path, pending.frame.path):
                        self._note(pending, frame, None)

    @staticmethod
    def _fold_again(pending: Pending, input: Tensor) -> None:
        """Leaves rows as they were, windows of one head, where W_O is given them like that."""
        if not pending.was_folded:
            return
        consumed = as_heads(input, pending.given.output)
        if consumed is not None and same_as(consumed, pending.given.output):
            pending.fold_again()

    def _on_exit(self, frame: Frame, output: Any) -> None:
        if isinstance(frame.module, GateModule) and isinstance(output, Tensor):
            self._on_gate(frame, read_gate(frame.module, output))
        if self._may_be_samples(frame.calls):
            self.unread.setdefault(frame.path, IN_PIECES)
        for pending in self._pending:
            inside = frame is not pending.frame and within(frame.path, pending.scope)
            if inside and pending.consumed is None and not feeds_forward(frame.path, pending.scope):
                self._note(pending, frame, output)
        if self._trace.running:
            parent = self._trace.running[-1]
            early = Ran.of(frame.path, frame.module, (), output, late=False)
            if early.may_be_gate_of(parent.module):
                parent.ran.append(early)
        self._flush(
            lambda pending: (
                (pending.frame is frame and pending.consumed is not None)
                or pending.scope == frame.path
            )
        )
        if frame.path in self._blocks:
            hidden = output
            if not isinstance(hidden, Tensor):
                hidden = next(iter(output), None) if isinstance(output, (tuple, list)) else None
            if isinstance(hidden, Tensor) and hidden.dim() == 3:
                self.on_block(self._blocks[frame.path], hidden)

    @staticmethod
    def _note(pending: Pending, frame: Frame, output: Any) -> None:
        """Keeps what a module around a call was given and gave."""
        part = Ran.of(frame.path, frame.module, frame.inputs, output, late=True)
        pending.around.append(part)

    def _on_gate(self, frame: Frame, gate: Gate) -> None:
        owner = frame.path.rpartition(".")[0]
        for pending in self._pending:
            if pending.frame.path == owner:
                pending.gates.append(gate)
                return
        self._early_gates.setdefault(owner, []).append(gate)  # G2–G4 run before the attention

    # completing a call

    def _flush(self, ready: Callable[[Pending], bool]) -> None:
        done = [p for p in self._pending if ready(p)]
        self._pending = [p for p in self._pending if p not in done]
        for pending in done:
            pending.join()
            pending.frame.read.clear()
            # under the model's own autocast the figures would be taken in its half precision
            with torch.autocast(pending.raw.query.device.type, enabled=False):
                self.on_call(self._completion.of(pending))


def _is_next_part(last: RawCall, raw: RawCall) -> bool:
    """Whether a call goes on with the next queries, over keys that the last one had too."""
    same = last.value.data_ptr() == raw.value.data_ptr() and last.value.shape == raw.value.shape
    if same and raw.query.shape[2] < raw.key.shape[2]:
        return True
    return is_behind(last.query, raw.query) and not is_behind(last.key, raw.key)


def _unseen(function: Callable[..., None]) -> Callable[..., None]:
    """A function whose own calculations are none of the model's: the taps do not see them."""

    @wraps(function)
    def hidden(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            function(*args)

    return hidden


def _is_same(joined: Tensor, consumed: Tensor) -> bool:
    """Whether a linear map reads the very tensor that another one read."""
    return joined.data_ptr() == consumed.data_ptr() and joined.numel() == consumed.numel()
