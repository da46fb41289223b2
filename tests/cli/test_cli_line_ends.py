"""No blanks at the ends of lines, in whatever goes to a pipe or a file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny import Folder, Ran

from attnprobe.cli.trimming import trim

Run = Callable[..., Ran]


def assert_trimmed(text: str) -> None:
    assert text.strip()
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("width", ["40", "80"])
@pytest.mark.parametrize("verb", ["scan", "sink", "entropy", "rank", "gate", "compare", "audit"])
def test_of_results(
    verb: str, width: str, checkpoints: Folder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    checked = [checkpoints / "gated.pt", checkpoints / "ungated.pt"]
    assert_trimmed(run(verb, *checked).out)


@pytest.mark.parametrize("arguments", [[], ["gated"]])
def test_of_lists(arguments: list[str], run: Run) -> None:
    assert_trimmed(run("models", *arguments).out)


@pytest.mark.parametrize("verb", [[], ["scan"], ["audit"], ["train"], ["models"]])
def test_of_help(verb: list[str], run: Run) -> None:
    assert_trimmed(run(*verb, "--help").out)


def test_colours_are_still_switched_off() -> None:
    padded = "\x1b[1mname   \x1b[0m  \n\x1b[2m   \x1b[0m\n a  b\t\n"
    assert trim(padded) == "\x1b[1mname\x1b[0m\n\x1b[2m\x1b[0m\n a  b\n"
