"""What a checkpoint will be measured on, found out before any of its weights is read.

Two checkpoints that will be shown different inputs say little about each other, and minutes of
measuring are no price for finding that out: tokenizer, length and tokens follow from the config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attnprobe.forward import ForwardInputs
from attnprobe.inputs import InputOptions, Inputs, Source, prepare
from attnprobe.loading import folder as folders
from attnprobe.loading import places, pretrained, words
from attnprobe.loading.base import find_base
from attnprobe.loading.folder import Folder
from attnprobe.loading.options import LoadOptions
from attnprobe.subject import Address, Subject, load, of_transformers


def foreseen(
    address: Address, how: LoadOptions, source: Source, asked: InputOptions
) -> dict[str, dict[str, Any]]:
    """The parts of a `Result` that say what was shown, as `compare` looks at them.

    Args:
        address: of a checkpoint on this machine.
        how: it is to be loaded.
        source: of the input.
        asked: of the input.

    Returns:
        `checkpoint` and `input`; `sha256` is missing where the input depends on the weights' type.

    Raises:
        AttnprobeError: it cannot be read, or not be shown what was asked for.
    """
    target = _sketch(address, how)
    return {"checkpoint": target.about, "input": _shown(prepare(target, source, asked))}


def _shown(inputs: Inputs) -> dict[str, Any]:
    whole = ForwardInputs(inputs.tokens, inputs.attention_mask, None, dict(inputs.kwargs))
    about = {**inputs.about, "samples": len(whole), "length": whole.length}
    tensors = [v for v in (whole.tokens, *inputs.kwargs.values()) if isinstance(v, Tensor)]
    if any(values.is_floating_point() for values in tensors):  # cast to the type of the weights
        return about
    return {**about, "sha256": whole.digest()}


def _sketch(address: Address, how: LoadOptions) -> Subject:
    """A checkpoint of transformers without its weights; the project's own are small."""
    config = places.foreign_config(how.model_config)
    place = places.foreign(address.path)
    if config is not None and address.path.is_file():
        folder = Folder(address.path, config, (address.path,))
    elif place is None or how.model_config is not None:
        return load(address, replace(how, device="cpu"))
    else:
        folder = folders.read(place)
    below = folder
    if folder.is_adapter:
        below = folders.read(find_base(folder, offline=how.offline).path)
    loaded = pretrained.sketch(below, how)
    loaded = replace(loaded, base=below if folder.is_adapter else None)
    vocabulary, unread = words.vocabulary(folder, loaded, how)
    return of_transformers(address.name, folder, loaded, vocabulary, unread)
