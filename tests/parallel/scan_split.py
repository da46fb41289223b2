"""What each process of torchrun runs: scans of split models, saved in a folder of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from split_models import SHARED, tokens
from transformers.distributed import DistributedConfig

import attnprobe
from attnprobe.errors import AttnprobeError


def load(path: Path, plan: Any = "auto") -> Any:
    split = DistributedConfig(tp_plan=plan)
    return transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=split)


def main(folder: Path, names: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    rank = os.environ["RANK"]
    for name in names:
        model = load(folder / name, SHARED if name == "one-key-head" else "auto")
        attnprobe.scan(model, tokens(), batch_size=2).save(folder / f"{name}-{rank}.json")
    said = {}
    copied = attnprobe.scan(load(folder / "grouped", SHARED), tokens())
    said["copied keys"] = copied.not_measured["reason"].iloc[0]
    assert copied.layers["f_attr"].isna().all()
    try:
        attnprobe.scan(load(folder / "grouped"), tokens() + int(rank))
    except AttnprobeError as error:
        said["other tokens"] = str(error)
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
