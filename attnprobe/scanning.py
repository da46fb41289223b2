"""The pass itself: every batch runs forward once, watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from attnprobe.account import Account, Seen
from attnprobe.assembly import ranges
from attnprobe.capture import AttentionCall, Documents, Recorder, Site
from attnprobe.capture.shards import Shards
from attnprobe.capture.trace import within
from attnprobe.engine import measure
from attnprobe.engine.check import broken, problem
from attnprobe.errors import InputError
from attnprobe.forward import ForwardInputs, batch_size_for, device_of, evaluated
from attnprobe.logits import Logits, Narrowed, logits_of
from attnprobe.metrics import METRICS
from attnprobe.metrics.base import Options
from attnprobe.result import Result

NOT_CAUSAL = "attention is not causal: every token sees the one it would be asked to predict"
NO_LOGITS = "the model's output is not logits over its vocabulary for every token"


def scan(
    model: nn.Module,
    tokens: Tensor,
    *,
    metrics: Collection[str] | str | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    layers: Collection[int] | int | None = None,
    heads: Collection[int] | int | None = None,
    batch_size: int | None = None,
    pre_gate: bool = False,
    layer_rank: bool = True,
    epsilon: float = 0.3,
    token_text: Callable[[int], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **forward_kwargs: Any,
) -> Result:
    """Measures every softmax-attention layer of a model on some tokens, in one pass.

    The model runs in eval mode without gradients and is left as it was; memory beside the model's
    own is linear in the length, or one layer's matrix where the model writes it out.

    Args:
        model: any torch module with softmax attention, torch's, another package's or written out;
            it is called as `model(tokens, …)`.
        tokens: (batch, length) integer ids, or the first input of a model that takes others.
        metrics: of "sink", "entropy", "rank", "gate", "activation", "perplexity"; all by default.
        attention_mask: (batch, length), 0 at padding; handed to the model.
        document_ids: (batch, length), equal within a packed document; handed to the model if its
            `forward` takes such an argument. By default, `position_ids` that start anew tell.
        layers: numbers of the layers to measure, negative ones counted from the last.
        heads: numbers of the heads to list; layer figures are over all heads all the same.
        batch_size: samples a forward pass; by default some 4,096 tokens. No figure depends on it.
        pre_gate: ranks before a gate at G1 instead of behind it.
        layer_rank: ranks of whole layers too; those of heads alone cost far less in a wide model.
        epsilon: the share of attention above which a key counts as a sink.
        token_text: gives the text of a token id.
        progress: called with samples done and in all.
        forward_kwargs: further arguments of the model; tensors with the batch as first dimension
            are cut along it. `decoder_tokens` (or `decoder_input_ids`) and
            `decoder_attention_mask` are understood as the second sequence.

    Returns:
        The frames; a figure that could not be taken is missing and explained in `not_measured`.

    Raises:
        InputError: an unknown metric, a layer that is not there, or inputs that do not fit.
        NothingMeasuredError: no figure that was asked for could be taken.
    """
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    if not 0 < epsilon < 1:
        raise InputError(f"epsilon must lie between 0 and 1, not {epsilon}")
    inputs = ForwardInputs(tokens, attention_mask, document_ids, forward_kwargs)
    options = Options(epsilon=epsilon, pre_gate=pre_gate, layer_rank=layer_rank)
    names = list(METRICS) if metrics is None else list(_several(metrics))
    run = Scan(model, names, options, layers=_several(layers), token_text=token_text)
    run.add(inputs, batch_size=batch_size, progress=progress)
    return run.result(heads=_several(heads))


def _several(values: Any) -> Any:
    """A single name or number as a collection of one."""
    return (values,) if isinstance(values, (str, int)) else values


class Scan(Account):
    """A scan that can be fed in parts; `scan` feeds it once.

    Args:
        model: the model.
        names: of the metrics.
        options: of the metrics.
        layers: as for `scan`.
        token_text: as for `scan`.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        options: Options | None = None,
        *,
        layers: Collection[int] | None = None,
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(model, names, options, layers=layers, token_text=token_text)
        self.uses_stats = any(metric.uses_stats for metric in self.metrics)
        self.uses_entropy = any(metric.uses_entropy for metric in self.metrics)
        self.recorder = Recorder(self.model, self._on_call, self._on_block)
        self.unread, self.excluded = self.recorder.unread, self.recorder.excluded
        self.ran = self.recorder.ran
        self.shards = Shards.of(self.model)  # None where this process has all of the model
        self._narrows = True  # whether the model's logits need not be made all at once
        self.batch: ForwardInputs | None = None
        self.streams: dict[str, tuple[Tensor | None, Documents]] = {}
        self.documents: dict[Site, Documents] = {}  # of the queries of this batch

    # feeding

    def add(
        self,
        inputs: ForwardInputs,
        *,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Runs the model over some samples."""
        started = time.perf_counter()
        if self.shards is not None:
            self.shards.agree(inputs.digest())
        device = device_of(self.model)
        size = batch_size or batch_size_for(inputs, device)
        with evaluated(self.model):
            self._resolve_layers(inputs.batch(slice(0, 1), device))
            for start in range(0, len(inputs), size):
                self._pass(inputs.batch(slice(start, start + size), device))
                self._check_layers({site.layer for site in self.seen})
                if progress is not None:
                    progress(min(start + size, len(inputs)), len(inputs))
        self.about["seconds"] += time.perf_counter() - started
        self.about["samples"] += len(inputs)
        self.about |= {"length": inputs.length, "batch_size": size, "device": str(device)}
        self.digests.append(inputs.digest())

    def _pass(self, batch: ForwardInputs) -> None:
        self.batch, self.streams, self.documents = batch, batch.streams(), {}
        documents = {name: documents for name, (_, documents) in self.streams.items()}
        tokens, own = self.streams.get("decoder") or self.streams.get("") or (None, None)
        narrowed = Narrowed(self.model, tokens if self._narrows and self.wants_logits else None)
        with narrowed, self.recorder.watch(documents):
            output = batch.forward(self.model, logits=self.wants_logits)
        self._refuse_unread()
        for name, (ids, texts) in self.streams.items():
            if ids is None:
                continue
            parts = [
                ids[row][texts.index[row] == d] for d, (row, _) in enumerate(texts.names.tolist())
            ]
            self.tokens.setdefault(name, []).extend(part.tolist() for part in parts)
        if not self.wants_logits:
            return
        if tokens is None or own is None:
            self.no_perplexity = NO_LOGITS
        elif not self._predicts:
            self.no_perplexity = NOT_CAUSAL
        elif (logits := self._logits(output, tokens, narrowed)) is None:
            self.no_perplexity = NO_LOGITS
        else:
            for metric in self.metrics:
                metric.logits(logits, tokens, own)

    def _on_call(self, call: AttentionCall) -> None:
        if self.shards is not None:
            call = self.shards.whole(call)
        site = call.site
        self.documents[site] = call.queries
        if site not in self.seen:
            self.seen[site] = self._describe(call)
            check = problem
        else:
            check = broken  # costs little, and one bad sample would spoil the others
        if not self.selected(site) or site in self.refused:
            return
        if reason := check(call):
            self.refuse(site, reason)
            return
        stats = None
        if self.uses_stats:
            stats = measure(call, entropy=self.uses_entropy)
            self.engines.add(stats.engine)
        for metric in self.metrics:
            metric.attention(call, stats)

    def _refuse_unread(self) -> None:
        """Where one attention of a module was not found, the others would pass for all of it."""
        for path, reason in self.unread.items():
            for site in self.seen:
                if within(path, site.path.partition("#")[0]) and site not in self.refused:
                    self.refuse(site, reason)

    def _describe(self, call: AttentionCall) -> Seen:
        def stream(documents: Documents) -> str | None:
            return next((n for n, (_, own) in self.streams.items() if own is documents), None)

        gate = (
            None if call.gate is None else f"{call.gate.granularity} gate at {call.gate.position}"
        )
        return Seen(call.heads, call.key.shape[1], gate, stream(call.queries), stream(call.keys))

    def _on_block(self, site: Site, hidden: Tensor) -> None:
        if not self.selected(site):
            return
        streams = (self.streams.get(site.stack), self.streams.get(""))
        shape, own = hidden.shape[:2], self.documents.get(site)
        known = [] if own is None else [own]  # of sound its padding too
        known += [stream for _, stream in filter(None, streams)]
        known = [documents for documents in known if documents.ids.shape == shape]
        documents = known[0] if known else Documents.whole(*shape)  # as for attention itself
        for metric in self.metrics:
            metric.block(site, hidden, documents.to(hidden.device))

    @property
    def _predicts(self) -> bool:
        """Whether no token sees the one that it predicts; what a tower sees is no token."""
        own = [site for site in self.seen if site.kind == "self"]
        others = ("encoder", "vision", "audio")
        return all(s.causal for s in [s for s in own if s.base not in others] or own)

    def _logits(self, output: Any, tokens: Tensor, narrowed: Narrowed) -> Logits | None:
        """What the model says of every token, None where it does not."""
        assert self.batch is not None
        if narrowed.was_met:
            if (logits := narrowed.logits(output)) is not None:
                return logits
            self._narrows = False
            output = self.batch.forward(self.model)  # once more: this is the first batch
        whole = logits_of(output, self.model, tokens)
        return None if whole is None else Logits.of(whole)

    # which layers

    def _resolve_layers(self, sample: ForwardInputs) -> None:
        """Turns negative numbers into the layers they mean, which only a pass can tell."""
        if self.layers is None or min(self.layers, default=0) >= 0:
            return
        sites: list[Site] = []
        finder = Recorder(self.model, lambda call: sites.append(call.site), lambda *_: None)
        with finder.watch({}):
            sample.forward(self.model, logits=False)
        there = sorted({site.layer for site in sites})
        known = dict(zip(range(-len(there), 0), there, strict=True))
        self.layers = sorted({known.get(layer, layer) for layer in self.layers})
        self._check_layers(there)

    def _check_layers(self, there: Collection[int]) -> None:
        if self.layers is None:
            return
        absent = [layer for layer in self.layers if layer not in there]
        if absent and there:
            raise InputError(
                f"no attention layer {', '.join(map(str, absent))}: this model has "
                f"{ranges(sorted(there))}"
            )
