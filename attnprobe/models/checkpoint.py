"""Checkpoints: written atomically, read without ever running what is in them."""

from __future__ import annotations

import errno
import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnprobe.errors import CheckpointError
from attnprobe.files import replacing
from attnprobe.models.config import ModelConfig
from attnprobe.models.transformer import Decoder, EncoderDecoder, build

FORMAT, VERSION = "attnprobe", 1
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # what training loops nest weights under
_PREFIXES = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile


@dataclass
class Checkpoint:
    """A model and what is known of it.

    Attributes:
        path: the file it was read from.
        config: the model's shape.
        model: in eval mode, on the CPU, in the dtype of the file.
        inputs: state of its tokenizer or task (`attnprobe.tasks.load`), None in foreign files.
        train: step, loss, seed, versions; empty in foreign files.
        resume: optimiser and random state, where training may be taken up again.
    """

    path: Path
    config: ModelConfig
    model: Decoder | EncoderDecoder
    inputs: dict[str, Any] | None = None
    train: dict[str, Any] = field(default_factory=dict)
    resume: dict[str, Any] | None = None


def save_checkpoint(
    path: str | Path,
    model: Decoder | EncoderDecoder,
    inputs: dict[str, Any] | None,
    train: dict[str, Any],
    resume: dict[str, Any] | None = None,
) -> None:
    """Writes a `.pt` that `load_checkpoint` reads; a file in place is replaced only when whole.

    `inputs`, `train` and `resume` may hold strings, numbers, lists, dicts and tensors only: what
    `torch.load(weights_only=True)` reads. A safetensors file that loads as well is made by
    `save_file(model.state_dict(), path, {"attnprobe": json.dumps(model.config.to_dict())})`.

    Raises:
        InputError: the file cannot be written.
    """
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "config": model.config.to_dict(),
        "state_dict": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
        "inputs": inputs,
        "train": train,
    }
    if resume is not None:
        content["resume"] = resume
    with replacing(Path(path)) as partial, partial.open("wb") as file:
        torch.save(content, file)


def load_checkpoint(
    path: str | Path, model_config: str | Path | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Reads what `attnprobe train` wrote, a bare state dict, or a safetensors file.

    Args:
        path: a `.pt` (any suffix but `.safetensors`), a `.safetensors`, or a folder with one.
        model_config: the model's shape, as a mapping or a JSON file. Needed where the file has
            none: a `.pt` holds it under `config`, a `.safetensors` in its metadata under
            `attnprobe` or in a `config.json` beside it. When given, it takes precedence.

    Raises:
        CheckpointError: one line, naming the file and, where it is one tensor's fault, the tensor.
    """
    path = _only_file(Path(path))
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    if model_config is not None:
        content["config"] = _read_config(model_config)
    if content.get("config") is None:
        raise CheckpointError(
            f"{path} holds weights but not the model's shape; give it with --model-config FILE.json"
        )
    if not isinstance(content["config"], Mapping):
        raise CheckpointError(f"{path}: the model config must be a mapping")
    try:
        config = ModelConfig.from_dict(content["config"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for part in ("inputs", "train"):
        if not isinstance(content.get(part) or {}, dict):
            raise CheckpointError(f"{path}: its {part} must be a mapping")
    model = _assemble(path, config, content.get("state_dict"))
    return Checkpoint(
        path=path,
        config=config,
        model=model,
        inputs=content.get("inputs"),
        train=content.get("train") or {},
        resume=content.get("resume"),
    )


def read_state_dict(path: Path) -> dict[str, Any]:
    """The tensors of a `.pt` or `.safetensors` by name, without what training loops wrap them in.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    state = content.get("state_dict")
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(f"{path} holds no state dict")
    return state


def _only_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        what = "is no regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; check the path")
    found = sorted(p for p in path.iterdir() if p.suffix in (".pt", ".safetensors"))
    if not found:
        raise CheckpointError(
            f"{path} is a folder without a model: "
            "name a .pt or .safetensors, or a folder of transformers"
        )
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise CheckpointError(f"{path} holds several models ({names}); name one of them")
    return found[0]


def _read_pt(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise CheckpointError(f"{path} is no PyTorch checkpoint, or is damaged") from None
        raise CheckpointError(
            f"{path} holds Python objects ({named[1]}), which are never run here; "
            "save the model's state_dict() and plain values only"
        ) from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # the zip reader looked for the end before the start
            raise CheckpointError(f"{path} is cut short") from None
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is no PyTorch checkpoint, or is cut short") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a model's state dict")
    if content.get("format") == FORMAT:
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{path} is of format version {content.get('version')}, this attnprobe reads "
                f"{VERSION}; upgrade attnprobe"
            )
        return content
    config = content.get("config")
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
    return {"state_dict": content, "config": config if isinstance(config, dict) else None}


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or is damaged: {error}") from None
    config: dict[str, Any] | None
    if FORMAT in metadata:
        config = _parse_config(metadata[FORMAT], f"metadata of {path}")
    else:
        beside = path.with_name("config.json")
        config = _read_config(beside) if beside.is_file() else None
    return {"state_dict": state, "config": config}


def _read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read model config {source}: {error}") from None
    return _parse_config(text, str(source))


def _parse_config(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers too long or lists too deep, too
        raise CheckpointError(f"{where}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: the model config must be a JSON object")
    return config


def _assemble(path: Path, config: ModelConfig, state: object) -> Decoder | EncoderDecoder:
    """The model with those weights, checked before memory is taken for it."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state dict")
    weights = {_bare(str(name)): value for name, value in state.items()}
    if config.n_layers > len(weights):
        raise CheckpointError(
            f"{path} does not fit its model config: {config.n_layers} layers, "
            f"{len(weights)} tensors"
        )
    try:
        with torch.device("meta"), _Undrawn():
            model = build(config)
    except (RuntimeError, OverflowError, TypeError):  # a width that no tensor can have
        raise CheckpointError(f"{path}: no model can be as large as its config says") from None
    _check(path, model.state_dict(), weights)
    dtypes = {tensor.dtype for tensor in weights.values()}
    model.load_state_dict(weights, assign=True)
    if len(dtypes) > 1:
        model.float()
    return model.eval().requires_grad_()


class _Undrawn(TorchFunctionMode):
    """Draws no normal weights: for those without memory torch would import its compiler first.

    That takes seconds, as long as all the rest of loading a small model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _bare(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _check(path: Path, expected: Mapping[str, Tensor], weights: Mapping[str, object]) -> None:
    missing = sorted(expected.keys() - weights.keys())
    surplus = sorted(weights.keys() - expected.keys())
    if missing or surplus:
        parts = [
            f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for what, names in (("lacks", missing), ("has an unexpected", surplus))
            if names
        ]
        raise CheckpointError(f"{path} does not fit its model config: it {', and '.join(parts)}")
    for name, reference in expected.items():
        tensor = weights[name]
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise CheckpointError(f"{path}: {name} is not a tensor of real numbers")
        if tensor.shape != reference.shape:
            raise CheckpointError(
                f"{path} does not fit its model config: {name} is {tuple(tensor.shape)}, "
                f"the config makes it {tuple(reference.shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            what = "NaN" if bool(torch.isnan(tensor).any()) else "infinite values"
            raise CheckpointError(f"{path}: {name} holds {what}; use an earlier checkpoint")
