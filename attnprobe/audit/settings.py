"""Flags over environment over file: the configuration that is in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attnprobe.audit.config import Config, Loaded
from attnprobe.audit.figures import did_you_mean
from attnprobe.errors import InputError

PREFIX = "ATTNPROBE_"
#: Settings that are neither in the configuration nor read here.
ELSEWHERE = ("CACHE",)
OUTSIDE = ("CONFIG", "RULE")
#: Setting, called as its option, to its table and key in the configuration.
KEYS: dict[str, tuple[str, str]] = {
    "preset": ("", "presets"),
    "checkpoints": ("", "checkpoints"),
    "baseline": ("baseline", "file"),
    "allow_different_input": ("baseline", "allow_different_input"),
    **{
        name: ("input", name)
        for name in (
            *("text_file", "chat_template", "tokens", "random_tokens", "repeated_token", "image"),
            *("length", "samples", "seed", "bos", "epsilon"),
        )
    },
    **{
        name: ("run", name)
        for name in (
            *("model_config", "device", "dtype", "device_map", "revision", "offline"),
            *("batch_size", "jobs"),
        )
    },
    **{name: ("output", name) for name in ("format", "plots", "exit_zero")},
    "output": ("output", "files"),
}
_LISTS = ("preset", "checkpoints", "text_file", "image", "output")
#: What is measured on; given in one place, it takes that of the places below out of force.
_SHOWN = ("text_file", "tokens", "random_tokens", "repeated_token", "image")


@dataclass(frozen=True)
class Environment:
    """What `ATTNPROBE_…` variables say.

    Attributes:
        values: settings by name, as text or lists of texts.
        config: the configuration file, None where it is to be searched for.
        rules: bounds, as with --rule.
    """

    values: Mapping[str, Any]
    config: str | None = None
    rules: tuple[str, ...] = ()


def variable(setting: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + setting.upper()


def from_environment(environ: Mapping[str, str]) -> Environment:
    """Reads the environment; lists are separated by commas, an empty variable is none.

    Raises:
        InputError: a variable that begins like ours but is none.
    """
    values: dict[str, Any] = {}
    for name, text in environ.items():
        setting = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or not text.strip() or setting in ELSEWHERE:
            continue
        if setting.lower() in KEYS:
            is_list = setting.lower() in _LISTS
            values[setting.lower()] = _split(text) if is_list else text.strip()
        elif setting not in OUTSIDE:
            known = [variable(s) for s in (*KEYS, *OUTSIDE, *ELSEWHERE)]
            raise InputError(f"there is no variable {name}{did_you_mean(name, known)}")
    return Environment(
        values,
        environ.get(variable("config")) or None,
        tuple(_split(environ.get(variable("rule"), ""))),
    )


def in_force(loaded: Loaded, environment: Environment, flags: Mapping[str, Any]) -> Loaded:
    """The configuration with the environment and the flags on top.

    Paths of the file become relative to the working folder; flags are settings by name, and one
    named `text` (texts to measure on) takes the place of the input of file and environment.

    Raises:
        InputError: the environment holds a value that cannot be.
    """
    tables = _relocated(loaded).config.model_dump(by_alias=True)
    for source, values in ((environment, environment.values), (None, flags)):
        if any(name in values for name in ("text", *_SHOWN)):
            nothing: dict[str, Any] = {name: [] if name in _LISTS else None for name in _SHOWN}
            tables["input"] |= {**nothing, "chat_template": None}
        for name, value in values.items():
            if name not in KEYS:
                continue
            table, key = KEYS[name]
            (tables[table] if table else tables)[key] = value
        try:
            config = Config.model_validate(tables, strict=False)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise _fault(first, source is not None) from None
        tables = config.model_dump(by_alias=True)
    return replace(loaded, config=config)


def _fault(first: Any, is_environment: bool) -> InputError:
    where = tuple(str(part) for part in first["loc"] if isinstance(part, str))
    table, key = ("", where[0]) if len(where) < 2 else where[:2]
    setting = next((s for s, place in KEYS.items() if place == (table, key)), key)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    name = variable(setting) if is_environment else f"--{setting.replace('_', '-')}"
    given = first["input"] if isinstance(first["input"], (str, int, float)) else None
    return InputError(f"{name}: {message}" if given is None else f"{name}={given}: {message}")


def _relocated(loaded: Loaded) -> Loaded:
    """The configuration with the paths of the file made relative to the working folder."""
    config, folder = loaded.config, loaded.folder
    if loaded.path is None:
        return loaded

    def there(name: str | None) -> str | None:
        return None if name is None else str(folder / Path(name).expanduser())

    def output(name: str) -> str:
        head, colon, rest = name.partition(":")
        return f"{head}:{there(rest)}" if colon and head.isalpha() and rest else str(there(name))

    source = config.input
    update: dict[str, Any] = {
        "checkpoints": [_target(name, folder) for name in config.checkpoints],
        "baseline": config.baseline.model_copy(update={"file": there(config.baseline.file)}),
        "input": source.model_copy(
            update={
                "text_file": [str(there(name)) for name in source.text_file],
                "tokens": there(source.tokens),
                "image": [str(there(name)) for name in source.image],
            }
        ),
        "run": config.run.model_copy(update={"shape": there(config.run.shape)}),
        "output": config.output.model_copy(
            update={
                "files": [output(name) for name in config.output.files],
                "plots": there(config.output.plots),
            }
        ),
    }
    return replace(loaded, config=config.model_copy(update=update))


def _target(name: str, folder: Path) -> str:
    """A checkpoint of the file: a path beside it, unless it is the name of a packaged one."""
    path = folder / Path(name).expanduser()
    is_bare = "/" not in name and "\\" not in name and "." not in name
    return name if is_bare and not path.exists() else str(path)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
