"""Fixed-bin counts: quantiles of a stream that merge exactly and need no samples."""

from __future__ import annotations

import torch
from torch import Tensor


class Histogram:
    """Counts per head over fixed bins.

    Args:
        heads: rows of counts.
        edges: (bins + 1,) increasing; what lies outside counts in the outermost bins.
    """

    def __init__(self, heads: int, edges: Tensor) -> None:
        self.edges = edges.double()
        self.counts = torch.zeros(heads, len(edges) - 1, dtype=torch.long)

    def add(self, values: Tensor, where: Tensor) -> None:
        """Counts (H, N) figures where (H, N) is True; a value on an edge falls in the bin above."""
        heads, bins = self.counts.shape
        inner = self.edges[1:-1].to(device=values.device, dtype=values.dtype)
        index = torch.bucketize(values.contiguous(), inner, right=True)
        index += bins * torch.arange(heads, device=values.device)[:, None]
        counts = torch.bincount(index[where], minlength=heads * bins)
        self.counts += counts.view(heads, bins).cpu()

    def quantile(self, q: float, counts: Tensor | None = None) -> Tensor:
        """(H,) the q-quantile, interpolated within its bin; NaN for a head without counts.

        Args:
            q: between 0 and 1.
            counts: (…, bins) instead of this histogram's own, as sums over heads.
        """
        counts = (self.counts if counts is None else counts).double()
        total = counts.sum(-1)
        running = counts.cumsum(-1)
        target = q * total
        bin = torch.searchsorted(running, target[..., None]).squeeze(-1)
        bin = bin.clamp_max(counts.shape[-1] - 1)
        inside = counts.gather(-1, bin[..., None]).squeeze(-1)
        before = running.gather(-1, bin[..., None]).squeeze(-1) - inside
        share = ((target - before) / inside).nan_to_num(0).clamp(0, 1)
        low, high = self.edges[bin], self.edges[bin + 1]
        return torch.where(total > 0, low + share * (high - low), torch.nan)

    def merge(self, other: Histogram) -> None:
        """Adds the counts of another with the same bins."""
        self.counts += other.counts
