"""What is added up of a call, by blocks of logits or by kernels, and the statistics made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.capture.call import AttentionCall
from attnprobe.engine.coverage import Coverage
from attnprobe.engine.stats import NEVER, AttentionStats, close_row


class Sums:
    """The outputs while they fill up; `other` is the row without the document's first key.

    Args:
        call: what was captured.
        coverage: what its queries see.
        entropy: whether entropies are wanted.
    """

    def __init__(self, call: AttentionCall, coverage: Coverage, *, entropy: bool = True) -> None:
        rows = call.query.shape[:3]  # (B, H, Tq)
        self.call, self.coverage, self.has_entropy = call, coverage, entropy
        self.dtype = torch.promote_types(call.query.dtype, torch.float32)
        like = torch.empty(0, dtype=self.dtype, device=call.query.device)
        self.leading = like.new_full((*rows, coverage.leading.shape[-1]), NEVER)  # logits
        self.other_top = like.new_full(rows, NEVER)
        self.other_lse = like.new_full(rows, NEVER)
        self.other_entropy = like.new_zeros(rows)
        self.mass = like.new_zeros(*rows[:2], call.key.shape[2])
        self.sinks = None if call.sinks is None else call.sinks.to(like).expand(rows)

    def stats(self, engine: str) -> AttentionStats:
        """Puts the first keys back."""
        coverage = self.coverage
        valid = coverage.visible > 0  # (B, h, Tq)
        first_logit = self.leading[..., 0]
        other_lse = self.other_lse.masked_fill_(~coverage.others, NEVER)
        other_entropy = self.other_entropy.clamp_min_(0).masked_fill_(~coverage.others, 0)
        lse, entropy = close_row(first_logit, other_lse, other_entropy)
        if not self.has_entropy:
            entropy = other_entropy = torch.full_like(entropy, torch.nan)
        full, null = lse, torch.zeros_like(lse)
        if self.sinks is not None:
            full = torch.logaddexp(lse, self.sinks)
            null = (self.sinks - full).exp()
        leading = (self.leading - full[..., None]).exp() * coverage.sees  # (B, H, Tq, 4)
        first = leading[..., 0]
        top = torch.maximum(self.other_top, first_logit)

        def kept(values: Tensor) -> Tensor:
            return values.masked_fill(~valid, 0)

        return AttentionStats(
            valid=valid,
            visible=coverage.visible,
            sees_first=coverage.sees[..., 0],
            first=first,
            first4=leading.sum(-1),
            null=kept(null),
            lse=kept(lse),
            entropy=kept(entropy) if self.has_entropy else entropy,
            entropy_nosink=other_entropy,
            mass=self.mass + self._first_mass(first),
            seen=coverage.seen,
            max_logit=top.masked_fill(~valid, -torch.inf).amax(-1),
            engine=engine,
        )

    def _first_mass(self, first: Tensor) -> Tensor:
        """(B, H, Tk) what the first keys get, which is in no block's sums."""
        wide = first if first.device.type == "mps" else first.double()
        at = self.coverage.leading[:, None, :, 0].clamp_min(0).expand_as(first)
        return wide.new_zeros(self.mass.shape).scatter_add_(2, at, wide).to(first.dtype)
