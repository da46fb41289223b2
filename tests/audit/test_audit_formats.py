"""Every format of a report: golden output, published schemas, what must be escaped.

`python tests/audit/test_audit_formats.py --write` writes the golden files anew.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from audit_results import make, massive

from attnprobe._version import __version__
from attnprobe.audit import Problem, Report, audit
from attnprobe.audit.config import load
from attnprobe.audit.formats import FORMATS, destination, github, render, table
from attnprobe.audit.report import Held
from attnprobe.audit.rulebook import Asked, build
from attnprobe.errors import InputError

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
SUFFIXES = {"table": "txt", "github": "github.txt", "junit": "xml"}
CONFIG = """\
presets = ["gated"]

[[rules]]
id = "sharp-heads"
metric = "f_attr"
scope = "head"
max = 0.3
level = "warn"

[[rules]]
metric = "ppl"
max_increase = "5%"
checkpoints = "step*"

[[waivers]]
rule = "gated/massive"
checkpoints = "base"
reason = "retrained in spring | see #12"
expires = 2030-01-01

[[waivers]]
rule = "gated/*"
checkpoints = "step*"
reason = "until the gates are trained"
expires = 2020-01-01
"""


def report() -> Report:
    """One of everything; reads and writes nothing but attnprobe.toml in the working folder."""
    path = Path("attnprobe.toml")
    path.write_text(CONFIG, encoding="utf-8")
    results = [
        make("base", [[0.2, 0.9], [0.4, 0.1]], f_attr=0.467, rows={"massive": [massive(1)]}),
        make("step100", step=100, path="runs/step100.pt", ppl=6.0),
        make("step200", step=200, path="runs/step200.pt", ppl=6.6, gate_mean=None),
        make("good"),
    ]
    old = [make("base", f_attr=0.3, ppl=7.0), *results[1:]]
    problem = Problem("bad", "runs/bad.pt", "runs/bad.pt is cut short: download it again", 2)
    held = Held(Path("main.json"), old)
    book = build(load(path), None, [Asked("erank>=2")])
    return audit(results, book, problems=[problem], held=held, today=date(2026, 1, 1))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return report()


def golden(format: str) -> Path:
    """The file that holds what a format gave."""
    return GOLDEN / f"report.{SUFFIXES.get(format, format)}"


def steady(text: str) -> str:
    """A report without what changes with the version or the machine."""
    text = text.replace(f'"version": "{__version__}"', '"version": "X"')
    return re.sub(r'"python": "[^"]*"', '"python": "X"', text)


@pytest.mark.parametrize("format", FORMATS)
def test_golden(made: Report, format: str) -> None:
    text = steady(render(made, format))
    assert text == golden(format).read_text(encoding="utf-8"), (
        "python tests/audit/test_audit_formats.py --write, and look at what changed"
    )


def test_sarif_keeps_the_published_schema(made: Report) -> None:
    from jsonschema import Draft4Validator

    schema = json.loads((HERE / "schemas/sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
    log = json.loads(render(made, "sarif"))
    Draft4Validator(schema).validate(log)
    (run,) = log["runs"]
    for result in run["results"]:
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uri"]
        assert place["region"]["startLine"] >= 1
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    lines = {
        r["ruleId"]: r["locations"][0]["physicalLocation"]["region"]["startLine"]
        for r in run["results"]
    }
    assert lines["gated/f-attr"] == 1
    assert lines["sharp-heads"] == 3
    assert lines["model.ppl.trend"] == 10
    fingerprints = [json.dumps(r["partialFingerprints"]) for r in run["results"]]
    assert len(set(fingerprints)) == len(fingerprints)
    waived = [r for r in run["results"] if "suppressions" in r]
    assert [r["ruleId"] for r in waived] == ["gated/massive"]
    assert run["invocations"][0]["executionSuccessful"] is False


def test_sarif_of_rules_from_no_file_points_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnprobe.audit.config import Loaded

    monkeypatch.chdir(tmp_path)
    book = build(Loaded(), ["gated"])
    inside = make("in", f_attr=0.9, path="my runs/a.pt")
    outside = make("out", f_attr=0.9, path="/elsewhere/b.pt")
    log = json.loads(render(audit([inside, outside], book), "sarif"))
    places = [r["locations"][0]["physicalLocation"] for r in log["runs"][0]["results"]]
    assert places[0]["artifactLocation"] == {"uri": "my%20runs/a.pt", "uriBaseId": "%SRCROOT%"}
    assert places[1]["artifactLocation"] == {"uri": "file:///elsewhere/b.pt"}


def test_files_are_named_as_the_repository_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    made = report()
    assert "::error file=below/attnprobe.toml,line=1," in render(made, "github")
    assert '"uri": "below/attnprobe.toml"' in render(made, "sarif")
    monkeypatch.setenv("GITHUB_WORKSPACE", "/elsewhere")
    assert "::error file=attnprobe.toml,line=1," in render(made, "github")


def test_junit_keeps_the_published_schema(made: Report) -> None:
    import xmlschema
    from junitparser import JUnitXml

    schema = xmlschema.XMLSchema(HERE / "schemas/junit-10.xsd")
    text = render(made, "junit")
    schema.validate(text)
    xml = JUnitXml.fromstring(text.encode())
    assert (xml.failures, xml.errors) == (len(made.errors), 1)
    assert xml.tests == len(made.findings) + 1
    assert [suite.name for suite in xml] == [*made.checkpoints, "not judged"]


def test_empty_reports_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import xmlschema
    from jsonschema import Draft4Validator

    monkeypatch.chdir(tmp_path)
    empty = Report((), ())
    schema = json.loads((HERE / "schemas/sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
    Draft4Validator(schema).validate(json.loads(render(empty, "sarif")))
    xmlschema.XMLSchema(HERE / "schemas/junit-10.xsd").validate(render(empty, "junit"))
    assert render(empty, "jsonl") == ""
    assert len(render(empty, "csv").splitlines()) == 1
    assert "nothing to judge" in render(empty, "table")


@pytest.mark.parametrize(
    ("message", "properties", "line"),
    [
        ("plain", {}, "::error::plain"),
        ("100%\r\nnext", {}, "::error::100%25%0D%0Anext"),
        ("a::b", {"title": "x"}, "::error title=x::a::b"),
        (
            "m",
            {"file": "a:b,c%\nd.toml", "line": 3},
            "::error file=a%3Ab%2Cc%25%0Ad.toml,line=3::m",
        ),
        ("%0A", {}, "::error::%250A"),
    ],
)
def test_github_escapes(message: str, properties: dict[str, str | int], line: str) -> None:
    assert github.command("error", message, **properties) == line


def test_github_names_cannot_inject_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnprobe.audit.config import Loaded

    monkeypatch.chdir(tmp_path)
    evil = "x\n::set-env name=A::b\r\n::error::c"
    text = render(audit([make(evil, f_attr=0.9)], build(Loaded(), ["gated"])), "github")
    lines = re.split(r"[\r\n]+", text.rstrip("\n"))
    assert len(lines) == 2
    assert lines[0].startswith("::error title=attnprobe gated/f-attr::")


def test_markdown_cells_stay_in_their_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnprobe.audit.config import Loaded

    monkeypatch.chdir(tmp_path)
    evil = "a|b\n| c <img src=x> @you `code`"
    text = render(audit([make(evil, f_attr=0.9)], build(Loaded(), ["gated"])), "md")
    rows = [line for line in text.splitlines() if "gated/f-attr" in line]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 8
    assert "<img" not in text


def test_csv_keeps_every_digit(made: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(render(made, "csv"))))
    assert len(rows) == len(made.findings) + len(made.problems)
    found = next(r for r in rows if (r["checkpoint"], r["rule"]) == ("base", "gated/f-attr"))
    assert (float(found["found"]), found["state"], found["source"]) == (
        0.467,
        "error",
        "attnprobe.toml:1",
    )
    assert next(r for r in rows if r["state"] == "problem")["checkpoint"] == "bad"


@pytest.mark.parametrize(
    ("terminal", "width"),
    [({"TERM": "dumb"}, 80), ({"NO_COLOR": "1"}, 80), ({"NO_COLOR": "1"}, 60)],
)
def test_table_fits_and_is_plain(
    made: Report, monkeypatch: pytest.MonkeyPatch, terminal: dict[str, str], width: int
) -> None:
    from rich.console import Console

    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, highlight=False)
    table.show(made, console)
    lines = out.getvalue().splitlines()
    assert max(map(len, [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines])) <= width
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", out.getvalue())
    assert "…" not in out.getvalue()


def test_many_checkpoints_take_a_line_each() -> None:
    from attnprobe.audit.config import Loaded

    names = [f"c{n:02}" for n in range(40)]
    results = [make(n, f_attr=0.9 if n == "c07" else 0.05) for n in names]
    lines = render(audit(results, build(Loaded(), ["gated"])), "table").splitlines()
    assert len(lines) < 55
    assert sum(line.endswith("4 passed") for line in lines) == 39


@pytest.mark.parametrize(
    ("given", "format", "path"),
    [
        ("a.json", "json", "a.json"),
        ("a.SARIF", "sarif", "a.SARIF"),
        ("junit:report", "junit", "report"),
        ("github:x.txt", "github", "x.txt"),
        ("audit.xml", "junit", "audit.xml"),
        ("C:report.md", "md", "C:report.md"),
        ("a.jsonl", "jsonl", "a.jsonl"),
        ("a.txt", "table", "a.txt"),
    ],
)
def test_destinations(given: str, format: str, path: str) -> None:
    assert destination(given) == (format, Path(path))


@pytest.mark.parametrize("given", ["report", "a.pdf", "junit:"])
def test_destinations_without_a_format(given: str) -> None:
    with pytest.raises(InputError, match="cannot tell the format"):
        destination(given)


def test_unknown_format() -> None:
    with pytest.raises(InputError, match="no format"):
        render(Report((), ()), "html")


def test_infinite_figures_are_null_in_json(made: Report) -> None:
    odd = replace(made.findings[0], found=float("inf"))
    for format in ("json", "jsonl", "sarif"):
        text = render(replace(made, findings=(odd,)), format)
        assert "Infinity" not in text


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/audit/test_audit_formats.py --write"
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        whole = report()
        for one in FORMATS:
            golden(one).write_text(steady(render(whole, one)), encoding="utf-8")
