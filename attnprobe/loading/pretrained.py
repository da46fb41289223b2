"""Makes a model of what a folder of transformers holds, every weight of it accounted for."""

from __future__ import annotations

import re
import tempfile
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attnprobe.adapters import gated_qwen3
from attnprobe.errors import CheckpointError
from attnprobe.loading import memory, number_types, parallel
from attnprobe.loading.explaining import counting, explained, hushed, line
from attnprobe.loading.folder import Folder
from attnprobe.loading.options import LoadOptions
from attnprobe.models.checkpoint import read_state_dict

#: Kinds of models in the order in which one is taken where the config names no class.
KINDS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText", "SpeechSeq2Seq")
_HARMLESS = re.compile(r"(^|\.)\w*pooler\.")  # reads what attention gave, and gives nothing back
_ATTENTION = re.compile(r"(?!.*norm).*(attn|attention)", re.IGNORECASE)
#: What lies in attention modules of old checkpoints and is no weight.
_NO_WEIGHT = re.compile(
    r"(attn|attention|self)\.(masked_)?bias$|inv_freq$|rotary|position_ids$|position_index$"
    r"|_mask$|scales?$|absmax$|quant"
)


@dataclass(frozen=True)
class Loaded:
    """A model of transformers, in eval mode on its device.

    Attributes:
        model: what is measured.
        config: that of transformers.
        about: class, weights that were missing and the like, for `Result.checkpoint`.
        notes: what the user may not expect.
        base: the folder below an adapter.
    """

    model: nn.Module
    config: Any
    about: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    base: Folder | None = None


def load(
    folder: Folder, how: LoadOptions, device: torch.device, dtype: torch.dtype | None
) -> Loaded:
    """Loads a folder that is no adapter.

    Args:
        folder: from `attnprobe.loading.folder.read`.
        how: the options; those on the hub have been followed already.
        device: where the weights go unless there is a device map.
        dtype: of the weights, None as they are.

    Raises:
        CheckpointError: one line on why it cannot be loaded as what it is.
        TooLargeError: it does not fit.
    """
    library = find_transformers(folder)
    with explained(folder), hushed(library), counting(folder):
        config = _config(library, folder, how)
        if how.device_map is None and not how.tensor_parallel:
            memory.check_weights(str(folder.path), folder.weights, dtype, device)
        number_types.check(folder)
        if not how.trust_remote_code and gated_qwen3.is_official(folder.config):
            model = _official(folder, how, device, dtype)
            return Loaded(model, model.config, {**_about(model), "missing": []})
        model, info, kind = _loaded(library, folder, how, config, device, dtype)
        model, missing = _accounted(folder, model, info, kind)
    notes = []
    if missing:
        notes.append(
            f"{folder.path} lacks the head of {kind} ({_some(missing)}): "
            f"the {type(model).__name__} below it is measured"
        )
    if _has_code(folder.config) and not how.trust_remote_code:
        notes.append(
            f"{folder.path} brings code of its own, which was not run: it is measured as the "
            f"{type(model).__name__} of transformers (--trust-remote-code runs it)"
        )
    about = {**_about(model), "missing": missing}
    return Loaded(model.eval().requires_grad_(False), model.config, about, tuple(notes))


def sketch(folder: Folder, how: LoadOptions) -> Loaded:
    """The model of a folder that is no adapter, without its weights: shapes and names alone.

    Raises:
        CheckpointError: it is of a type that cannot be made so.
    """
    library = find_transformers(folder)
    with explained(folder), hushed(library), counting(folder):
        config = _config(library, folder, how)
        kind = _class(library, folder, how, config)
        options = {"trust_remote_code": how.trust_remote_code}
        with torch.device("meta"):
            if hasattr(kind, "_model_mapping"):
                model = kind.from_config(config, **options)
            else:
                model = kind._from_config(config)
    return Loaded(model.eval(), config)


def find_transformers(folder: Folder) -> ModuleType:
    """The library.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{folder.path} is a model of transformers: pip install 'attnprobe[transformers]'"
        ) from None
    return transformers


# which class


def _config(library: ModuleType, folder: Folder, how: LoadOptions) -> Any:
    kind = folder.config.get("model_type")
    is_known = isinstance(kind, str) and kind in _known(library)
    if not folder.is_gguf and not how.trust_remote_code and not is_known:
        if _has_code(folder.config):
            raise CheckpointError(
                f"{folder.path} is a model with code of its own, which runs with "
                "--trust-remote-code only: read it before"
            )
        if not isinstance(kind, str):
            raise CheckpointError(
                f"{folder.path}: its config.json has no model_type, so it is unknown what it is"
            )
        raise CheckpointError(
            f"{folder.path}: transformers {library.__version__} knows no model_type {kind!r}: "
            "pip install -U transformers, or attnprobe.scan(model, tokens) from Python"
        )
    if folder.is_bare:
        config = library.AutoConfig.for_model(**folder.config)
    else:
        config = library.AutoConfig.from_pretrained(
            str(folder.root),
            local_files_only=_stays_local(how),
            trust_remote_code=how.trust_remote_code,
            **_file(folder),
        )
    config._attn_implementation = None  # the library's own choice, and no kernel of the config's
    return config


def _known(library: ModuleType) -> Collection[str]:
    return library.models.auto.configuration_auto.CONFIG_MAPPING


def _has_code(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("auto_map"), Mapping)


def _stays_local(how: LoadOptions) -> bool:
    """Whether nothing may come from the hub: only code that is trusted may lie elsewhere."""
    return how.offline or not how.trust_remote_code


def _file(folder: Folder) -> dict[str, str]:
    return {"gguf_file": folder.path.name} if folder.is_gguf else {}


def _class(library: ModuleType, folder: Folder, how: LoadOptions, config: Any) -> Any:
    """The class whose weights these are, with a `from_pretrained`."""
    names = [f"AutoModelFor{kind}" for kind in KINDS if hasattr(library, f"AutoModelFor{kind}")]
    autos: list[Any] = [getattr(library, name) for name in (*names, "AutoModel")]
    if how.trust_remote_code and _has_code(folder.config):
        for auto in autos:
            if auto.__name__ in folder.config["auto_map"]:
                return auto
    for name in getattr(config, "architectures", None) or ():
        named = getattr(library, str(name), None)
        if isinstance(named, type) and issubclass(named, library.PreTrainedModel):
            return named
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto
    raise CheckpointError(
        f"{folder.path}: transformers {library.__version__} has no model for a {config.model_type}"
    )


def _official(
    folder: Folder, how: LoadOptions, device: torch.device, dtype: torch.dtype | None
) -> Any:
    """A released gated checkpoint, whose code today's transformers does not run."""
    if how.tensor_parallel:
        parallel.refuse(folder.path, "a gated checkpoint of an older library")
    if how.device_map is None:
        return gated_qwen3.load(folder.path, dtype=dtype, device=device)
    _need_accelerate()
    return gated_qwen3.load(folder.path, dtype=dtype, device_map=how.device_map)


# weights


def _loaded(
    library: ModuleType,
    folder: Folder,
    how: LoadOptions,
    config: Any,
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[Any, Mapping[str, Any], str]:
    """The model, what is said of its weights, and the name of its class."""
    kind = _class(library, folder, how, config)
    options: dict[str, Any] = {
        "config": config,
        "dtype": "auto" if dtype is None else dtype,
        "local_files_only": _stays_local(how),
        "trust_remote_code": how.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # told below, by name
        **_file(folder),
        **_placing(folder, how, device, config),
    }
    place = None if folder.is_bare else str(folder.root)
    if folder.is_bare:
        options["state_dict"] = read_state_dict(folder.path)
    scratch = None
    if how.device_map is not None:
        scratch = tempfile.TemporaryDirectory(prefix="attnprobe-offload-")
        options["offload_folder"] = scratch.name
    if not hasattr(kind, "_model_mapping"):
        del options["trust_remote_code"]  # known to the classes that choose one
    model, info = kind.from_pretrained(place, **options)
    if prefix := _wrapper(info["unexpected_keys"], info["missing_keys"]):
        renamed = {f"^{re.escape(prefix)}": ""}
        model, info = kind.from_pretrained(place, **options, key_mapping=renamed)
    if scratch is not None:
        weakref.finalize(model, scratch.cleanup)
    if "device_map" not in options:
        model = model.to(device)
    return model, info, type(model).__name__


def _wrapper(unexpected: Collection[str], missing: Collection[str]) -> str | None:
    """What a training loop wrote before all names: `module.`, `_orig_mod.`, `model.` and so on."""
    wanted = set(missing)
    strange = next(iter(sorted(unexpected)), "")
    ends = [place + 1 for place, letter in enumerate(strange) if letter == "."]
    for prefix in (strange[:end] for end in reversed(ends)):
        bare = {name.removeprefix(prefix) for name in unexpected if name.startswith(prefix)}
        if len(bare) == len(unexpected) and wanted and wanted <= bare:
            return prefix
    return None


def _placing(folder: Folder, how: LoadOptions, device: torch.device, config: Any) -> dict[str, Any]:
    """Where weights go while they are read; nothing for a model that is moved afterwards."""
    if how.tensor_parallel:
        return parallel.splitting(folder, how, config, device)
    if how.device_map is not None:
        _need_accelerate()
        return {"device_map": how.device_map}
    is_quantised = getattr(config, "quantization_config", None) is not None
    if find_spec("accelerate") is not None and (is_quantised or device.type != "cpu"):
        return {"device_map": {"": device}}
    return {}


def _need_accelerate() -> None:
    if find_spec("accelerate") is None:
        raise CheckpointError("--device-map: pip install 'attnprobe[accelerate]'")


def _accounted(
    folder: Folder, model: Any, info: Mapping[str, Any], kind: str
) -> tuple[Any, list[str]]:
    """The part of a model whose weights were all there, and what the rest lacked.

    Raises:
        CheckpointError: a weight that attention depends on was missing, of another shape, or has
            no place in the model.
    """
    if errors := info.get("error_msgs"):
        raise CheckpointError(f"{folder.path} cannot be loaded: {line(errors[0])}")
    if mismatched := sorted(info["mismatched_keys"]):
        first = mismatched[0]
        name, *shapes = [first] if isinstance(first, str) else first
        told = "has another shape"
        if shapes:  # which only some versions of the library tell
            told = "is {}, the config makes it {}".format(*map(tuple, shapes))
        raise CheckpointError(f"{folder.path} does not fit the {kind} of its config: {name} {told}")
    homeless = sorted(name for name in info["unexpected_keys"] if _is_homeless(name, model))
    if homeless:
        raise CheckpointError(
            f"{folder.path} has weights of attention that the {kind} of transformers has no place "
            f"for ({_some(homeless)}): it is another model, whose own code --trust-remote-code "
            "would run"
        )
    base = model.base_model
    inside = "" if base is model else f"{model.base_model_prefix}."
    missing = sorted(name for name in info["missing_keys"] if not _HARMLESS.search(name))
    lost = [name for name in missing if name.startswith(inside)]
    if lost:
        raise CheckpointError(
            f"{folder.path} lacks weights of the {kind} that its config names ({_some(lost)}): "
            "they would be random"
        )
    return (base if missing else model), missing


def _is_homeless(name: str, model: nn.Module) -> bool:
    """Whether a weight belongs to an attention module that is there, but has no place in it."""
    if _NO_WEIGHT.search(name):
        return False
    prefix = getattr(model, "base_model_prefix", "")
    there = {path for path, _ in model.named_modules()}
    for path in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        parts = path.split(".")
        attending = (n for n, part in enumerate(parts[:-1], start=1) if _ATTENTION.match(part))
        if any(".".join(parts[:end]) in there for end in attending):
            return True
    return False


def _about(model: Any) -> dict[str, Any]:
    config = model.config
    quantised = getattr(config, "quantization_config", None)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    method = method or getattr(quantised, "quant_method", None)
    return {
        "architecture": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        "quantisation": None if method is None else str(getattr(method, "value", method)),
        "attention": getattr(config, "_attn_implementation", None),
    }


def _some(names: Collection[str]) -> str:
    first, *others = names
    return first + (f" and {len(others)} more" if others else "")
