"""What a scan has seen so far, and the Result that it makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnprobe.assembly import collected, keep_heads, ranges
from attnprobe.capture import Site
from attnprobe.capture.sites import number_of, stack_of
from attnprobe.errors import InputError, NothingMeasuredError
from attnprobe.metrics import METRICS, Metric, Tables
from attnprobe.metrics.base import Options, Row, site_key
from attnprobe.patches import prefix
from attnprobe.result import Result
from attnprobe.sinks import Sequences, grouped, named
from attnprobe.unseen import unseen

SOME_LAYERS = "only some layers were measured (--layer): the model's figures need them all"
NO_BLOCK = "it is the first attention of no numbered block whose output is (batch, length, width)"


@dataclass
class Seen:
    """What is known of a site once it has been called."""

    heads: int
    key_heads: int
    gate: str | None
    queries: str | None  # the stream its queries come from, None if from no stream
    keys: str | None


class Account:
    """All that is known of a model from the batches that it ran.

    Args:
        model, names, options, layers, token_text: as for `attnprobe.scanning.Scan`.

    Attributes:
        metrics: what adds up the figures.
        seen: the sites that were called.
        refused: those of them that nothing can be said of, and why.
        engines: which reduced the calls.
        tokens: ids by stream and document.
        no_perplexity: why there is none, None where there is.
        unread, excluded: why modules were not measured, by path.
        ran: paths of the modules that ran.
        about: seconds, samples and the like.
        digests: of the inputs.
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
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self.names, self.options = names, options or Options()
        self.layers, self.token_text = layers, token_text
        if layers is not None and not len(layers):
            raise InputError("layers is empty: name a layer, or leave it out for all")
        unknown = [name for name in names if name not in METRICS]
        if unknown or not names:
            raise InputError(
                f"unknown metric {', '.join(unknown) or '(none given)'}: "
                f"choose from {', '.join(METRICS)}"
            )
        self.metrics: list[Metric] = [METRICS[name](self.options) for name in names]
        self.seen: dict[Site, Seen] = {}
        self.refused: dict[Site, str] = {}
        self.engines: set[str] = set()
        self.tokens: dict[str, list[list[int]]] = {}
        self.no_perplexity: str | None = None
        self.unread: dict[str, str] = {}
        self.excluded: dict[str, str] = {}
        self.ran: set[str] = set()
        self.about: dict[str, Any] = {"seconds": 0.0, "samples": 0}
        self.digests: list[str] = []

    def refuse(self, site: Site, reason: str) -> None:
        self.refused[site] = reason
        for metric in self.metrics:
            metric.forget(site)

    @property
    def wants_logits(self) -> bool:
        return "perplexity" in self.names and self.layers is None

    def selected(self, site: Site) -> bool:
        return self.layers is None or site.layer in self.layers

    def merge(self, other: Account) -> None:
        """Takes in what another scan of the same model saw of further samples."""
        for ours, theirs in zip(self.metrics, other.metrics, strict=True):
            ours.merge(theirs)
        self.seen |= other.seen
        for site, reason in (self.refused | other.refused).items():
            self.refuse(site, reason)
        self.unread |= other.unread
        self.excluded |= other.excluded
        self.ran |= other.ran
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
        told = {**self.unread, **self.excluded}
        for path, reason in unseen(self.model, list(self.seen), self.ran, told).items():
            place = {"site": path, "stack": self._stack_of(path), "layer": number_of(path)}
            row = {**place, "kind": "self", "metric": "all", "reason": reason}
            extra.add("not_measured", [row])
        if not self.seen:
            extra.missing("all", "the model made no attention call that can be seen")
        if self.no_perplexity and self.wants_logits:
            extra.missing("ppl", self.no_perplexity)
        if self.layers is not None:
            extra.missing("model", SOME_LAYERS)
        elif self.refused:
            layers = ranges(sorted({site.layer for site in self.refused}))
            extra.missing("model", f"the model's figures need all layers; see layer {layers}")
        blocks = {row["site"] for row in rows["layers"] if "m_act" in row}
        for site in self.seen:
            if "activation" in self.names and self.selected(site) and site.path not in blocks:
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
