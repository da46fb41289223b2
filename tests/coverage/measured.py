"""What attnprobe measures of a model, down to every query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnprobe
from attnprobe.capture import Documents
from attnprobe.capture.call import AttentionCall, Site
from attnprobe.engine.stats import AttentionStats
from attnprobe.logits import Logits
from attnprobe.metrics import METRICS
from attnprobe.metrics.base import Metric, Tables
from attnprobe.result import Result


@dataclass
class Call:
    """One attention call as it was measured."""

    site: Site
    stats: AttentionStats
    is_written_out: bool


@dataclass
class Scanned:
    """A scan of one batch: its calls by site, and what the model was given and gave."""

    result: Result
    calls: dict[str, Call]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    logits: Tensor | None  # (B, T, V) as perplexity was handed them

    @property
    def reasons(self) -> dict[str, str]:
        """Why sites were not measured at all."""
        rows = self.result.not_measured.to_dict("records")
        return {str(row["site"]): str(row["reason"]) for row in rows if row["metric"] == "all"}


class Keeping(Metric):
    """Keeps every call's statistics as they are."""

    name = "keeping"
    uses_stats = uses_entropy = True
    last: Keeping

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: dict[str, Call] = {}
        self.given: Tensor | None = None
        Keeping.last = self

    def attention(self, call: AttentionCall, stats: AttentionStats | None) -> None:
        assert stats is not None
        assert call.site.path not in self.calls, "one batch, one call a site"
        self.calls[call.site.path] = Call(call.site, stats, call.is_matrix)

    def logits(self, logits: Logits, tokens: Tensor, documents: Documents) -> None:
        parts = [part for _, part in logits.parts()]
        self.given = torch.cat(parts).unflatten(0, tokens.shape)

    def forget(self, site: Site) -> None:
        self.calls.pop(site.path, None)

    def tables(self) -> Tables:
        return Tables()


def scanned(model: nn.Module, tokens: Tensor, *metrics: str, **options: Any) -> Scanned:
    """Scans in one batch, and keeps what every call gave and what the model was given and gave.

    Args:
        metrics: further ones; "perplexity" makes the model give the logits of every token.
    """
    passes: list[tuple[Any, ...]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passes.append((args, dict(kwargs), output))

    handle = model.register_forward_hook(keep, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METRICS, "keeping", Keeping)
        try:
            result = attnprobe.scan(
                model,
                tokens,
                metrics=["sink", "entropy", "gate", "keeping", *metrics],
                batch_size=len(tokens),
                **options,
            )
        finally:
            handle.remove()
    return Scanned(result, Keeping.last.calls, *passes[-1], Keeping.last.given)
