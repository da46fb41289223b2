"""What of a model mixes tokens and was not measured, and why: nothing is missing in silence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import nn

from attnprobe.capture import Site
from attnprobe.capture.trace import within

NO_CALL = "no attention was seen in it: no call of a known function, and no matrix written out"
NOT_RUN = "it did not run on this input"
SCRIPTED = "it is compiled by torch.jit: what it calls cannot be seen"

# "Attention", "CausalSelfAttn", "MHA"
ATTENTION = re.compile(r"attention|attn|\bMHA\b", re.IGNORECASE)

# by what the classes of transformers, and the papers, call them
OTHER_MIXERS = {
    "linear attention: no attention weights": re.compile(
        r"DeltaNet$|DeltaAttention$|LightningAttention$|Linear(Self)?Attention$|RwkvSelfAttention$"
        r"|Retention$|KDA$"
    ),
    "a state space layer: no attention weights": re.compile(
        r"(Mamba\w*|Bamba|FalconH1|SSM|S4|S6)(Mixer|Block|Layer)?2?(?<!DecoderLayer)$"
    ),
    "a convolution: no attention weights": re.compile(r"ShortConv(olution)?$|Hyena\w*$"),
    "a recurrent layer: no attention weights": re.compile(
        r"RecurrentBlock$|[msx]LSTM(Layer|Block|Cell)?$"
    ),
}


def unseen(
    model: nn.Module, seen: Collection[Site], ran: Collection[str], told: Mapping[str, str]
) -> dict[str, str]:
    """The reason by module path, in model order.

    Args:
        model: that was run.
        seen: whose attention was measured, or refused with a reason.
        ran: paths of all modules that ran.
        told: reasons that the taps gave, by path.
    """
    modules = dict(model.named_modules())
    known = {site.path.partition("#")[0] for site in seen}
    reasons = {p: r for p, r in told.items() if not any(within(p, path) for path in known)}
    for path, module in modules.items():
        name = str(getattr(module, "original_name", type(module).__name__))  # of a scripted one
        other = next((r for r, pattern in OTHER_MIXERS.items() if pattern.search(name)), None)
        if other is not None and path in reasons:  # its class tells more than a tap saw of it
            reasons[path] = other
            continue
        if other is None and not ATTENTION.search(name):
            continue
        if any(_related(path, other) for other in (*known, *told)):
            continue
        if other is not None and path in ran:
            reasons[path] = other
        elif other is None:
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            reasons[path] = SCRIPTED if is_scripted else NO_CALL if path in ran else NOT_RUN
    others = {path for path, reason in reasons.items() if reason in OTHER_MIXERS}
    return {
        path: reasons[path]
        for path in modules
        if path in reasons and (path in told or _is_the_one(path, reasons, others))
    }


def _related(path: str, other: str) -> bool:
    return within(path, other) or within(other, path)


def _is_the_one(path: str, reasons: Collection[str], others: Collection[str]) -> bool:
    """Of modules inside each other the innermost attention, the outermost of another mixer."""
    if any(path != other and within(path, other) for other in others):
        return False
    inside = any(path != other and within(other, path) for other in reasons)
    return path in others or not inside
