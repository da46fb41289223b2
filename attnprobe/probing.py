"""A loaded checkpoint on prepared inputs: the one place where the verbs and the audit measure."""

from __future__ import annotations

from typing import Any

from attnprobe.capture.shards import Shards
from attnprobe.errors import AttnprobeError, InputError, is_out_of_memory
from attnprobe.fitting import misfit
from attnprobe.forward import ForwardInputs, batch_size_for, device_of
from attnprobe.inputs import Inputs
from attnprobe.loading.memory import check_batch
from attnprobe.result import Result
from attnprobe.scanning import scan
from attnprobe.subject import Subject


def probe(subject: Subject, inputs: Inputs, **options: Any) -> Result:
    """Measures a checkpoint; the result names it and what it was shown.

    Args:
        subject: from `attnprobe.subject.load`.
        inputs: from `attnprobe.inputs.prepare`.
        options: of `attnprobe.scan`.

    Raises:
        TooLargeError: a batch does not fit into memory.
        InputError: the model does not run on the input; the line says on which it would.
    """
    if subject.folder is not None and subject.reads == "tokens":
        _check_memory(subject, inputs, options.get("batch_size"))
    try:
        result = scan(
            subject.model,
            inputs.tokens,
            attention_mask=inputs.attention_mask,
            token_text=None if subject.vocabulary is None else subject.vocabulary.token,
            **options,
            **inputs.kwargs,
        )
    except (AttnprobeError, OSError):
        raise
    except Exception as error:
        if is_out_of_memory(error) or Shards.of(subject.model) is not None:
            raise  # other processes would not run a model that is split once more
        if not (told := misfit(subject, inputs, options.get("batch_size"))):
            raise
        raise InputError(told) from error
    result.checkpoint = subject.about
    result.input = {**inputs.about, **result.input}
    return result


def _check_memory(subject: Subject, inputs: Inputs, batch_size: int | None) -> None:
    """Refuses a pass that cannot fit; a model that is spread finds its own room."""
    if hasattr(subject.model, "hf_device_map"):
        return
    device, tokens = device_of(subject.model), inputs.tokens
    size = batch_size or batch_size_for(ForwardInputs(tokens, None, None, {}), device)
    batch = min(size, len(tokens))
    check_batch(subject.name, subject.model, batch, tokens.shape[1], device)
