"""A model's logits, made some tokens at a time: all of them may be the largest tensor there is.

The model runs with its last linear map narrowed to the last token of each text, and what the map
was given is kept. If what the model then puts out is the map's own result, or that scaled or
soft-capped by a number of its config, the same is done for all other tokens, a part at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnprobe.engine.products import linear

PART = {"cpu": 1 << 23}  # logits made at a time
PART_ACCELERATOR = 1 << 27
FEWEST = 128  # tokens at a time: products of fewer are slow

LAST_LOGITS = ("logits_to_keep", "num_logits_to_keep")  # as transformers calls it, or did


@dataclass(frozen=True)
class Logits:
    """The logits of all tokens.

    Attributes:
        tokens: N, of all texts of the batch, one behind the other.
        vocabulary: V.
        rows: gives the (n, V) logits of a run of tokens.
        device: where they are made.
    """

    tokens: int
    vocabulary: int
    rows: Callable[[slice], Tensor]
    device: torch.device

    @classmethod
    def of(cls, whole: Tensor) -> Logits:
        """Those that a model gave, (B, T, V)."""
        flat = whole.flatten(0, 1)
        return cls(len(flat), flat.shape[1], flat.__getitem__, whole.device)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Runs of tokens and their (n, V) logits; a part is dropped before the next is made."""
        room = PART.get(self.device.type, PART_ACCELERATOR)
        step = max(FEWEST, room // self.vocabulary)
        for start in range(0, self.tokens, step):
            part = slice(start, min(start + step, self.tokens))
            yield part, self.rows(part)


class Narrowed(TorchFunctionMode):
    """Gives a model's map to its vocabulary the last token of each text alone while entered.

    Args:
        model: one that knows logits of some tokens only; any other is left as it is.
        tokens: (B, T) ids; None for not to do so.
    """

    def __init__(self, model: nn.Module, tokens: Tensor | None) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens
        self.weight: Any = None
        if tokens is not None and can_be_narrowed(model):
            self.weight = getattr(unembedding(model), "weight", None)
        self.hidden: Tensor | None = None  # (B, T, d_model) what the map would have been given
        self.bias: Tensor | None = None
        self.last: Tensor | None = None  # (B, 1, V) its result

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear or self.weight is None or self.tokens is None:
            return func(*args, **(kwargs or {}))
        input, weight, bias = _linear_arguments(*args, **(kwargs or {}))
        if weight is not self.weight or input.shape[:-1] != self.tokens.shape:
            return func(input, weight, bias)
        self.hidden, self.bias = input, bias
        result = func(input[:, -1:], weight, bias)
        self.last = result.clone()  # the model may write over its own
        return result

    @property
    def was_met(self) -> bool:
        """Whether the map was called, so that the model's output is of the last tokens only."""
        return self.last is not None

    def logits(self, output: Any) -> Logits | None:
        """Those of all tokens; None where the model does more to them than is known.

        Args:
            output: what the model gave, for the last tokens.
        """
        assert self.tokens is not None
        assert self.hidden is not None
        assert self.last is not None
        assert self.weight is not None
        given = logits_of(output, self.model, self.tokens, length=1)
        if given is None:
            return None
        for behind in _behind(self.model):
            if torch.equal(behind(self.last).to(given), given):
                return self._by_part(self.hidden.flatten(0, 1), self.weight, behind)
        return None

    def _by_part(self, hidden: Tensor, weight: Tensor, behind: Callable[..., Tensor]) -> Logits:
        """Args: hidden (N, d_model), weight (V, d_model), and what the model does to logits."""

        def rows(part: slice) -> Tensor:
            return behind(linear(hidden[part], weight, self.bias))

        return Logits(len(hidden), len(weight), rows, hidden.device)


def logits_of(
    output: Any, model: nn.Module, tokens: Tensor, length: int | None = None
) -> Tensor | None:
    """(B, T, V) the logits among a model's outputs, None if there are none for every token.

    Args:
        output, model: what was given by which.
        tokens: (B, T) ids.
        length: of the output, if not that of the tokens.
    """
    named = output.get("logits") if isinstance(output, Mapping) else output
    named = getattr(named, "logits", named)
    if isinstance(named, (tuple, list)) and named:
        named = named[0]
    if not isinstance(named, Tensor) or named.dim() != 3:
        return None
    if named.shape[:2] != (len(tokens), length or tokens.shape[1]):
        return None
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    first = named[:, 0].float()
    if bool((first >= 0).all()) and bool(((first.sum(-1) - 1).abs() < 1e-3).all()):
        return None  # probabilities: a softmax of them would be no model's loss
    is_vocabulary = named.shape[-1] in vocabularies and named.shape[-1] > int(tokens.max())
    return named if is_vocabulary else None


def unembedding(model: nn.Module) -> nn.Module | None:
    """The module that maps to the vocabulary, as models of transformers tell."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None


def can_be_narrowed(model: nn.Module) -> bool:
    """Whether a model's map to the vocabulary may be given some of the tokens only."""
    head, known = unembedding(model), inspect.signature(model.forward).parameters
    if type(head) not in (nn.Linear, nn.Embedding) or "forward" in vars(head):
        return False  # an adapter's, quantised, or moved to and fro by accelerate
    if any(module is not None and module._forward_hooks for module in (head, model)):
        return False  # a hook may count on all tokens
    return any(name in known for name in LAST_LOGITS)


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return input, weight, bias


def _behind(model: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """What a model may do to its logits: nothing, or what a number of its config says."""
    yield lambda logits: logits
    config: Any = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    for own in filter(None, (config, find() if find is not None else None)):
        for name, value in vars(own).items():
            if "logit" in name and isinstance(value, (int, float)) and value:
                yield from _by_number(float(value))


def _by_number(number: float) -> Iterator[Callable[[Tensor], Tensor]]:
    yield lambda logits: logits * number
    yield lambda logits: logits / number
    yield lambda logits: torch.tanh(logits / number) * number
