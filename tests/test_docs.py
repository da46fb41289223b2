"""The docs say what the code does: columns, examples and commands are checked against it.

`python tests/test_docs.py --write` writes the column list of docs/json-schema.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from attnprobe.result import TABLES

ROOT = Path(__file__).parent.parent
MARKER = "<!-- columns: written by tests/test_docs.py --write -->"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def columns() -> str:
    lines = [f"- `{name}`: {', '.join(f'`{c}`' for c in TABLES[name])}" for name in TABLES]
    return "\n".join(lines) + "\n"


def test_schema_page_lists_every_column() -> None:
    written = read("docs/json-schema.md").partition(MARKER)[2].strip()
    assert written == columns().strip(), "run python tests/test_docs.py --write"


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_defined(table: str) -> None:
    pages = read("docs/definitions.md") + read("docs/json-schema.md").partition(MARKER)[0]
    missing = [c for c in TABLES[table] if f"`{c}`" not in pages]
    assert not missing, f"columns of {table} that no page defines: {missing}"


def test_example_metric_runs() -> None:
    import torch

    from attnprobe import metrics, scan
    from attnprobe.models import Decoder, ModelConfig

    code = re.search(r"```python\n(.*?)```", read("docs/extending.md"), re.DOTALL)
    assert code is not None
    scope: dict[str, object] = {"__name__": "example"}
    exec(compile(code[1], "docs/extending.md", "exec", dont_inherit=True), scope)
    focus = scope["Focus"]()  # type: ignore[operator]
    model = Decoder(ModelConfig(vocab_size=16, d_model=16, n_layers=1, n_heads=2, max_length=32))

    class Capturing(metrics.METRICS["sink"]):  # type: ignore[misc]
        def attention(self, call, stats):  # type: ignore[no-untyped-def]
            focus.attention(call, stats)
            super().attention(call, stats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(metrics.METRICS, "sink", Capturing)
        scan(model, torch.randint(16, (2, 32)), metrics=["sink"])
    rows = focus.tables().rows["heads"]
    assert len(rows) == 2
    assert all(0 < row["focus"] < 31 for row in rows)


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "python -m pytest" in read("README.md")
    assert re.search(r"^python -m pytest$", read(".ci/run"), re.MULTILINE)


def shown() -> list[tuple[str, str]]:
    """The commands of README.md with the whole output it shows; elided ones are left out."""
    blocks = re.findall(r"```console\n\$ attnprobe (.*?)\n(.*?)```", read("README.md"), re.DOTALL)
    return [(command, output) for command, output in blocks if "…" not in output]


def words(text: str) -> list[str]:
    """Letters alone: last digits and bars may differ between machines, seconds always do."""
    return re.findall(r"[^\W\d_]+", text.partition("\nmeasured on")[0])


@pytest.mark.parametrize(("command", "output"), shown(), ids=lambda text: text.partition("\n")[0])
def test_readme_shows_what_is_printed(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnprobe.cli import main

    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()) == 0
    printed = words(capsys.readouterr().out)
    expected = words(output)
    assert printed[: len(expected)] == expected


def test_readme_shows_two_outputs() -> None:
    assert [command for command, _ in shown()] == ["sink", "rank gated --layer 3"]


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/test_docs.py --write"
    page = ROOT / "docs/json-schema.md"
    head = page.read_text(encoding="utf-8").partition(MARKER)[0]
    page.write_text(f"{head}{MARKER}\n\n{columns()}", encoding="utf-8")
