"""`attnprobe init`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from attnprobe.cli.options import OUTPUT, Common, collected
from attnprobe.cli.output import check_writable, write_stdout
from attnprobe.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Initial(Common):
    """Options of `attnprobe init`."""

    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The file to write."),
    ] = Path("attnprobe.toml")
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            rich_help_panel="Rules",
            help="That it judges by: health, gated, quantization or kv-cache.",
        ),
    ] = "health"
    force: Annotated[
        bool,
        typer.Option("--force", rich_help_panel=OUTPUT, help="Even over a file that is there."),
    ] = False


@collected(Initial)
def init(options: Initial) -> int:
    """Write an attnprobe.toml with a preset's rules explained and everything else to choose from.

    \b
    Examples:
      attnprobe init
      attnprobe init --preset gated
    """
    from attnprobe.audit import config, template
    from attnprobe.files import write_text

    path = options.file.expanduser()
    if path.name == "pyproject.toml":
        raise InputError("attnprobe init writes no pyproject.toml: copy what you need of its file")
    try:
        config.check_preset(options.preset)
    except ValueError as error:
        raise InputError(str(error)) from None
    if path.exists() and not options.force:
        raise InputError(f"{path} is there already: --force writes over it")
    check_writable(path)
    write_text(path, template.text(options.preset))
    is_found = path.absolute() == Path.cwd() / config.NAME
    read = "" if is_found else f" --config {shlex.quote(str(path))}"
    write_stdout(f"{path}: the rules of the preset {options.preset}\nNext: attnprobe audit{read}")
    return 0
