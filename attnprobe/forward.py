"""The forward passes of a scan: what the model is given, how it is run, what it gives back."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.capture import Documents
from attnprobe.errors import InputError

TOKENS_A_BATCH = {"cpu": 4096}
TOKENS_A_BATCH_ACCELERATOR = 16384
DECODER_TOKENS = ("decoder_tokens", "decoder_input_ids")
DECODER_MASK = "decoder_attention_mask"


class ForwardInputs:
    """Everything the forward passes are given, checked and cut into batches."""

    def __init__(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        if tokens.dim() < 2 or tokens.numel() == 0:
            raise InputError(
                f"tokens must be (batch, length) and not empty, not of shape {tuple(tokens.shape)}"
            )
        self.tokens, self.attention_mask, self.document_ids = tokens, attention_mask, document_ids
        self.kwargs = kwargs
        self.is_text = tokens.dim() == 2 and not tokens.is_floating_point()
        for name, mask in (("attention_mask", attention_mask), ("document_ids", document_ids)):
            if mask is not None and mask.shape != tokens.shape[:2]:
                raise InputError(
                    f"{name} has shape {tuple(mask.shape)}, the tokens {tuple(tokens.shape)}"
                )
        if attention_mask is not None and not bool((attention_mask != 0).any(1).all()):
            raise InputError("a sample has no token: its attention_mask is 0 throughout")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1] if self.is_text else 1

    def batch(self, rows: slice, device: torch.device) -> ForwardInputs:
        """Some samples, on the device of the model."""

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            by_sample = value.dim() > 0 and value.shape[0] == len(self)
            return (value[rows] if by_sample else value).to(device)

        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return ForwardInputs(
            cut(self.tokens), cut(self.attention_mask), cut(self.document_ids), kwargs
        )

    @property
    def decoder_tokens(self) -> Tensor | None:
        return next((self.kwargs[n] for n in DECODER_TOKENS if n in self.kwargs), None)

    def streams(self) -> dict[str, tuple[Tensor, Documents]]:
        """Tokens and documents by stack; "" is the sequence that the model reads first."""
        if not self.is_text:
            return {}
        mask = torch.ones_like(self.tokens) if self.attention_mask is None else self.attention_mask
        own = (self.tokens, Documents.from_mask(mask, self.document_ids))
        decoder = self.decoder_tokens
        if decoder is None:
            return {"": own}
        decoder_mask = self.kwargs.get(DECODER_MASK)
        decoder_mask = torch.ones_like(decoder) if decoder_mask is None else decoder_mask
        return {"": own, "encoder": own, "decoder": (decoder, Documents.from_mask(decoder_mask))}

    def forward(self, model: nn.Module) -> Any:
        """Calls the model with what its `forward` takes."""
        known = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        extra = dict(self.kwargs)
        if "use_cache" in known:
            extra.setdefault("use_cache", False)  # a key–value cache would only cost memory
        if self.attention_mask is not None:
            if "attention_mask" in known or takes_any:
                extra["attention_mask"] = self.attention_mask
            elif not bool((self.attention_mask != 0).all()):
                raise InputError(
                    "the model's forward takes no attention_mask: give samples of one length, "
                    "or measure them one by one"
                )
        if self.document_ids is not None and "document_ids" in known:
            extra["document_ids"] = self.document_ids
        return model(self.tokens, **extra)

    def digest(self) -> str:
        """A name for this input: equal inputs have equal ones, however they were batched."""
        sha = hashlib.sha256()
        for tensor in (self.tokens, self.attention_mask, self.document_ids, self.decoder_tokens):
            if tensor is not None:
                sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                sha.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's own mode and the random state are put back.

    Compiled modules run as they were written: a compiled graph has no calls that could be seen.
    """
    modes = [(module, module.training) for module in model.modules()]
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(gpus)), _uncompiled():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _uncompiled() -> AbstractContextManager[Any]:
    """Takes effect for modules compiled before or after; torch before 2.6 knows no such thing."""
    stance = getattr(torch.compiler, "set_stance", None)
    compiled = "torch._dynamo" in sys.modules  # otherwise nothing is, and the import takes seconds
    return stance("force_eager") if stance is not None and compiled else nullcontext()


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    tensor = next(model.parameters(), None)
    return torch.device("cpu") if tensor is None else tensor.device


def batch_size_for(inputs: ForwardInputs, device: torch.device) -> int:
    """Samples a pass that keep its tokens to some thousands."""
    room = TOKENS_A_BATCH.get(device.type, TOKENS_A_BATCH_ACCELERATOR)
    return max(1, room // max(1, inputs.length))


def logits_of(output: Any, model: nn.Module, tokens: Tensor) -> Tensor | None:
    """(B, T, V) the logits among a model's outputs, None if there are none for every token."""
    named = output.get("logits") if isinstance(output, Mapping) else output
    named = getattr(named, "logits", named)
    if isinstance(named, (tuple, list)) and named:
        named = named[0]
    if not isinstance(named, Tensor) or named.dim() != 3 or named.shape[:2] != tokens.shape:
        return None
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    first = named[:, 0].float()
    if bool((first >= 0).all()) and bool(((first.sum(-1) - 1).abs() < 1e-3).all()):
        return None  # probabilities: a softmax of them would be no model's loss
    is_vocabulary = named.shape[-1] in vocabularies and named.shape[-1] > int(tokens.max())
    return named if is_vocabulary else None
