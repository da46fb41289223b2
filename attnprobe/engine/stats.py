"""What is kept of an attention call: numbers per query and per key, nothing per pair."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
        entropy: (B, H, Tq) in nats, of the row renormalised over real tokens.
        entropy_nosink: (B, H, Tq) the same with the first key left out; meant for queries with
            another visible key.
        mass: (B, H, Tk) attention summed over the valid queries.
        seen: (B, h, Tk) how many valid queries see the key.
        max_logit: (B, H) largest logit over the visible pairs of valid queries, -inf where none.
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

    @property
    def sees_other(self) -> Tensor:
        """(B, h, Tq) valid queries that see a key besides the first of their document."""
        return self.valid & (self.visible > self.sees_first.long())
