"""The pass itself: every batch runs forward once, watched, and a Result comes out."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.capture import AttentionCall, Documents, Recorder, Site
from attnprobe.engine import measure
from attnprobe.engine.check import broken, problem
from attnprobe.errors import InputError, NothingMeasuredError
from attnprobe.metrics import METRICS, Metric, Tables
from attnprobe.metrics.base import Options, Row
from attnprobe.result import Result
from attnprobe.sinks import grouped, named

TOKENS_A_BATCH = {"cpu": 4096}
TOKENS_A_BATCH_ACCELERATOR = 16384
DECODER_TOKENS = ("decoder_tokens", "decoder_input_ids")
DECODER_MASK = "decoder_attention_mask"
SOME_LAYERS = "only some layers were measured (--layer): the model's figures need them all"
NOT_CAUSAL = "attention is not causal: every token sees the one it would be asked to predict"
NO_LOGITS = "the model's output is not logits over its vocabulary for every token"
NO_BLOCK = "it is the first attention of no numbered block whose output is (batch, length, width)"
NO_CALL = "no call to scaled_dot_product_attention was seen in it"


def scan(
    model: nn.Module,
    tokens: Tensor,
    *,
    metrics: Collection[str] | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    batch_size: int | None = None,
    pre_gate: bool = False,
    epsilon: float = 0.3,
    max_logit: bool = False,
    token_text: Callable[[int], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **forward_kwargs: Any,
) -> Result:
    """Measures every softmax-attention layer of a model on some tokens, in one pass.

    The model runs in eval mode without gradients and is left as it was; memory beside the model's
    own is linear in the length.

    Args:
        model: any torch module that calls `F.scaled_dot_product_attention` or
            `nn.MultiheadAttention`; it is called as `model(tokens, …)`.
        tokens: (batch, length) integer ids, or the first input of a model that takes others.
        metrics: of "sink", "entropy", "rank", "gate", "activation", "perplexity"; all by default.
        attention_mask: (batch, length), 0 at padding; handed to the model.
        document_ids: (batch, length), equal within a packed document; handed to the model if its
            `forward` takes such an argument.
        layers: numbers of the layers to measure, negative ones counted from the last.
        heads: numbers of the heads to list; layer figures are over all heads all the same.
        batch_size: samples a forward pass; by default some 4,096 tokens. No figure depends on it.
        pre_gate: ranks before a gate at G1 instead of behind it.
        epsilon: the share of attention above which a key counts as a sink.
        max_logit: measure the largest logit too, which takes the slower engine.
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
    inputs = _Inputs(tokens, attention_mask, document_ids, forward_kwargs)
    options = Options(epsilon=epsilon, pre_gate=pre_gate, max_logit=max_logit)
    names = list(METRICS) if metrics is None else list(metrics)
    run = Scan(model, names, options, layers=layers, token_text=token_text)
    run.add(inputs, batch_size=batch_size, progress=progress)
    return run.result(heads=heads)


class _Inputs:
    """Everything the forward passes are given, checked and cut into batches."""

    def __init__(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        if tokens.dim() < 2 or tokens.numel() == 0:
            raise InputError(
                f"tokens must be (batch, length) and not empty, not of shape {tuple(tokens.shape)}"
            )
        self.tokens, self.attention_mask, self.document_ids = tokens, attention_mask, document_ids
        self.kwargs = kwargs
        self.is_text = tokens.dim() == 2 and not tokens.is_floating_point()
        for name, mask in (("attention_mask", attention_mask), ("document_ids", document_ids)):
            if mask is not None and mask.shape != tokens.shape[:2]:
                raise InputError(
                    f"{name} has shape {tuple(mask.shape)}, the tokens {tuple(tokens.shape)}"
                )
        if attention_mask is not None and not bool((attention_mask != 0).any(1).all()):
            raise InputError("a sample has no token: its attention_mask is 0 throughout")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1] if self.is_text else 1

    def batch(self, rows: slice, device: torch.device) -> _Inputs:
        """Some samples, on the device of the model."""

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            by_sample = value.dim() > 0 and value.shape[0] == len(self)
            return (value[rows] if by_sample else value).to(device)

        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return _Inputs(cut(self.tokens), cut(self.attention_mask), cut(self.document_ids), kwargs)

    @property
    def decoder_tokens(self) -> Tensor | None:
        return next((self.kwargs[n] for n in DECODER_TOKENS if n in self.kwargs), None)

    def streams(self) -> dict[str, tuple[Tensor, Documents]]:
        """Tokens and documents by stack; "" is the sequence that the model reads first."""
        if not self.is_text:
            return {}
        mask = torch.ones_like(self.tokens) if self.attention_mask is None else self.attention_mask
        own = (self.tokens, Documents.from_mask(mask, self.document_ids))
        decoder = self.decoder_tokens
        if decoder is None:
            return {"": own}
        decoder_mask = self.kwargs.get(DECODER_MASK)
        decoder_mask = torch.ones_like(decoder) if decoder_mask is None else decoder_mask
        return {"": own, "encoder": own, "decoder": (decoder, Documents.from_mask(decoder_mask))}

    def forward(self, model: nn.Module) -> Any:
        """Calls the model with what its `forward` takes."""
        known = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        extra = dict(self.kwargs)
        if "use_cache" in known:
            extra.setdefault("use_cache", False)  # a key–value cache would only cost memory
        if self.attention_mask is not None:
            if "attention_mask" not in known and not takes_any:
                raise InputError(
                    "the model's forward takes no attention_mask: give samples of one length, "
                    "or measure them one by one"
                )
            extra["attention_mask"] = self.attention_mask
        if self.document_ids is not None and "document_ids" in known:
            extra["document_ids"] = self.document_ids
        return model(self.tokens, **extra)

    def digest(self) -> str:
        """A name for this input: equal inputs have equal ones, however they were batched."""
        sha = hashlib.sha256()
        for tensor in (self.tokens, self.attention_mask, self.document_ids, self.decoder_tokens):
            if tensor is not None:
                sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                sha.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


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
        unknown = [name for name in self.names if name not in METRICS]
        if unknown or not self.names:
            raise InputError(
                f"unknown metric {', '.join(unknown) or '(none given)'}: "
                f"choose from {', '.join(METRICS)}"
            )
        self.metrics: list[Metric] = [METRICS[name](self.options) for name in self.names]
        self.uses_stats = any(metric.uses_stats for metric in self.metrics)
        self.recorder = Recorder(self.model, self._on_call, self._on_block)
        self.seen: dict[Site, _Seen] = {}
        self.refused: dict[Site, str] = {}
        self.engines: set[str] = set()
        self.tokens: dict[str, list[list[int]]] = {}  # by stream and document
        self.no_perplexity: str | None = None
        self.batch: _Inputs | None = None
        self.streams: dict[str, tuple[Tensor, Documents]] = {}
        self.about: dict[str, Any] = {"seconds": 0.0, "samples": 0}
        self.digests: list[str] = []

    # feeding

    def add(
        self,
        inputs: _Inputs,
        *,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Runs the model over some samples."""
        started = time.perf_counter()
        device = _device(self.model)
        size = batch_size or _batch_size(inputs, device)
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

    def _pass(self, batch: _Inputs) -> None:
        self.batch, self.streams = batch, batch.streams()
        documents = {name: documents for name, (_, documents) in self.streams.items()}
        with self.recorder.watch(documents):
            output = batch.forward(self.model)
        for name, (tokens, own) in self.streams.items():
            parts = [
                tokens[row][own.index[row] == d] for d, (row, _) in enumerate(own.names.tolist())
            ]
            self.tokens.setdefault(name, []).extend(part.tolist() for part in parts)
        if "perplexity" in self.names and self.layers is None:
            self._on_output(output, batch)

    def _on_call(self, call: AttentionCall) -> None:
        site = call.site
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
            stats = measure(call, exact_max_logit=self.options.max_logit)
            self.engines.add(stats.engine)
        for metric in self.metrics:
            metric.attention(call, stats)

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
        shape = hidden.shape[:2]
        known = [own for _, own in filter(None, streams) if own.ids.shape == shape]
        documents = known[0] if known else Documents.whole(*shape)  # as for attention itself
        for metric in self.metrics:
            metric.block(site, hidden, documents.to(hidden.device))

    def _on_output(self, output: Any, batch: _Inputs) -> None:
        stream = self.streams.get("decoder") or self.streams.get("")
        if stream is None:
            self.no_perplexity = NO_LOGITS
            return
        tokens, documents = stream
        logits = _logits(output, self.model, tokens)
        predicting = [s for s in self.seen if s.kind == "self" and s.stack != "encoder"]
        predicting = predicting or [s for s in self.seen if s.kind == "self"]
        if not all(site.causal for site in predicting):
            self.no_perplexity = NOT_CAUSAL
        elif logits is None:
            self.no_perplexity = NO_LOGITS
        else:
            for metric in self.metrics:
                metric.logits(logits, tokens, documents)

    # which layers

    def _selected(self, site: Site) -> bool:
        return self.layers is None or site.layer in self.layers

    def _resolve_layers(self, sample: _Inputs) -> None:
        """Turns negative numbers into the layers they mean, which only a pass can tell."""
        if self.layers is None or min(self.layers, default=0) >= 0:
            return
        sites: list[Site] = []
        finder = Recorder(self.model, lambda call: sites.append(call.site), lambda *_: None)
        with finder.watch({}):
            sample.forward(self.model)
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
                f"{_ranges(sorted(there))}"
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
        tables = [metric.tables() for metric in self.metrics]
        rows = _collected(tables, list(self.seen))
        self._explain(rows)
        if self.layers is not None:
            rows["model"] = [{"kind": row["kind"]} for row in rows["model"]]
        self._name_tokens(rows)
        if heads is not None:
            _keep_heads(rows, heads)
        result = Result.from_rows(
            rows,
            checkpoint={"name": type(self.model).__name__},
            architecture=self._architecture(),
            input=self._input(),
            run=self._run(),
        )
        if not result.measured:
            reasons = list(dict.fromkeys(row["reason"] for row in rows["not_measured"]))
            raise NothingMeasuredError(f"nothing could be measured: {'; '.join(reasons[:3])}")
        return result

    def _explain(self, rows: dict[str, list[Row]]) -> None:
        """Adds to `not_measured` what no metric could know of."""
        extra = Tables()
        for site, reason in self.refused.items():
            extra.missing("all", reason, site)
        for path in _unseen(self.model, [site.path for site in self.seen]):
            extra.add("not_measured", [{"site": path, "metric": "all", "reason": NO_CALL}])
        if not self.seen:
            extra.missing("all", "the model made no attention call that can be seen")
        if "perplexity" in self.names and self.no_perplexity and self.layers is None:
            extra.missing("ppl", self.no_perplexity)
        if self.layers is not None:
            extra.missing("model", SOME_LAYERS)
        blocks = {row["site"] for row in rows["layers"] if "m_act" in row}
        for site in self.seen:
            if "activation" in self.names and self._selected(site) and site.path not in blocks:
                extra.missing("m_act", NO_BLOCK, site)
        rows["not_measured"] += extra.rows.get("not_measured", [])

    def _name_tokens(self, rows: dict[str, list[Row]]) -> None:
        queries = {site.path: self._of_stream(seen.queries) for site, seen in self.seen.items()}
        keys = {site.path: self._of_stream(seen.keys) for site, seen in self.seen.items()}
        documents = len(next(iter(self.tokens.values()), ())) or self.about["samples"]
        rows["sinks"] = grouped(named(rows["sinks"], keys, self.token_text), documents)
        rows["massive"] = named(rows["massive"], queries, self.token_text)

    def _of_stream(self, name: str | None) -> list[list[int]]:
        """The tokens of every document of a stream, none for what comes from no stream."""
        return [] if name is None else self.tokens.get(name, [])

    def _architecture(self) -> dict[str, Any]:
        gates = sorted({seen.gate for seen in self.seen.values() if seen.gate})
        return {
            "class": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": len(self.seen),
            "heads": max((seen.heads for seen in self.seen.values()), default=0),
            "key_value_heads": max((seen.key_heads for seen in self.seen.values()), default=0),
            "gate": "; ".join(gates) or "none",
        }

    def _input(self) -> dict[str, Any]:
        digest = self.digests[0] if len(self.digests) == 1 else None
        if digest is None:
            digest = hashlib.sha256("".join(self.digests).encode()).hexdigest()
        counts = [len(document) for document in self.tokens.get("", [])]
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


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's own mode and the random state are put back."""
    modes = [(module, module.training) for module in model.modules()]
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(gpus)):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _device(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _batch_size(inputs: _Inputs, device: torch.device) -> int:
    room = TOKENS_A_BATCH.get(device.type, TOKENS_A_BATCH_ACCELERATOR)
    return max(1, room // max(1, inputs.length))


def _logits(output: Any, model: nn.Module, tokens: Tensor) -> Tensor | None:
    """(B, T, V) the logits among a model's outputs, None if there are none for every token."""
    named = getattr(output, "logits", None)
    if named is None:
        named = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(named, Tensor) or named.dim() != 3 or named.shape[:2] != tokens.shape:
        return None
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    is_vocabulary = named.shape[-1] in vocabularies and named.shape[-1] > int(tokens.max())
    return named if is_vocabulary else None


def _unseen(model: nn.Module, seen: Sequence[str]) -> list[str]:
    """Paths of innermost modules that are attention by name and in which no call was seen."""
    named = [p for p, m in model.named_modules() if "attention" in type(m).__name__.lower()]
    paths = [site.partition("#")[0] for site in seen]

    def related(a: str, b: str) -> bool:
        return a == b or a.startswith(b + ".") or b.startswith(a + ".") or "" in (a, b)

    return [
        path
        for path in named
        if not any(related(path, site) for site in paths)
        and not any(other != path and other.startswith(path + ".") for other in named)
    ]


def _collected(tables: Sequence[Tables], sites: Sequence[Site]) -> dict[str, list[Row]]:
    """The rows of all metrics in model order, those of one head, layer, sample or kind joined."""
    order = {site.path: n for n, site in enumerate(sites)}
    rows: dict[str, list[Row]] = {name: [] for name in ("sinks", "massive", "not_measured")}
    for table in tables:
        for name, part in table.rows.items():
            rows.setdefault(name, []).extend(part)
    for name, keys in (
        ("heads", ("site", "head")),
        ("layers", ("site",)),
        ("samples", ("site", "head", "sample")),
        ("model", ("kind",)),
    ):
        rows[name] = _joined(rows.get(name, []), keys)
    for whole in rows.pop("whole", []):
        rows["model"] = [{**row, **whole} for row in rows["model"] or [{"kind": "self"}]]

    def place(row: Row) -> tuple[int, int, int]:
        head = row.get("head")
        within = -1 if head is None else head  # the layer's row before those of its heads
        return order.get(row.get("site", ""), len(order)), within, row.get("sample", 0)

    for name in ("heads", "layers", "samples", "positions", "gates", "spectra"):
        rows[name] = sorted(rows.get(name, []), key=place)
    return rows


def _joined(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    merged: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        merged.setdefault(tuple(row.get(k) for k in keys), {}).update(row)
    return list(merged.values())


def _keep_heads(rows: dict[str, list[Row]], heads: Collection[int]) -> None:
    there = {row["head"] for row in rows["heads"]}
    absent = sorted(set(heads) - there)
    if absent and there:
        raise InputError(
            f"no head {', '.join(map(str, absent))}: this model has {_ranges(sorted(there))}"
        )
    for name in ("heads", "samples", "positions", "gates", "spectra"):
        rows[name] = [row for row in rows[name] if row.get("head") in (*heads, None)]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
