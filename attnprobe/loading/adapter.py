"""PEFT adapters over a base model: the model that they make together."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from attnprobe.errors import CheckpointError
from attnprobe.loading import parallel, pretrained
from attnprobe.loading.base import BASE, find_base
from attnprobe.loading.explaining import explained, hushed
from attnprobe.loading.folder import Folder, read
from attnprobe.loading.options import LoadOptions
from attnprobe.loading.pretrained import Loaded


def load(
    folder: Folder, how: LoadOptions, device: torch.device, dtype: torch.dtype | None
) -> Loaded:
    """Loads the base and merges the adapter into its weights.

    Over a quantised base it stays beside them: merged, it would be rounded to their few bits.

    Raises:
        CheckpointError: either cannot be loaded, or the adapter changes the prompt, not weights.
    """
    try:
        import peft
    except ImportError:
        raise CheckpointError(
            f"{folder.path} is a PEFT adapter: pip install 'attnprobe[peft]'"
        ) from None
    if how.tensor_parallel:
        parallel.refuse(folder.path, "a PEFT adapter")
    base = find_base(folder, offline=how.offline)
    below = read(base.path)
    loaded = pretrained.load(below, how, device, dtype)
    library = pretrained.find_transformers(folder)
    with explained(folder), hushed(library):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            both = peft.PeftModel.from_pretrained(loaded.model, str(folder.path))
        for warning in caught:
            if "missing adapter keys" in str(warning.message).lower():
                raise CheckpointError(
                    f"{folder.path} lacks weights of the adapter that its config describes: "
                    "they would be random"
                )
        kind: Any = both.peft_config["default"]
        if kind.is_prompt_learning:
            raise CheckpointError(
                f"{folder.path} is a {kind.peft_type.value} adapter, which changes the prompt and "
                "no weight: measure its base"
            )
        is_merged = loaded.about["quantisation"] is None
        model: Any = both.merge_and_unload(safe_merge=True) if is_merged else both.get_base_model()
    about: dict[str, Any] = {
        **loaded.about,
        "parameters": sum(p.numel() for p in model.parameters()),
        "adapter": {
            "type": kind.peft_type.value,
            "rank": getattr(kind, "r", None),
            "merged": is_merged,
            "base": str(folder.config[BASE]),
            "base_revision": base.commit,
        },
    }
    notes = (*loaded.notes, *filter(None, [base.note]))
    model = model.eval().requires_grad_(False)
    return replace(loaded, model=model, about=about, notes=notes, base=below)
