"""Mean and scatter of rows that come a few at a time, in float64 and in memory that is kept.

A Gram matrix is symmetric: its lower half is added up, in place and by blocks, which saves three
eighths of the work and every copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 2048
SPLIT = 192  # columns below which a Gram matrix is not worth cutting


class Scratch:
    """Memory for float64 copies of rows, kept: fresh memory would cost as much as the copying."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.double)

    def copy(self, rows: Tensor) -> Tensor:
        """The same (N, n) in float64, until the next copy; on the CPU where the device has none."""
        device = torch.device("cpu") if rows.device.type == "mps" else rows.device
        if self._room.numel() < rows.numel() or self._room.device != device:
            self._room = torch.empty(rows.numel(), dtype=torch.double, device=device)
        return self._room[: rows.numel()].view_as(rows).copy_(rows)


class Scatter:
    """Count, mean and scatter about the mean of rows of n features; merges by Chan's formula.

    Args:
        groups: how many groups of features there are, side by side; what two groups have in common
            is not kept.
    """

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups
        self.count = 0
        self._mean = torch.empty(0)  # (g, n / g)
        self._scatter = torch.empty(0)  # (g, n / g, n / g), the upper half in part only

    def add(self, rows: Tensor, scratch: Scratch | None = None) -> None:
        """Adds (N, n) rows, a few at a time: their float64 copies stay small.

        Args:
            rows: in any real type.
            scratch: where the copies are made.
        """
        scratch = scratch or Scratch()
        for part in rows.split(ROWS_AT_ONCE) if len(rows) else ():
            wide = scratch.copy(part)  # (N, n)
            mean = wide.mean(0)
            self._join(len(part), mean.view(self.groups, -1))
            groups = wide.sub_(mean).unflatten(1, (self.groups, -1)).transpose(0, 1)
            for scatter, own in zip(self._scatter, groups, strict=True):
                add_lower(scatter, own.mT, own)

    def merge(self, other: Scatter) -> None:
        """Adds the rows of another."""
        if other.count:
            self._join(other.count, other._mean.to(self._mean.device if self.count else "cpu"))
            self._scatter += other._scatter.to(self._scatter.device)

    def _join(self, count: int, mean: Tensor) -> None:
        """Takes in the number and the mean of further rows, whose scatter has yet to be added."""
        if not self.count:
            self.count, self._mean = count, mean.clone()
            self._scatter = mean.new_zeros(*mean.shape, mean.shape[1])
            return
        total = self.count + count
        shift, weight = mean - self._mean, self.count * count / total
        self._scatter.baddbmm_(shift[:, :, None], shift[:, None, :], alpha=weight)
        self._mean += shift * (count / total)
        self.count = total

    def by_group(self, groups: int) -> tuple[Tensor, Tensor]:
        """(g, n / g) means and (g, n / g, n / g) scatters on the CPU, of groups kept or smaller."""
        mean, scatter = self._mean.cpu(), self._scatter.cpu()
        mirror(scatter)
        if groups == self.groups:
            return mean, scatter
        parts = groups // self.groups
        blocks = scatter.unflatten(2, (parts, -1)).unflatten(1, (parts, -1))  # (g, p, w, p, w)
        own = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # (g, p, w, w)
        return mean.view(groups, -1), own.flatten(0, 1)


def add_lower(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a symmetric product to the lower half of a matrix, and to its upper half in part.

    Args:
        out: (n, n).  left: (n, k).  right: (k, n).
    """
    if len(out) < SPLIT:
        out.addmm_(left, right)
        return
    cut = len(out) // 2
    add_lower(out[:cut, :cut], left[:cut], right[:, :cut])
    add_lower(out[cut:, cut:], left[cut:], right[:, cut:])
    out[cut:, :cut].addmm_(left[cut:], right[:, :cut])


def mirror(out: Tensor) -> None:
    """Copies the lower half of (…, n, n), as `add_lower` leaves it, to the upper one."""
    n = out.shape[-1]
    if n < SPLIT:
        return
    cut = n // 2
    mirror(out[..., :cut, :cut])
    mirror(out[..., cut:, cut:])
    out[..., :cut, cut:] = out[..., cut:, :cut].mT
