"""What `--help` prints: usage, examples, and every option in words, by panel."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

from attnprobe.cli.options import HOW, INPUT, OUTPUT, WHAT
from attnprobe.cli.output import stdout_console

WIDTH, NAMES = 100, 28  # columns at most, and those of them for the names of options
ARGUMENTS, REST = "Arguments", "Options"
Entry = tuple[str, str]  # what to write, what it does


class Command(TyperCommand):
    """A verb."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *map(_placed, arguments)])
        formatter.write(_page(usage, self.help, _options(self, ctx)))


class Group(TyperGroup):
    """All of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Entry]] = {}
        for name, command in self.commands.items():
            panel = str(getattr(command, "rich_help_panel", ""))
            panels.setdefault(panel, []).append((name, (command.help or "").partition("\n\n")[0]))
        usage = f"{ctx.command_path} VERB [OPTIONS] ..."
        formatter.write(_page(usage, self.help, {**panels, **_options(self, ctx)}))


def _placed(argument: Any) -> str:
    """ "[CKPT]...", as in a line of usage."""
    name = _names(argument, None)
    name = name if argument.required else f"[{name}]"
    return f"{name}..." if argument.nargs == -1 else name


def _options(command: Any, ctx: Any) -> dict[str, list[Entry]]:
    """Arguments first, then panels that other verbs do not have, help at the end."""
    declared = getattr(command.callback, "__annotations__", {})
    panels: dict[str, list[Entry]] = {ARGUMENTS: []}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        annotation = declared.get(param.name)
        hint, *info = get_args(annotation) or (None,)
        about = (info[0].help if info else None) or getattr(param, "help", None) or ""
        entry = (_names(param, hint), _text(param, hint, about))
        is_argument = param.param_type_name == "argument"
        panel = ARGUMENTS if is_argument else getattr(param, "rich_help_panel", None) or REST
        panels.setdefault(panel, []).append(entry)
    order = ["", WHAT, INPUT, HOW, OUTPUT, REST]
    ranked = sorted(panels, key=lambda title: order.index(title) if title in order else 0)
    return {title: panels[title] for title in ranked if panels[title]}


def _names(param: Any, hint: Any) -> str:
    """ "--layer, --layers RANGES"."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    short_first = sorted(param.opts, key=lambda option: option.startswith("--"))
    names = ", ".join([*short_first, *param.secondary_opts])
    if bool in (hint, *get_args(hint)) or hint is None:
        return names
    return f"{names} {param.metavar or 'NAME'}"


def _text(param: Any, hint: Any, about: str) -> str:
    """The help, the words to choose from where the metavar does not stand for them, the default."""
    words = get_args(hint) if get_origin(hint) is Literal and not param.metavar else ()
    if words:
        about = f"{about.rstrip('.')}: {', '.join(words[:-1])} or {words[-1]}."
    default = param.default if getattr(param, "show_default", True) else None
    if isinstance(default, bool):
        named = param.opts if default else param.secondary_opts
        default = named[0] if param.secondary_opts else None
    is_plain = isinstance(default, (str, int, float, Path))
    return f"{about} [default: {default}]" if is_plain else about


def _page(usage: str, about: str | None, panels: dict[str, list[Entry]]) -> str:
    from rich.console import Console
    from rich.text import Text

    drawn = io.StringIO()
    width = min(WIDTH, stdout_console().width)
    console = Console(file=drawn, width=width, force_terminal=sys.stdout.isatty(), highlight=False)

    def put(*parts: tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    put(("Usage: ", "bold"), (usage, ""))
    for paragraph in (about or "").split("\n\n"):
        put()
        for line in _paragraph(paragraph, width):
            put((line, ""))
    for title, entries in panels.items():
        put()
        put((f"{title}:", "bold"))
        for name, line in _rows(entries, width):
            put((name, "cyan"), (line, ""))
    return drawn.getvalue().rstrip("\n")


def _paragraph(text: str, width: int) -> Sequence[str]:
    """Its lines, wrapped unless they are marked to be left as they are."""
    if text.startswith("\b"):
        return text.removeprefix("\b").strip("\n").splitlines()
    return textwrap.wrap(text, width) or [""]


def _rows(entries: Sequence[Entry], width: int) -> Iterator[Entry]:
    """Names on the left, words on the right; words begin a new line behind names too long."""
    room = min(NAMES, max(len(name) for name, _ in entries) + 2, width // 2)
    for name, about in entries:
        lines = textwrap.wrap(about, max(10, width - room - 2), break_on_hyphens=False) or [""]
        if len(name) > room - 2:
            yield f"  {name}", ""
        else:
            yield f"  {name:{room}}", lines.pop(0)
        yield from ((" " * (room + 2), line) for line in lines)
