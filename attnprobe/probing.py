"""A loaded checkpoint on prepared inputs: the one place where the verbs and the audit measure."""

from __future__ import annotations

from typing import Any

from attnprobe.inputs import Inputs
from attnprobe.result import Result
from attnprobe.scanning import scan
from attnprobe.subject import Subject


def probe(subject: Subject, inputs: Inputs, **options: Any) -> Result:
    """Measures a checkpoint; the result names it and what it was shown.

    Args:
        subject: from `attnprobe.subject.load`.
        inputs: from `attnprobe.inputs.prepare`.
        options: of `attnprobe.scan`.
    """
    result = scan(
        subject.model,
        inputs.tokens,
        attention_mask=inputs.attention_mask,
        token_text=None if subject.vocabulary is None else subject.vocabulary.token,
        **options,
        **inputs.kwargs,
    )
    result.checkpoint = subject.about
    result.input = {**inputs.about, **result.input}
    return result
