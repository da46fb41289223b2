"""Writes docs/cli.md from what `--help` is made of. Run it after a change to the command line:

python docs/make_cli.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from attnprobe.cli import VERBS, app

JUDGING = "Comparing and auditing"
PAGE = Path(__file__).with_name("cli.md")
INTRODUCTION = """\
# The command line

This page is made from the help texts by `python docs/make_cli.py`; `attnprobe VERB --help` says the
same.

```
attnprobe VERB [CKPT…] [options]
```

- **stdout** carries the result and nothing else; progress bars, notes and errors go to stderr, and
  bars only to a terminal.
- **Ranges** include both ends: `--layer 0-3,-1` is layers 0, 1, 2, 3 and the last.
- **Without a checkpoint** the packaged pair is measured, one model without and one with a gate.
- **Without an input option** a checkpoint is measured on what it was trained on: draws from its own
  task, or the last tenth of the packaged text; one without a tokenizer on random tokens, and one
  that reads images or sound on random values.
- `NO_COLOR` and `COLUMNS` are honoured; a table in a pipe or a file is 80 columns wide.

| exit code | meaning |
|---|---|
| 0 | fine, also when the reader of the pipe went away |
| 1 | a rule was broken (`audit` only) |
| 2 | wrong usage, an unreadable checkpoint, any other error; one line on stderr says which |
| 3 | nothing could be measured, in any checkpoint |
| 130 | interrupted |

The gravest wins: of several checkpoints a bad one is reported, the others are measured all the
same, and the exit code is 2. Files are written whole or not at all, and whether they can be written
is found out before anything is measured.

Of the processes of torchrun (`--tensor-parallel`, see
[models.md](models.md#split-over-processes)) the first shows and writes. An error of one ends all of
them, with one line and that code; torchrun itself then exits with 1.
"""


def page() -> str:
    """The whole page."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    everything = commands["scan"].params  # the other measuring verbs leave some out
    parts = [INTRODUCTION, "## Measuring\n"]
    for verb in VERBS["Measure"]:
        command = commands[verb.__name__]
        own = {param.name for param in command.params}
        missing = [f"`{param.opts[0]}`" for param in everything if param.name not in own]
        parts.append(_heading(command))
        parts.append(
            f"Takes the options below but {', '.join(missing)}.\n"
            if missing
            else "Takes all the options below.\n"
        )
    parts += ["### Options of the measuring verbs\n", *_options(everything, VERBS["Measure"][0])]
    for panel in ("Judge", "Checkpoints"):
        parts.append(f"## {JUDGING if panel == 'Judge' else panel}\n")
        for verb in VERBS[panel]:
            command = commands[verb.__name__]
            parts += [_heading(command), *_shared(command, everything, verb)]
    return "\n".join(parts).rstrip() + "\n"


def _shared(command: Any, measuring: Iterable[Any], verb: Callable[..., None]) -> list[str]:
    """The options of a verb; of those that are the same as when measuring, only the names."""
    there = {p.name: (p.help, _type(VERBS["Measure"][0], p.name)) for p in measuring}
    same = [
        p
        for p in command.params
        if p.param_type_name == "option"
        and p.name not in ("help", "quiet", "verbose")
        and there.get(p.name) == (p.help, _type(verb, p.name))
    ]
    names = ", ".join(f"`{p.opts[0]}`" for p in same)
    told = [f"Measures with {names} as above.\n"] if same else []
    return [*_options([p for p in command.params if p not in same], verb), *told]


def _type(verb: Callable[..., None], name: str) -> Any:
    declared = verb.__annotations__.get(name)
    return None if declared is None else get_args(declared)[0]


def _heading(command: Any) -> str:
    prose, _, examples = command.help.partition("\b\nExamples:\n")
    return (
        f"### attnprobe {command.name}\n\n{prose.strip()}\n\n"
        f"```\n{inspect.cleandoc(examples)}\n```\n"
    )


def _options(params: Iterable[Any], verb: Callable[..., None]) -> list[str]:
    """A table for every panel of the help."""
    panels: dict[str, list[str]] = {}
    declared = verb.__annotations__  # not every pair of typer and click keeps an argument's help
    for param in params:
        if param.name == "help":
            continue
        if param.param_type_name == "argument":
            names, panel = f"`{param.metavar}`".replace("|", "\\|"), "Arguments"
        else:
            names = ", ".join(f"`{o}`" for o in (*param.opts, *param.secondary_opts))
            panel = param.rich_help_panel
            values = param.metavar or "\\|".join(_choices(declared[param.name]))
            names += f" {values}" if values else ""
        text = get_args(declared[param.name])[1].help + _default(param)
        panels.setdefault(panel, []).append(f"| {names} | {text} |")
    return [
        "\n".join([f"| {panel} | |", "|---|---|", *rows]) + "\n" for panel, rows in panels.items()
    ]


def _choices(annotated: Any) -> tuple[str, ...]:
    """Of an option that takes one of a few words."""
    hint = get_args(annotated)[0]
    return get_args(hint) if get_origin(hint) is Literal else ()


def _default(param: Any) -> str:
    is_plain = isinstance(param.default, (str, int, float)) and not isinstance(param.default, bool)
    return f" [default: {param.default}]" if is_plain and param.show_default else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
