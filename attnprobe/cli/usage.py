"""A wrong command line in words: what was meant, or which verb to look up."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

#: What the parser says, and what people say.
_PLAIN = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "give a whole number",
    "Input should be a valid number, unable to parse string as a number": "give a number",
    "Input should be greater than or equal to": "it should be at least",
    "Input should be less than or equal to": "it should be at most",
    "Input should": "it should",
}


def in_words(error: Exception, arguments: Sequence[str], group: Any) -> str | None:
    """One line on a wrong command line, None if the error is another.

    Args:
        error: what parsing or a verb raised.
        arguments: the command line.
        group: all of the command line, the verbs among it.
    """
    commands = group.commands
    described = getattr(error, "format_message", None)
    if described is None:
        return None
    verb = next((word for word in arguments[:1] if word in commands), "")
    name = f"attnprobe {verb}".rstrip()
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        return f"{name} has no option {option}{_meant(option, verb, group)}"
    message = str(described()).strip().rstrip(".")
    if message.startswith("No such command"):
        word = next((word for word in arguments if not word.startswith("-")), "")
        near = difflib.get_close_matches(word, commands, n=1)
        meant = f"; did you mean {near[0]}?" if near else f": choose from {', '.join(commands)}"
        return f"there is no verb {word!r}{meant}"
    params = getattr(error, "param", None)
    if params is not None and message.startswith("Invalid value for "):
        message = f"{', '.join(params.opts)}: {getattr(error, 'message', message)}".rstrip(".")
    for said, plain in _PLAIN.items():
        message = message.replace(said, plain)
    return f"{message} (see {name} --help)"


def _meant(option: str, verb: str, group: Any) -> str:
    """ "; did you mean --length?", or which verbs have the option."""
    commands: Mapping[str, Any] = group.commands
    own = _options(commands.get(verb, group))
    if option in _options(group):
        return f"; did you mean attnprobe {option}?"
    if near := difflib.get_close_matches(option, own, n=1, cutoff=0.85):
        return f"; did you mean {near[0]}?"
    having = [other for other, command in commands.items() if option in _options(command)]
    if having and not verb:
        return f": options follow the verb, as in attnprobe {having[0]} {option}"
    if having:
        listed = ", ".join(having[:-1]) + f" and {having[-1]}" if having[1:] else having[0]
        return f", which {listed} {'have' if having[1:] else 'has'} (see attnprobe {verb} --help)"
    near = difflib.get_close_matches(option, own, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else f" (see attnprobe {verb} --help)"


def _options(command: Any) -> list[str]:
    """All that a verb takes, without its arguments."""
    given = [o for param in command.params for o in (*param.opts, *param.secondary_opts)]
    return [option for option in given if option.startswith("-")]
