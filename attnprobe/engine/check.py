"""Does a captured call, recomposed, give what the module gave? Asked once at every site.

Whether it is made of numbers is asked of every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.capture.attend import by_definition
from attnprobe.capture.call import AttentionCall

ROWS = 4  # queries looked at in the beginning, the middle and the end
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF = 5e-2


def broken(call: AttentionCall) -> str | None:
    """Why nothing can be made of a call, or None."""
    if "all" in call.reasons:
        return call.reasons["all"]
    tokens = call.queries.valid[:, None]  # (B, 1, Tq) what padding holds is nobody's business
    for name in ("query", "key", "value", "output"):
        values = getattr(call, name)
        if bool(torch.isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)))):
            continue  # one number that is none would have spoilt the sum
        finite = torch.isfinite(values).all(-1)  # (B, heads, T)
        if name in ("query", "output"):
            finite = finite | ~tokens
        if not bool(finite.all()):
            return f"the model produced NaN or infinity ({name} of the attention call)"
    return None


def problem(call: AttentionCall) -> str | None:
    """Why the figures of a call cannot be trusted, or None."""
    if reason := broken(call):
        return reason
    tokens = call.queries.valid[:, None]  # (B, 1, Tq)
    length = call.mask.n_queries
    for start in {0, max(0, length // 2 - ROWS // 2), max(0, length - ROWS)}:
        rows = slice(start, min(start + ROWS, length))
        again, seen = recompose(call, rows)
        given = call.output[:, :, rows].to(again)
        counted = (seen & tokens[..., rows])[..., None]
        error = (again - given).abs().masked_fill(~counted, 0).amax()
        largest = float(given.masked_fill(~counted, 0).abs().amax())
        exact = (TOLERANCE.get(x.dtype, HALF) for x in (call.query, call.output))
        allowed = max(exact) * max(1.0, largest)  # autocast gives half of what is whole
        if not float(error) <= allowed:
            return (
                f"the captured call does not give the module's output (off by {float(error):.1e})"
            )
    return None


def recompose(call: AttentionCall, rows: slice) -> tuple[Tensor, Tensor]:
    """(B, H, r, d_v) the attention output of a few queries, and (B, H, r) which see a key."""
    return by_definition(
        call.query,
        call.key,
        call.value,
        call.mask,
        rows,
        call.scale,
        call.softcap,
        call.sinks,
    )
