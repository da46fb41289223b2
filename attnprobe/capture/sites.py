"""What a module path says of an attention layer: its stack, its kind and its number."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attnprobe.capture.call import Site
from attnprobe.capture.documents import Documents
from attnprobe.capture.masks import Mask

STACKS = ("decoder", "vision", "visual", "audio", "encoder", "text")  # vision_encoder: vision
CROSS = re.compile(r"cross|encoder_attn|multihead_attn|encdecattention", re.IGNORECASE)


OTHER_KIND = "it attends to its own tokens in some batches and to others in others: scan them apart"


class Sites:
    """Names the sites of one model in the order in which they are first met."""

    def __init__(self) -> None:
        self._known: dict[str, Site] = {}
        self._causal: set[str] = set()  # paths that some batch of more than one token shows causal

    def name(
        self,
        path: str,
        mask: Mask,
        is_cross: bool,
        learned_keys: int = 0,
        is_beside: bool = False,
        has_source: bool = False,
    ) -> Site:
        """The site of a module path, from its first call.

        A second module in the same numbered block has the block's number too, in a stack that is
        called `decoder 2`; a module that runs again, for layers share their weights, counts on.

        Args:
            path: with `#n` behind it for the n-th further call.
            mask: of the call.
            is_cross: the module says so itself.
            learned_keys: how many of the last keys stand at no position.
            is_beside: the module made another call in the same run.
            has_source: the model reads a second sequence, which may be as long as the first.
        """
        if path not in self._known:
            causal = not mask.sees_future(learned_keys)
            other_side = not mask.causal and mask.n_queries != mask.n_keys - learned_keys
            other_side |= has_source and not causal and self._is_behind_causal(path)
            kind = "cross" if is_cross or other_side or CROSS.search(path) else "self"
            stack = stack_of(path) or _stack_by_mask(causal, kind)
            stack, number = self._place(path, stack, kind, is_beside)
            self._known[path] = Site(path, stack, kind, number, causal)
        return self._known[path]

    def note(
        self, site: Site, mask: Mask, queries: Documents, learned_keys: int, has_source: bool
    ) -> str | None:
        """Takes in what one more call shows of a site; why its calls are not of one kind, or None.

        The first call may have shown too little: a single token is causal and is not, and a
        decoder whose prompts are read both ways is causal without a prompt.

        Args:
            mask: of the call.
            queries: the documents of its queries.
            learned_keys, has_source: as for `name`.
        """
        if site.kind == "self" and not mask.causal and mask.n_queries != mask.n_keys - learned_keys:
            return OTHER_KIND
        if not mask.sees_future(learned_keys):
            if not queries.has_pairs:
                return None
            self._causal.add(site.path)
        elif site.causal:
            site.causal = False
            if site.kind == "self" and has_source and self._is_behind_causal(site.path):
                return OTHER_KIND
        if stack_of(site.path) is None:
            is_decoder = site.path in self._causal
            self._move(site, _stack_by_mask(is_decoder, site.kind))
        return None

    def goes_on(self, path: str, mask: Mask) -> bool:
        """Whether a module that attended causally to its own tokens has one more of them.

        It then sees the keys of a cache, which no mask need tell.
        """
        first = self._known.get(_module(path))
        is_own = first is not None and first.kind == "self" and first.causal
        is_one = mask.n_queries == 1 < mask.n_keys and not mask.causal
        return is_own and is_one and path != _module(path)

    def _move(self, site: Site, base: str) -> None:
        """Puts a site in another stack, with its number where that is free."""
        if site.base == base:
            return
        stack = base + site.stack.removeprefix(site.base)
        taken = {s.layer for s in self if (s.stack, s.kind) == (stack, site.kind)}
        number = site.layer if site.layer not in taken else max(taken) + 1
        site.stack, site.layer = stack, number

    def _is_behind_causal(self, path: str) -> bool:
        """Whether the same block attended causally before, as a decoder does to its own text."""
        near = {_block(path), _parent(path)} - {""}
        return any(
            site.causal and site.kind == "self" and {_block(site.path), _parent(site.path)} & near
            for site in self._known.values()
        )

    def _place(self, path: str, stack: str, kind: str, is_beside: bool) -> tuple[str, int]:
        """The stack and the number in it that no other site of the kind has."""
        number = number_of(path)
        beside = [site for site in self._known.values() if site.kind == kind and site.base == stack]
        in_block = [site for site in beside if _block(site.path) == _block(path)]
        is_again = any(_module(site.path) == _module(path) for site in in_block)
        if in_block and (is_beside or not is_again):
            number = in_block[-1].layer
            rank = sum(site.layer == number for site in beside) + 1
            return f"{stack} {rank}", number
        taken = {site.layer for site in beside if site.stack == stack}
        if number is None or number in taken:
            number = max(taken, default=-1) + 1
        return stack, number

    def __iter__(self) -> Iterator[Site]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)


def _stack_by_mask(is_causal: bool, kind: str) -> str:
    """The stack of a path that names none."""
    return "decoder" if is_causal or kind == "cross" else "encoder"


def _module(path: str) -> str:
    return path.partition("#")[0]


def _parent(path: str) -> str:
    return _module(path).rpartition(".")[0]


def _block(path: str) -> str:
    """The innermost numbered module around a site, the site's own module where there is none."""
    path = _module(path)
    parts = path.split(".")
    numbered = [n for n, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else path


def number_of(path: str) -> int | None:
    """The first number in a module path: that of the layer, where layers are numbered."""
    numbers = (part for part in _module(path).split(".") if part.isdigit())
    return next((int(part) for part in numbers), None)


def stack_of(path: str) -> str | None:
    """The stack that a module path names, None where it names none."""
    for part in path.lower().split("."):
        words = re.split(r"[^a-z]+", part)  # "text" is in text_model, not in context_layers
        for stack in STACKS:
            if stack in words:
                return "vision" if stack == "visual" else stack
    return None
