"""Every verb explains itself, shows examples, and is documented."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from tiny import Ran

from attnprobe import __version__
from attnprobe.cli import VERBS, app, options, output, space
from attnprobe.cli.train import Training
from attnprobe.models import config as shapes
from attnprobe.render import export
from attnprobe.result import TABLES
from attnprobe.train import TrainConfig

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
DOCS = Path(__file__).parents[2] / "docs"


def test_all_verbs_are_there() -> None:
    measuring = ["scan", "sink", "entropy", "rank", "gate"]
    assert list(COMMANDS) == [*measuring, "compare", "audit", "init", "models", "train"]
    assert [verb.__name__ for verbs in VERBS.values() for verb in verbs] == list(COMMANDS)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_has_a_summary_and_examples(verb: str, run: Callable[..., Ran]) -> None:
    ran = run(verb, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert "Examples:" in ran.out
    assert f"attnprobe {verb}" in ran.out
    first_line = COMMANDS[verb].help.splitlines()[0]
    assert first_line.endswith(".")
    assert len(first_line) <= 100


@pytest.mark.parametrize("verb", [verb for verbs in VERBS.values() for verb in verbs])
def test_every_option_has_help(verb: Callable[..., None]) -> None:
    for name, annotated in verb.__annotations__.items():
        if name != "ctx":
            help_text = get_args(annotated)[1].help
            assert help_text, name
            assert help_text[0].isupper() or name in ("device", "preset")  # which list names
            assert help_text.endswith(".")


@pytest.mark.parametrize("verb", [verb for verbs in VERBS.values() for verb in verbs])
def test_help_says_all_of_it_in_80_columns(
    verb: Callable[..., None], run: Callable[..., Ran]
) -> None:
    out = run(verb.__name__, "--help").out
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for name, annotated in verb.__annotations__.items():
        if name != "ctx":
            hint, info = get_args(annotated)
            assert info.help.rstrip(".") in words, name
            if get_origin(hint) is Literal:
                assert all(word in words for word in get_args(hint)), name
    for param in COMMANDS[verb.__name__].params:
        assert all(option in words for option in param.opts if option[0] == "-")
    assert "<bool>" not in out


def test_help_is_narrow_on_a_narrow_terminal(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    options = run("scan", "--help").out.partition("Arguments:")[2]
    assert max(map(len, options.splitlines())) <= 40


def test_help_begins_with_the_usage(run: Callable[..., Ran]) -> None:
    assert run("--help").out.startswith("Usage: attnprobe VERB [OPTIONS] ...\n")
    assert run("scan", "-h").out.startswith("Usage: attnprobe scan [OPTIONS] [CKPT]...\n")
    assert run("train", "-h").out.startswith("Usage: attnprobe train [OPTIONS] OUT\n")
    assert "[default: attnprobe.toml]" in run("init", "-h").out


@pytest.mark.parametrize("verb", COMMANDS)
def test_examples_are_valid_command_lines(verb: str) -> None:
    _, _, examples = COMMANDS[verb].help.partition("Examples:")
    lines = [re.split(r"\s{3,}|\s[>|]\s", line.strip()) for line in examples.splitlines()]
    commands = [part for line in lines for part in line if part.startswith("attnprobe ")]
    assert commands
    for command in commands:
        _, name, *arguments = shlex.split(command)
        assert name == verb
        with COMMANDS[verb].make_context(verb, arguments):
            pass  # a wrong option would have raised


def test_help_of_the_whole(run: Callable[..., Ran]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        ran = run(*arguments)
        assert (ran.code, ran.err) == (0, "")
        assert all(verb in ran.out for verb in COMMANDS)
        assert "Examples:" in ran.out


def test_version(run: Callable[..., Ran]) -> None:
    assert run("--version") == Ran(0, f"attnprobe {__version__}\n", "")


def test_the_page_of_the_docs_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_cli", DOCS / "make_cli.py")
    assert spec is not None
    assert spec.loader is not None
    make_cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_cli)
    written = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert written == make_cli.page(), "run python docs/make_cli.py"


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_and_option_is_documented(verb: str) -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert f"### attnprobe {verb}\n" in page
    names = {opt for param in COMMANDS[verb].params for opt in param.opts if opt[0] == "-"}
    assert not {name for name in names if f"`{name}`" not in page}


def test_choices_are_those_of_what_they_configure() -> None:
    gate, model = shapes._CHOICES["gate"], shapes._CHOICES["model"]
    assert space.SPACE["--gate"] == gate["position"]
    for name in ("granularity", "source", "activation", "mode"):
        assert space.SPACE[f"--{name}"] == gate[name]
    for name in ("positions", "norm"):
        assert space.SPACE[f"--{name}"] == model[name]
    assert space.SPACE["--feed-forward"] == model["activation"]
    assert get_args(options.Table) == tuple(TABLES)
    assert get_args(options.Format) == ("table", *export.FORMATS)
    assert set(output.SUFFIXES) == {*export.SUFFIXES, ".parquet"}


def test_training_options_cover_the_config_and_have_its_defaults() -> None:
    renamed = {"activation": "feed_forward"}
    declared = {f.name: f.default for f in fields(Training)}
    for field in fields(TrainConfig):
        if field.name != "gate":
            assert declared[renamed.get(field.name, field.name)] == field.default, field.name
    for field in fields(shapes.GateConfig):
        name = "gate" if field.name == "position" else field.name
        assert declared[name] == field.default, field.name
