"""Reads the site around a call: the linear map that consumes its output, and its gate.

The first linear map whose input has H·d_v features after the call is W_O, unless it reads what
the module itself was given (a gate projection does). Its input against the attention output is
the gate: equal, none; one factor a head, a head gate; else an element gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.capture.call import Gate
from attnprobe.models.gate import Gate as GateModule

TINY = 1e-30  # what lies above has all the digits of its type, however small
NO_OUTPUT = "the attention output is 0 somewhere, where no gate can be read by comparison"
NOT_A_GATE = "what W_O is given is not a share of the attention output (a norm, or no sigmoid)"


def as_heads(joined: Tensor, output: Tensor) -> Tensor | None:
    """The input of a linear map as (B, T, H, d_v), or None if it cannot be the call's output.

    Args:
        joined: (B, T, H·d_v), (T, B, H·d_v) or (B·T, H·d_v).
        output: (B, H, T, d_v) of the call.
    """
    batch, heads, length, width = output.shape
    if joined.shape[-1] != heads * width or joined.numel() != output.numel():
        return None
    if joined.dim() == 3 and joined.shape[:2] == (length, batch) and length != batch:
        joined = joined.transpose(0, 1)
    return joined.reshape(batch, length, heads, width)


def same_as(consumed: Tensor, output: Tensor) -> bool:
    """Whether W_O was given the attention output itself: (B, T, H, d) against (B, H, T, d)."""
    return torch.equal(consumed, output.transpose(1, 2))


def reordered(consumed: Tensor, output: Tensor) -> bool:
    """Whether W_O was given the output's numbers in another order: heads merged interleaved, say.

    Args:
        consumed: (B, T, H, d) what W_O was given, taken as heads side by side.
        output: (B, H, T, d) what the attention call gave.
    """
    mine, theirs = consumed[-1, -1].flatten(), output[-1, :, -1].flatten()  # of one token
    same = torch.equal(mine.sort().values, theirs.sort().values)
    return same and not torch.equal(mine, theirs)


def read_gate(module: GateModule, values: Tensor) -> Gate:
    """The exact reading of this project's own gate module."""
    config = module.config
    return Gate(
        values=values,
        position=config.position,
        granularity=config.granularity,
        source=config.source,
        activation=config.activation,
        mode=config.mode,
    )


def compare_gate(consumed: Tensor, output: Tensor, real: Tensor) -> Gate | str | None:
    """The gate of an unknown module by comparison, None if there is none, or why it is unknown.

    Args:
        consumed: (B, T, H, d_v) what W_O was given.
        output: (B, H, T, d_v) what the attention call gave.
        real: (B, T) the tokens that are measured.
    """
    if same_as(consumed, output):
        return None
    before = output.transpose(1, 2).float()  # (B, T, H, d)
    after = consumed.float()
    exact = 1e-4 if consumed.dtype in (torch.float32, torch.float64) else 2e-2
    usable = before.abs() > TINY
    ratio = torch.where(usable, after / before.where(usable, torch.ones_like(before)), torch.nan)
    low, high = ratio.nan_to_num(0.5).aminmax()
    if low < -exact or high > 1 + exact:
        return NOT_A_GATE
    if _is_norm(ratio, before, exact):
        return NOT_A_GATE
    per_head = ratio.nanmean(-1, keepdim=True)  # (B, T, H, 1)
    spread = (ratio - per_head).abs().nan_to_num(0).amax()
    by_head = bool(spread <= exact)
    values = per_head if by_head else ratio
    if bool(values[real].isnan().any()):
        return NO_OUTPUT
    return Gate(
        values=values.nan_to_num(0).clamp(0, 1),  # of padding, which is not measured
        position="G1",
        granularity="head" if by_head else "element",
        source="query",
        activation="sigmoid",
    )


def _is_norm(ratio: Tensor, before: Tensor, exact: float) -> bool:
    """Whether the factors are those of an RMS norm, over all heads or over each: w / rms.

    Args:
        ratio: (B, T, H, d) by what the attention output was multiplied, NaN where not known.
        before: (B, T, H, d) the attention output.
        exact: relative error of a factor.
    """
    for dims in ((-2, -1), (-1,)):
        rms = before.square().mean(dims, keepdim=True).sqrt()  # (B, T, 1 | H, 1)
        if float(rms.amax()) <= (1 + 10 * exact) * float(rms.amin()):
            continue  # a gate that is the same everywhere would look the same
        gain = (ratio * rms).flatten(0, 1)  # (B·T, H, d), w at every token
        low, high = gain.nan_to_num(torch.inf).amin(0), gain.nan_to_num(-torch.inf).amax(0)
        if bool((high - low <= 4 * exact * high.abs()).all()):
            return True
    return False
