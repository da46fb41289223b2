"""docs/audit.md and examples/ci say what the code does."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from attnprobe.audit.config import load
from attnprobe.audit.formats import FORMATS
from attnprobe.audit.rulebook import build
from attnprobe.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
CI = ROOT / "examples/ci"


def maker() -> Any:
    """docs/make_audit.py as a module."""
    spec = importlib.util.spec_from_file_location("make_audit", ROOT / "docs/make_audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_written_part_is_up_to_date() -> None:
    assert maker().page() == PAGE, "run python docs/make_audit.py"


@pytest.mark.parametrize("example", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_examples_of_the_page_are_valid(tmp_path: Path, example: str) -> None:
    path = tmp_path / "attnprobe.toml"
    path.write_text(example, encoding="utf-8")
    assert build(load(path)).rules


def test_the_page_names_every_format() -> None:
    table = PAGE.partition("| format |")[2].partition("\n\n")[0]
    assert [*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)] == [*FORMATS]


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml", "pre-commit-config.yaml"])
def test_commands_of_the_ci_examples_run(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The very command of each, on results of the packaged pair's names."""
    from audit_results import make

    from attnprobe.result import save_results

    text = (CI / name).read_text(encoding="utf-8")
    found = re.search(r"attnprobe audit\b[^\n]*(?:\n +--[^\n]*)*", text)
    assert found is not None
    arguments = shlex.split(found[0])[1:]
    assert arguments[0] == "audit"
    for variable in [n for n in os.environ if n.startswith("ATTNPROBE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    rules = (CI / "attnprobe.toml").read_text(encoding="utf-8")
    (tmp_path / "attnprobe.toml").write_text(
        rules.replace('["ungated", "gated"]', '["ungated.json", "gated.json"]')
    )
    save_results([make("ungated", f_attr=0.5, gate_mean=None)], "ungated.json")
    save_results([make("gated")], "gated.json")
    assert main(arguments) == 0
    written = [part for part in arguments if part.startswith("audit.")]
    assert all((tmp_path / file).stat().st_size > 0 for file in written)
    del capfd


def test_rules_of_the_ci_examples_are_valid() -> None:
    book = build(load(CI / "attnprobe.toml"))
    assert {rule.id.partition("/")[0] for rule in book.rules} == {"health", "gated"}
