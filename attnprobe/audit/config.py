"""attnprobe.toml, or [tool.attnprobe] in pyproject.toml: what to audit, by which rules.

Every key is checked: one that is not known is an error that names the line and the closest that is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from attnprobe.audit.figures import did_you_mean
from attnprobe.audit.findings import Level, Source
from attnprobe.audit.lines import line_of
from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rules import Globs, Number, Rule
from attnprobe.errors import InputError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "attnprobe.toml"
RULE_KEYS = tuple(name for name in Rule.model_fields if name != "source")
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Words = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Waiver(_Table):
    """Lets a broken rule pass for a while."""

    rule: str = Field(description="the id of a rule, or a glob over ids")
    checkpoints: Globs = Field(default=["*"], description="globs over names and paths")
    reason: str = Field(description="why; it must say something")
    expires: date = Field(
        strict=False, description="the last day on which it holds; behind it, it is void"
    )

    @field_validator("reason")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a waiver takes a reason")
        return value


class Override(_Table):
    """Other bounds for some checkpoints."""

    checkpoints: Globs = Field(description="globs over names and paths; of several, the last wins")
    rules: dict[str, dict[str, Any]] = Field(
        description='by id or glob over ids, the keys of the rule that differ: {"gated/f-attr" = '
        "{max = 0.3}}"
    )
    reason: str | None = Field(default=None, description="a note to the reader")


class Tolerance(_Table):
    """What change of a figure against the baseline is let pass."""

    absolute: Share | None = Field(default=None, description="a change of so much is noise")
    relative: Share | None = Field(
        default=None, description="a change by this share of the old value is noise, too"
    )
    better: Literal["lower", "higher", "same"] | None = Field(
        default=None,
        description="which way is an improvement; same: any change beyond the tolerance counts",
    )
    level: Level | None = Field(
        default=None, description="error by default, warn where better is same"
    )


class Baseline(_Table):
    """The result file that figures are held against."""

    file: str | None = Field(default=None, description="relative to the configuration file")
    allow_different_input: bool = Field(
        default=False, description="compare even what was measured on other tokens, dtype or device"
    )
    metrics: dict[str, Tolerance] = Field(
        default={}, description='by column of the model\'s figures, or "layers.erank" and the like'
    )


class Input(_Table):
    """What checkpoints are measured on; each as the option of the same name."""

    text_file: Words = Field(default=[], description=".txt or .jsonl files")
    chat_template: bool | None = Field(
        default=None, description="texts as conversations, by the model's own template"
    )
    tokens: str | None = Field(default=None, description="a file of token ids or of values")
    random_tokens: bool | None = Field(default=None, description="tokens drawn at random")
    repeated_token: str | None = Field(
        default=None, description="one token over and over: an id, its text, or random"
    )
    image: Words = Field(default=[], description="image files")
    length: int | None = Field(default=None, ge=1, description="tokens a sample")
    samples: int | None = Field(default=None, ge=1, description="how many samples")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="of whatever is drawn")
    bos: bool | None = Field(default=None, description="start samples with the start token")
    epsilon: Number | None = Field(
        default=None, gt=0, lt=1, description="mass above which a key is a sink"
    )


class Run(_Table):
    """How checkpoints are measured."""

    shape: str | None = Field(
        default=None,
        alias="model_config",
        description="a JSON file with the model's shape, for bare state dicts",
    )
    device: str | None = Field(default=None, description="auto, cpu, cuda, cuda:1 or mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None, description="of the weights"
    )
    device_map: str | None = Field(
        default=None, description="how accelerate spreads a model: auto, balanced or sequential"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of models of the hub"
    )
    offline: bool | None = Field(default=None, description="models of the hub from its cache only")
    batch_size: int | None = Field(default=None, ge=1, description="samples a forward pass")
    jobs: int | None = Field(default=None, ge=1, description="processes that measure")
    cache: str | bool | None = Field(
        default=None, description="a folder, or false to measure everything anew"
    )


class Output(_Table):
    """Where the verdict goes."""

    format: str | None = Field(default=None, description="of what goes to stdout")
    files: Words = Field(default=[], description="files to write, as with --output")
    plots: str | None = Field(default=None, description="a folder for plots of trends")
    exit_zero: bool | None = Field(default=None, description="exit with 0 whatever was found")


class Config(_Table):
    """The whole file."""

    presets: Words = Field(default=[], description=f"{', '.join(PRESETS)}, or several of them")
    checkpoints: Words = Field(
        default=[], description="what is audited where the command line names nothing"
    )
    rules: list[dict[str, Any]] = Field(default=[], description="see below")
    overrides: list[Override] = Field(default=[], description="see below")
    waivers: list[Waiver] = Field(default=[], description="see below")
    baseline: Baseline = Field(default=Baseline(), description="see below")
    input: Input = Field(default=Input(), description="see below")
    run: Run = Field(default=Run(), description="see below")
    output: Output = Field(default=Output(), description="see below")

    @field_validator("presets")
    @classmethod
    def _are_known(cls, value: list[str]) -> list[str]:
        for name in value:
            check_preset(name)
        return value


#: Tables of the file and what is in them; docs/audit.md is written from this.
TABLES: dict[str, type[BaseModel]] = {
    "": Config,
    "rules": Rule,
    "overrides": Override,
    "waivers": Waiver,
    "baseline": Baseline,
    "baseline.metrics": Tolerance,
    "input": Input,
    "run": Run,
    "output": Output,
}


@dataclass(frozen=True)
class Loaded:
    """A configuration and the file it was read from, None for that of no file."""

    config: Config = field(default_factory=Config)
    path: Path | None = None
    text: str = ""
    prefix: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """What paths in the file are relative to."""
        return Path() if self.path is None else self.path.parent

    def source(self, *key: str | int, origin: str = "config", why: str | None = None) -> Source:
        """Where in the file a key is; line 1 if it is not there."""
        if self.path is None:
            return Source(origin, why=why)
        return Source(origin, str(self.path), line_of(self.text, (*self.prefix, *key)), why)

    def fault(self, where: Sequence[str | int], message: str) -> InputError:
        """An error about a key of the file, with its line."""
        return InputError(f"{self._line(where)}{_dotted(where)}: {message}")

    def _line(self, where: Sequence[str | int]) -> str:
        if self.path is None:
            return ""
        return f"{self.path}:{line_of(self.text, (*self.prefix, *where))}: "


def check_preset(name: str) -> None:
    """Raises ValueError for a preset that is not known."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}{did_you_mean(name, PRESETS)}")


def find(start: Path) -> Path | None:
    """The nearest configuration in a folder or above it; attnprobe.toml before pyproject.toml."""
    for folder in (start, *start.parents):
        own, shared = folder / NAME, folder / "pyproject.toml"
        if own.is_file():
            return own
        if shared.is_file() and "attnprobe" in _tool(shared):
            return shared
    return None


def load(path: Path) -> Loaded:
    """Reads and checks a configuration.

    Raises:
        InputError: it cannot be read, is no TOML, or holds something that is not known; the
            message says on which line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        data: Any = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # numbers too long or tables too deep, too
        raise InputError(f"{path} is no TOML: {error}") from error
    prefix: tuple[str, ...] = ()
    if path.name == "pyproject.toml":
        prefix = ("tool", "attnprobe")
        tool = data.get("tool")
        data = tool.get("attnprobe", {}) if isinstance(tool, dict) else {}
    try:
        return Loaded(Config.model_validate(data), path, text, prefix)
    except ValidationError as error:
        raise explained(error, Loaded(path=path, text=text, prefix=prefix)) from None


def explained(
    error: ValidationError, loaded: Loaded, under: Sequence[str | int] = ()
) -> InputError:
    """The first fault of a table, as one line that says where it is and what would do."""
    faults = error.errors(include_url=False)
    first = faults[0]
    where = (*under, *(part for part in first["loc"] if isinstance(part, (str, int))))
    if first["type"] == "extra_forbidden":
        known = did_you_mean(str(where[-1]), _keys(where[:-1]))
        message = f"there is no such key{known}"
    else:
        message = fault_of(first)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return loaded.fault(where, f"{message}{more}")


def fault_of(error: ErrorDetails) -> str:
    """What is wrong with a value, in words."""
    if error["type"] == "missing":
        return "it is missing"
    if error["type"].startswith("date_"):
        return "should be a day, as in 2030-04-01"
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"there is no {error['input']!r}{did_you_mean(str(error['input']), choices)}"
    return error["msg"].removeprefix("Value error, ").removeprefix("Input ")


def _keys(where: Sequence[str | int]) -> list[str]:
    """The keys that the table at a place may have."""
    names = [part for part in where if isinstance(part, str)]
    table = TABLES.get(".".join(names[:2])) or TABLES.get(names[0] if names else "")
    if table is None:
        return []
    named = table.model_fields.items()
    return [field.alias or name for name, field in named if name != "source"]


def _dotted(where: Sequence[str | int]) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _tool(path: Path) -> Mapping[str, Any]:
    """[tool] of a pyproject.toml; of one that cannot be read, nothing: it is not ours to judge."""
    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError, RecursionError):
        return {}
    return tool if isinstance(tool, dict) else {}
