"""What is kept of an attention call: numbers per query and per key, nothing per pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NEVER = -1e30  # stands for a logit of -inf: 0 · ln 0 stays 0 instead of NaN


@dataclass(frozen=True, eq=False)
class AttentionStats:
    """The statistics of one call over B rows, H heads, Tq queries and Tk keys.

    h stands for H, or for 1 where all heads share the mask. Rows of `valid` that are False hold 0
    in every other field. Definitions: docs/definitions.md.

    Attributes:
        valid: (B, h, Tq) a real token that sees at least one key, decided from the mask.
        visible: (B, h, Tq) n(i), how many keys the query sees.
        sees_first: (B, h, Tq) whether the first key of its document is among them.
        first: (B, H, Tq) attention on the first key of the query's document.
        first4: (B, H, Tq) attention on the first four keys of the document.
        null: (B, H, Tq) 1 minus the row's sum, the share of a learned sink logit.
        lse: (B, H, Tq) log-sum-exp of the visible logits, a learned sink left out.
        entropy: (B, H, Tq) in nats, of the row renormalised over real tokens; NaN throughout if
            entropies were not asked for.
        entropy_nosink: (B, H, Tq) the same with the first key left out; meant for queries with
            another visible key; NaN likewise.
        mass: (B, H, Tk) attention summed over the valid queries.
        seen: (B, h, Tk) how many valid queries see the key.
        max_logit: (B, H) largest logit over the visible pairs of valid queries, -inf where none.
        engine: which one it was.
    """

    valid: Tensor
    visible: Tensor
    sees_first: Tensor
    first: Tensor
    first4: Tensor
    null: Tensor
    lse: Tensor
    entropy: Tensor
    entropy_nosink: Tensor
    mass: Tensor
    seen: Tensor
    max_logit: Tensor
    engine: str

    @property
    def sees_other(self) -> Tensor:
        """(B, h, Tq) valid queries that see a key besides the first of their document."""
        return self.valid & (self.visible > self.sees_first.long())


def close_row(
    first_logit: Tensor, other_lse: Tensor, other_entropy: Tensor
) -> tuple[Tensor, Tensor]:
    """Puts the first key back into rows whose sums were taken without it.

    With p = sigmoid(s_first - L') the first key's share,
    H = (1-p) H' - p ln p - (1-p) ln(1-p). The other way round, from H to H', loses every digit as
    p nears 1.

    Args:
        first_logit: logit of the first key, `NEVER` where it is not seen.
        other_lse: L', `NEVER` where no other key is seen.
        other_entropy: H', 0 where no other key is seen.

    Returns:
        L and H of the whole rows.
    """
    odds = first_logit - other_lse
    log_first, log_rest = F.logsigmoid(odds), F.logsigmoid(-odds)
    first, rest = log_first.exp(), log_rest.exp()
    entropy = rest * other_entropy - first * log_first - rest * log_rest
    return torch.logaddexp(other_lse, first_logit), entropy
