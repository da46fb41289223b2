"""What a metric is, and the rows it gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from attnprobe.capture.call import AttentionCall, Site
from attnprobe.capture.documents import Documents
from attnprobe.engine.stats import AttentionStats
from attnprobe.logits import Logits

Row = dict[str, Any]


@dataclass
class Tables:
    """Rows by table name, before they become frames; see `attnprobe.result` for the columns."""

    rows: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, table: str, rows: Iterable[Row]) -> None:
        """Appends rows to a table."""
        self.rows.setdefault(table, []).extend(rows)

    def missing(self, metric: str, reason: str, site: Site | None = None) -> None:
        """Says why a figure is null, for a site or for the model."""
        self.add(
            "not_measured",
            [{**(site_key(site) if site else {}), "metric": metric, "reason": reason}],
        )


@dataclass(frozen=True)
class Options:
    """What a user can turn on a metric.

    Attributes:
        epsilon: the share of attention above which a key is a sink.
        pre_gate: take ranks before the gate at G1.
        layer_rank: take ranks of whole layers too, not of their heads only.
    """

    epsilon: float = 0.3
    pre_gate: bool = False
    layer_rank: bool = True


class Metric:
    """Adds up what it is handed and gives tables; merging two is the same as one over both inputs.

    A subclass sets `name` and fills the hooks it needs. Every hook is shown the same documents in
    the same order, batch after batch.
    """

    name: ClassVar[str]
    uses_stats: ClassVar[bool] = False  # whether `attention` reads the engine's statistics
    uses_entropy: ClassVar[bool] = False  # and among them the entropies, which cost more

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def attention(self, call: AttentionCall, stats: AttentionStats | None) -> None:
        """One attention call and what the engine made of it."""

    def block(self, site: Site, hidden: Tensor, documents: Documents) -> None:
        """The output (B, T, d_model) of the block around a site."""

    def logits(self, logits: Logits, tokens: Tensor, documents: Documents) -> None:
        """The model's logits for tokens (B, T), a part of them at a time."""

    def forget(self, site: Site) -> None:
        """Drops the attention figures of a site, whose later calls turned out to be no good."""

    def merge(self, other: Any) -> None:
        """Takes in what another instance saw of the same model on further samples."""
        raise NotImplementedError

    def tables(self) -> Tables:
        """The rows of everything added so far."""
        raise NotImplementedError


def site_key(site: Site, head: int | None = None) -> Row:
    """The columns that say which site and head a row speaks of."""
    return {
        "site": site.path,
        "stack": site.stack,
        "kind": site.kind,
        "layer": site.layer,
        "head": head,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the figures that are there, None where none is."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def model_means(layers: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    """One row a kind of attention with the means over its layers."""
    kinds = sorted({row["kind"] for row in layers}, reverse=True)  # self before cross
    return [
        {
            "kind": kind,
            **{c: mean(row.get(c) for row in layers if row["kind"] == kind) for c in columns},
        }
        for kind in kinds
    ]


def numbers(values: Tensor) -> list[float | None]:
    """A 1-D tensor as floats, None where it is NaN: an empty mean is not a number."""
    return [None if v != v else v for v in values.tolist()]


def float64(values: Tensor) -> Tensor:
    """The same in float64, on the CPU where the device has none."""
    return values.cpu().double() if values.device.type == "mps" else values.double()
