"""The forward passes of a scan: what the model is given, how it is run, what it gives back."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.capture import Documents
from attnprobe.capture.swap import swapped
from attnprobe.errors import InputError
from attnprobe.logits import LAST_LOGITS

TOKENS_A_BATCH = {"cpu": 4096}
TOKENS_A_BATCH_ACCELERATOR = 16384
VALUES_A_TOKEN = 256  # pixels or features behind one position, as far as models have it in common
DECODER_TOKENS = ("decoder_tokens", "decoder_input_ids")
DECODER_MASK = "decoder_attention_mask"
PATCH_MASK = "pixel_attention_mask"


class ForwardInputs:
    """Everything the forward passes are given, checked and cut into batches."""

    def __init__(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        if not isinstance(tokens, Tensor):
            raise InputError(
                f"tokens must be a tensor of ids (batch, length), not {type(tokens).__name__}: of "
                'a text, tokenizer(text, return_tensors="pt")["input_ids"]'
            )
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
        decoder_mask = kwargs.get(DECODER_MASK)
        for name, real in (
            ("attention_mask is 0", attention_mask),
            (f"{DECODER_MASK} is 0", decoder_mask),
            ("document_ids are negative", None if document_ids is None else document_ids >= 0),
        ):
            if real is not None and not bool((real != 0).any(-1).all()):
                raise InputError(f"a sample has no token: its {name} throughout")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int | None:
        """Tokens of a sample: of what is read first, or else of what a decoder reads."""
        tokens = self.tokens if self.is_text else self.decoder_tokens
        return None if tokens is None else tokens.shape[1]

    @property
    def tokens_a_sample(self) -> int:
        """About how many positions a sample takes in the model, whatever it is made of."""
        first = self.tokens[0].numel()
        return first if self.is_text else -(-first // VALUES_A_TOKEN)

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

    @property
    def packed_ids(self) -> Tensor | None:
        """(B, T) which tokens are of one document, as was said or as their positions tell.

        Models of transformers that are given positions which start anew attend within each run.
        """
        positions = self.kwargs.get("position_ids")
        if self.document_ids is not None or not isinstance(positions, Tensor):
            return self.document_ids
        if positions.shape not in (self.tokens.shape, (1, self.tokens.shape[1])):
            return None
        starts = positions == positions.amin(-1, keepdim=True)
        return starts.cumsum(-1).expand(self.tokens.shape)

    def streams(self) -> dict[str, tuple[Tensor | None, Documents]]:
        """Tokens and documents by stack; "" is the sequence that the model reads first.

        Pixels and sound are no stream, for no position is a token, unless a mask says which of
        their patches are padding.
        """
        found: dict[str, tuple[Tensor | None, Documents]] = {}
        patches = self.kwargs.get(PATCH_MASK)
        if not self.is_text and isinstance(patches, Tensor) and patches.dim() == 2:
            found[""] = (None, Documents.from_mask(patches))
        if self.is_text:
            ones = torch.ones_like(self.tokens)
            mask = ones if self.attention_mask is None else self.attention_mask
            found[""] = (self.tokens, Documents.from_mask(mask, self.packed_ids))
        decoder = self.decoder_tokens
        if decoder is None:
            return found
        decoder_mask = self.kwargs.get(DECODER_MASK)
        decoder_mask = torch.ones_like(decoder) if decoder_mask is None else decoder_mask
        if self.is_text:
            found["encoder"] = found[""]
        return found | {"decoder": (decoder, Documents.from_mask(decoder_mask))}

    def forward(self, model: nn.Module, *, logits: bool = True) -> Any:
        """Calls the model with what its `forward` takes.

        Args:
            model: the model.
            logits: whether those of every token are wanted; a model that can is asked for the last
                token's only, for with a large vocabulary they cost as much as many layers.
        """
        known = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        extra = dict(self.kwargs)
        for argument in () if logits or _drops_queries(model) else LAST_LOGITS:
            if argument in known:
                extra.setdefault(argument, 1)
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
        if "position_ids" in known and "position_ids" not in extra and self._is_padded_left(model):
            assert self.attention_mask is not None
            extra["position_ids"] = (self.attention_mask.long().cumsum(1) - 1).clamp_min(0)
        name = getattr(model, "main_input_name", None)
        # of transformers, whose models do not all take it first
        if isinstance(name, str) and name in known and name not in extra:
            return model(**{name: self.tokens}, **extra)
        return model(self.tokens, **extra)

    def _is_padded_left(self, model: nn.Module) -> bool:
        """Whether a model of transformers would count the padding before a text as positions.

        Some count by the ids of the padding or by the mask themselves, in a way of their own.
        """
        if self.attention_mask is None or not hasattr(model, "main_input_name"):
            return False
        if bool((self.attention_mask[:, 0] != 0).all()):
            return False
        by_ids = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")
        own = (*by_ids, "get_rope_index")
        return not any(hasattr(module, name) for module in model.modules() for name in own)

    def digest(self) -> str:
        """A name for this input: equal inputs have equal ones, however they were batched."""
        sha = hashlib.sha256()
        shown = [self.tokens, self.attention_mask, self.document_ids, self.decoder_tokens]
        more = sorted(set(self.kwargs) - {*DECODER_TOKENS, DECODER_MASK})
        for tensor in (*shown, *(self.kwargs[name] for name in more)):
            if isinstance(tensor, Tensor):
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


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Takes effect for modules compiled before or after; torch before 2.6 knows no such thing."""
    stance = getattr(torch.compiler, "set_stance", None)
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    plainly = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # or flex_attention compiles itself
    has_switch = hasattr(flex, plainly)
    # the import of the compiler takes seconds, and mostly there is nothing compiled
    compiled = "torch._dynamo" in sys.modules or (flex is not None and not has_switch)
    with ExitStack() as undo:
        if stance is not None and compiled:
            undo.enter_context(stance("force_eager"))
        if has_switch:
            undo.enter_context(swapped(flex, plainly, True))
        yield


def _drops_queries(model: nn.Module) -> bool:
    """Whether a model that is asked for the last logit alone leaves the other queries out.

    Layers that share the keys and values of earlier ones can: no later layer needs the others.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "num_kv_shared_layers", 0) for config in configs)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; those that accelerate keeps elsewhere are nowhere."""
    there = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(there, torch.device("cpu"))


def batch_size_for(inputs: ForwardInputs, device: torch.device) -> int:
    """Samples a pass that keep its tokens to some thousands."""
    room = TOKENS_A_BATCH.get(device.type, TOKENS_A_BATCH_ACCELERATOR)
    return max(1, room // max(1, inputs.tokens_a_sample))
