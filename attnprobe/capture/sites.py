"""What a module path says of an attention layer: its stack, its kind and its number."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnprobe.capture.call import Site
from attnprobe.capture.masks import Mask

STACKS = ("encoder", "decoder", "vision", "visual", "audio", "text")
CROSS = re.compile(r"cross|encoder_attn|multihead_attn|encdecattention", re.IGNORECASE)


class Sites:
    """Names the sites of one model in the order in which they are first met."""

    def __init__(self) -> None:
        self._known: dict[str, Site] = {}

    def name(self, path: str, mask: Mask, is_cross: bool, learned_keys: int = 0) -> Site:
        """The site of a module path, from its first call."""
        if path not in self._known:
            causal = not mask.sees_future(learned_keys)
            other_side = not mask.causal and mask.n_queries != mask.n_keys - learned_keys
            kind = "cross" if is_cross or other_side or CROSS.search(path) else "self"
            stack = _stack(path) or ("decoder" if causal or kind == "cross" else "encoder")
            taken = {s.layer for s in self._known.values() if (s.stack, s.kind) == (stack, kind)}
            number = next((int(part) for part in path.split(".") if part.isdigit()), None)
            if number is None or number in taken:
                number = max(taken, default=-1) + 1
            self._known[path] = Site(path, stack, kind, number, causal)
        return self._known[path]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)


def _stack(path: str) -> str | None:
    for part in path.lower().split("."):
        words = re.split(r"[^a-z]+", part)  # "text" is in text_model, not in context_layers
        for stack in STACKS:
            if stack in words:
                return "vision" if stack == "visual" else stack
    return None
