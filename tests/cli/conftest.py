"""Tiny checkpoints, and a way to run a command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny import Folder, Ran, fill

from attnprobe.cli import main


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of `tiny.fill`."""
    return fill(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `attnprobe …` and gives its exit code and what it wrote."""

    def run_it(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run_it
