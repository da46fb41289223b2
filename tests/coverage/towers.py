"""Vision towers that take images of any size: they attend image by image, or window by window."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from sizes import WIDTH
from torch import Tensor, nn
from zoo import redrawn, shrunk

TOWERS = (
    "cohere_compass",
    "cosmos3_edge",
    "ernie4_5_vl_moe",
    "exaone4_5",
    "glm4v",
    "glm4v_moe",
    "glm5_next",
    "glm_ocr",
    "hunyuan_vl",
    "hy_v4_vl",
    "lfm3_vl",
    "minimax_m3_vl",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
)
PATCH = 4
IMAGES = torch.tensor([[1, 4, 4], [1, 4, 8]])  # frames, rows and columns of patches
SIZES = {
    "hidden_size": WIDTH,
    "out_hidden_size": WIDTH,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "window_size": 16,
    "patch_size": PATCH,
    "image_size": 4 * PATCH,
}


def tower(name: str, **options: Any) -> nn.Module:
    """The small vision tower of a type."""
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[name]()
    given = whole.vision_config
    more = {field: value for field, value in SIZES.items() if field in vars(given)}
    kind = _kind(type(whole).__module__.replace("configuration", "modeling"))
    config = type(given)(**{**shrunk(given), **more})
    return redrawn(kind._from_config(config, **options), name)


def _kind(module: str) -> Any:
    """The class in a module that takes patches and the sizes of the images they are of."""
    from transformers import PreTrainedModel

    return next(
        member
        for name, member in vars(importlib.import_module(module)).items()
        if inspect.isclass(member)
        and issubclass(member, PreTrainedModel)
        and "Vision" in name
        and "grid_thw" in inspect.signature(member.forward).parameters
    )


def patches(model: Any) -> Tensor:
    """(patches of all images, pixels of one)."""
    generator = torch.Generator().manual_seed(0)
    frames = getattr(model.config, "temporal_patch_size", 1)
    return torch.randn(int(IMAGES.prod(1).sum()), 3 * frames * PATCH**2, generator=generator)
