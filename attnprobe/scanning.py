"""The pass itself: every batch runs forward once, watched, and a Result comes out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.assembly import collected, keep_heads, ranges
from attnprobe.capture import AttentionCall, Documents, Recorder, Site
from attnprobe.capture.shards import Shards
from attnprobe.capture.sites import number_of, stack_of
from attnprobe.capture.trace import within
from attnprobe.engine import measure
from attnprobe.engine.check import broken, problem
from attnprobe.errors import InputError, NothingMeasuredError
from attnprobe.forward import ForwardInputs, batch_size_for, device_of, evaluated
from attnprobe.logits import Logits, Narrowed, logits_of
from attnprobe.metrics import METRICS, Metric, Tables
from attnprobe.metrics.base import Options, Row, site_key
from attnprobe.patches import prefix
from attnprobe.result import Result
from attnprobe.sinks import Sequences, grouped, named
from attnprobe.unseen import unseen

SOME_LAYERS = "only some layers were measured (--layer): the model's figures need them all"
NOT_CAUSAL = "attention is not causal: every token sees the one it would be asked to predict"
NO_LOGITS = "the model's output is not logits over its vocabulary for every token"
NO_BLOCK = "it is the first attention of no numbered block whose output is (batch, length, width)"


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


@dataclass
class _Seen:
    """What is known of a site once it has been called."""

    heads: int
    key_heads: int
    gate: str | None
    queries: str | None  # the stream its queries come from, None if from no stream
    keys: str | None


@dataclass
class Scan:
    """A scan that can be fed in parts; `scan` feeds it once.

    Args:
        model: the model.
        names: of the metrics.
        options: of the metrics.
        layers: as for `scan`.
        token_text: as for `scan`.
    """

    model: nn.Module
    names: Sequence[str]
    options: Options = field(default_factory=Options)
    layers: Collection[int] | None = None
    token_text: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        self.model = getattr(self.model, "_orig_mod", self.model)  # what torch.compile wraps
        if self.layers is not None and not len(self.layers):
            raise InputError("layers is empty: name a layer, or leave it out for all")
        unknown = [name for name in self.names if name not in METRICS]
        if unknown or not self.names:
            raise InputError(
                f"unknown metric {', '.join(unknown) or '(none given)'}: "
                f"choose from {', '.join(METRICS)}"
            )
        self.metrics: list[Metric] = [METRICS[name](self.options) for name in self.names]
        self.uses_stats = any(metric.uses_stats for metric in self.metrics)
        self.uses_entropy = any(metric.uses_entropy for metric in self.metrics)
        self.recorder = Recorder(self.model, self._on_call, self._on_block)
        self.shards = Shards.of(self.model)  # None where this process has all of the model
        self.seen: dict[Site, _Seen] = {}
        self.refused: dict[Site, str] = {}
        self.engines: set[str] = set()
        self.tokens: dict[str, list[list[int]]] = {}  # by stream and document
        self.no_perplexity: str | None = None
        self._narrows = True  # whether the model's logits need not be made all at once
        self.batch: ForwardInputs | None = None
        self.streams: dict[str, tuple[Tensor | None, Documents]] = {}
        self.documents: dict[Site, Documents] = {}  # of the queries of this batch
        self.about: dict[str, Any] = {"seconds": 0.0, "samples": 0}
        self.digests: list[str] = []

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
        narrowed = Narrowed(self.model, tokens if self._narrows and self._wants_logits else None)
        with narrowed, self.recorder.watch(documents):
            output = batch.forward(self.model, logits=self._wants_logits)
        self._refuse_unread()
        for name, (ids, texts) in self.streams.items():
            if ids is None:
                continue
            parts = [
                ids[row][texts.index[row] == d] for d, (row, _) in enumerate(texts.names.tolist())
            ]
            self.tokens.setdefault(name, []).extend(part.tolist() for part in parts)
        if not self._wants_logits:
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
        if not self._selected(site) or site in self.refused:
            return
        if reason := check(call):
            self._refuse(site, reason)
            return
        stats = None
        if self.uses_stats:
            stats = measure(call, entropy=self.uses_entropy)
            self.engines.add(stats.engine)
        for metric in self.metrics:
            metric.attention(call, stats)

    def _refuse_unread(self) -> None:
        """Where one attention of a module was not found, the others would pass for all of it."""
        for path, reason in self.recorder.unread.items():
            for site in self.seen:
                if within(path, site.path.partition("#")[0]) and site not in self.refused:
                    self._refuse(site, reason)

    def _refuse(self, site: Site, reason: str) -> None:
        self.refused[site] = reason
        for metric in self.metrics:
            metric.forget(site)

    def _describe(self, call: AttentionCall) -> _Seen:
        def stream(documents: Documents) -> str | None:
            return next((n for n, (_, own) in self.streams.items() if own is documents), None)

        gate = (
            None if call.gate is None else f"{call.gate.granularity} gate at {call.gate.position}"
        )
        return _Seen(call.heads, call.key.shape[1], gate, stream(call.queries), stream(call.keys))

    def _on_block(self, site: Site, hidden: Tensor) -> None:
        if not self._selected(site):
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

    @property
    def _wants_logits(self) -> bool:
        return "perplexity" in self.names and self.layers is None

    def _selected(self, site: Site) -> bool:
        return self.layers is None or site.layer in self.layers

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

    # the result

    def merge(self, other: Scan) -> None:
        """Takes in what another scan of the same model saw of further samples."""
        for ours, theirs in zip(self.metrics, other.metrics, strict=True):
            ours.merge(theirs)
        self.seen |= other.seen
        for site, reason in (self.refused | other.refused).items():
            self._refuse(site, reason)
        self.engines |= other.engines
        for name, documents in other.tokens.items():
            self.tokens.setdefault(name, []).extend(documents)
        self.no_perplexity = self.no_perplexity or other.no_perplexity
        for name in ("seconds", "samples"):
            self.about[name] += other.about[name]
        self.digests += other.digests

    def result(self, heads: Collection[int] | None = None) -> Result:
        """The frames of all samples so far.

        Raises:
            InputError: a head that is in no layer.
            NothingMeasuredError: no figure could be taken.
        """
        untold = {"perplexity"} if self.no_perplexity else set()  # in some batches, so in all
        tables = [metric.tables() for metric in self.metrics if metric.name not in untold]
        tables.append(self._refusals())
        rows = collected(tables, list(self.seen))
        self._explain(rows)
        self._withhold(rows)
        self._name_tokens(rows)
        if heads is not None:
            keep_heads(rows, heads)
        result = Result.from_rows(
            rows,
            checkpoint={"name": type(self.model).__name__},
            architecture=self._architecture(),
            input=self._input(),
            run=self._run(),
        )
        if not result.measured:
            missing = [row for row in rows["not_measured"] if row["metric"] != "model"]
            reasons = list(dict.fromkeys(row["reason"] for row in missing))
            raise NothingMeasuredError(f"nothing could be measured: {'; '.join(reasons[:3])}")
        return result

    def _refusals(self) -> Tables:
        """Rows without figures for refused sites, so that no layer is missing from the tables."""
        tables = Tables()
        for site, reason in self.refused.items():
            tables.missing("all", reason, site)
            tables.add("layers", [site_key(site)])
            tables.add("heads", [site_key(site, h) for h in range(self.seen[site].heads)])
        return tables

    def _withhold(self, rows: dict[str, list[Row]]) -> None:
        """Takes the model's figures away where not all its layers speak: they need them all."""
        kinds = {row["kind"] for row in rows["model"]} if self.layers is not None else set()
        kinds |= {site.kind for site in self.refused}
        whole = () if self.layers is not None else ("ppl", "nll")  # not of the layers
        rows["model"] = [
            row
            if row["kind"] not in kinds
            else {"kind": row["kind"], **{c: row[c] for c in whole if c in row}}
            for row in rows["model"]
        ]

    def _explain(self, rows: dict[str, list[Row]]) -> None:
        """Adds to `not_measured` what no metric could know of."""
        extra = Tables()
        told = {**self.recorder.unread, **self.recorder.excluded}
        for path, reason in unseen(self.model, list(self.seen), self.recorder.ran, told).items():
            place = {"site": path, "stack": self._stack_of(path), "layer": number_of(path)}
            row = {**place, "kind": "self", "metric": "all", "reason": reason}
            extra.add("not_measured", [row])
        if not self.seen:
            extra.missing("all", "the model made no attention call that can be seen")
        if self.no_perplexity and self._wants_logits:
            extra.missing("ppl", self.no_perplexity)
        if self.layers is not None:
            extra.missing("model", SOME_LAYERS)
        elif self.refused:
            layers = ranges(sorted({site.layer for site in self.refused}))
            extra.missing("model", f"the model's figures need all layers; see layer {layers}")
        blocks = {row["site"] for row in rows["layers"] if "m_act" in row}
        for site in self.seen:
            if "activation" in self.names and self._selected(site) and site.path not in blocks:
                extra.missing("m_act", NO_BLOCK, site)
        rows["not_measured"] += extra.rows.get("not_measured", [])

    def _stack_of(self, path: str) -> str:
        """The stack of a module that was not measured: as its path says, or as its neighbours'."""
        others = (site.stack for site in self.seen)
        return stack_of(path) or next(others, "decoder")

    def _name_tokens(self, rows: dict[str, list[Row]]) -> None:
        queries = {
            site.path: self._sequences(site, seen.queries) for site, seen in self.seen.items()
        }
        keys = {site.path: self._sequences(site, seen.keys) for site, seen in self.seen.items()}
        documents = len(next(iter(self.tokens.values()), ())) or self.about["samples"]
        rows["sinks"] = grouped(named(rows["sinks"], keys), documents)
        rows["massive"] = named(rows["massive"], queries)
        rows["layers"] = [{**row, "first_token": keys[row["site"]].first} for row in rows["layers"]]

    def _sequences(self, site: Site, stream: str | None) -> Sequences:
        """What stands in the sequences that a site's queries or keys come from."""
        if stream is None:
            return Sequences(names=prefix(self.model, site.path.partition("#")[0]))
        return Sequences(self.tokens.get(stream, []), text=self.token_text)

    def _architecture(self) -> dict[str, Any]:
        gates = sorted({seen.gate for seen in self.seen.values() if seen.gate})
        return {
            "class": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": len({(site.base, site.layer) for site in self.seen}),
            "heads": max((seen.heads for seen in self.seen.values()), default=0),
            "key_value_heads": max((seen.key_heads for seen in self.seen.values()), default=0),
            "gate": "; ".join(gates) or "none",
        }

    def _input(self) -> dict[str, Any]:
        digest = self.digests[0] if len(self.digests) == 1 else None
        if digest is None:
            digest = hashlib.sha256("".join(self.digests).encode()).hexdigest()
        shown = self.tokens.get("", self.tokens.get("decoder", []))  # of sound, what is written
        counts = [len(document) for document in shown]
        return {
            "samples": self.about["samples"],
            "documents": len(counts),
            "length": self.about.get("length"),
            "tokens": sum(counts),
            "sha256": digest,
        }

    def _run(self) -> dict[str, Any]:
        parameter = next(self.model.parameters(), None)
        return {
            "metrics": list(self.names),
            "layers": None if self.layers is None else sorted(self.layers),
            "epsilon": self.options.epsilon,
            "pre_gate": self.options.pre_gate,
            "engine": ", ".join(sorted(self.engines)) or None,
            "device": self.about.get("device"),
            "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
            "batch_size": self.about.get("batch_size"),
            "seconds": round(self.about["seconds"], 3),
            "torch": str(torch.__version__),
        }
