"""The configuration: found, checked, overridden by environment and flags, waived until a day."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from audit_results import make

from attnprobe.audit import Finding, audit, judge, settings, waivers
from attnprobe.audit.config import Loaded, find, load
from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rulebook import Asked, build
from attnprobe.audit.template import text
from attnprobe.errors import InputError


def written(folder: Path, content: str, name: str = "attnprobe.toml") -> Loaded:
    """A configuration of some text."""
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return load(path)


def findings(loaded: Loaded, *names: str, **figures: Any) -> dict[tuple[str, str], Finding]:
    """What the rules of a configuration find on some checkpoints."""
    results = [make(name, **figures) for name in names or ("model",)]
    return {(f.checkpoint, f.rule): f for f in judge(results, build(loaded).rules_of)}


def test_found_upwards(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    shared = tmp_path / "pyproject.toml"
    shared.write_text("[tool.other]\n")
    assert find(deep) is None
    shared.write_text("[tool.attnprobe]\npresets = 'gated'\n")
    assert find(deep) == shared
    (tmp_path / "attnprobe.toml").write_text("")
    assert find(deep) == tmp_path / "attnprobe.toml"
    (tmp_path / "a" / "pyproject.toml").write_text("this is no TOML")
    assert find(deep) == tmp_path / "attnprobe.toml"


def test_pyproject_and_lines(tmp_path: Path) -> None:
    content = '''\
[project]
description = """
[[tool.attnprobe.rules]]
"""
# [[tool.attnprobe.rules]]

[[tool.attnprobe.rules]]
metric = "f_attr"
max = 0.1

[[ tool . attnprobe . rules ]]
metric = "ppl"
max = 10
'''
    loaded = written(tmp_path, content, "pyproject.toml")
    lines = [rule.source.line for rule in build(loaded).rules]
    assert lines == [7, 11]


def test_pyproject_without_our_table_is_empty(tmp_path: Path) -> None:
    assert written(tmp_path, "tool = 3", "pyproject.toml").config.presets == []
    with pytest.raises(InputError, match="dictionary"):
        written(tmp_path, "[tool]\nattnprobe = 3", "pyproject.toml")


def test_lines_of_inline_rules_and_presets(tmp_path: Path) -> None:
    content = '# rules\npresets = ["gated"]\nrules = [\n  {metric = "ppl", max = 10},\n]\n'
    rules = build(written(tmp_path, content)).rules
    assert {r.source.line for r in rules if r.id.startswith("gated/")} == {2}
    assert next(r.source.line for r in rules if r.metric == "ppl") in (1, 3, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("presets = 'gatd'", r":1: presets: there is no preset 'gatd'; did you mean 'gated'"),
        ("\npreset = 'gated'", r":2: preset: .*did you mean 'presets'"),
        (
            "[[rules]]\nmetric = 'f_atr'\nmax = 1",
            r":1: rules\[0\]: metric: .*did you mean 'f_attr'",
        ),
        ("[[rules]]\nmetric = 'ppl'\nmaxi = 1", r":3: rules\[0\].maxi: .*did you mean 'max'"),
        ("[[rules]]\nmetric = 'ppl'\nmax = '1'", r":3: rules\[0\].max: should be a valid number"),
        ("[[rules]]\nmax = 1", r":1: rules\[0\].metric: it is missing"),
        ("[[rules]]\nmetric='ppl'\nmax=1\nsource={}", r"rules\[0\].source: there is no such key"),
        ("[[rules]]\nid='gated/f-atr'\nmax=1", "preset gated has no rule.*did you mean"),
        (
            "[[rules]]\nid='a'\nmetric='ppl'\nmax=1\n[[rules]]\nid='a'\nmetric='ppl'\nmax=1",
            r":5: .*another rule 'a'|:6: .*another rule 'a'",
        ),
        (
            "presets='gated'\n[[overrides]]\ncheckpoints='x'\nrules.'gated/f-att' = {level='off'}",
            "there is no rule 'gated/f-att'; did you mean 'gated/f-attr'",
        ),
        (
            "presets='gated'\n[[overrides]]\ncheckpoints='x'\nrules.'gated/f-attr' = {mx=1}",
            "did you mean 'max'",
        ),
        (
            "presets='gated'\n[[overrides]]\ncheckpoints='x'\nrules.'gated/f-attr' = {min=1}",
            "min: 1 is above max",
        ),
        ("[[waivers]]\nrule='x'\nexpires=2030-01-01", r"waivers\[0\].reason: it is missing"),
        ("[[waivers]]\nrule='x'\nreason=' '\nexpires=2030-01-01", "a waiver takes a reason"),
        ("[[waivers]]\nrule='x'\nreason='y'", "expires: it is missing"),
        ("[baseline.metrics.f_attr]\nabsolut = 1", "did you mean 'absolute'"),
        ("[baseline.metrics.f_attr]\nrelative = -1", "greater than or equal to 0"),
        ("[input]\nlenght = 3", "did you mean 'length'"),
        ("[run]\njobs = 0", "greater than or equal to 1"),
        ("[run]\nmodel_confg = 'x'", "did you mean 'model_config'"),
        ("[[waivers]]\nrule='x'\nreason='y'\nexpires='soon'", "should be a day, as in 2030-04-01"),
        ("[[waivers]]\nrule='x'\nreason='y'\nexpires=2030", "should be a day, as in 2030-04-01"),
        ("rules = 3", "should be a valid list"),
        ("a = ", "is no TOML"),
    ],
)
def test_faults_say_where_and_what_would_do(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build(written(tmp_path, content))
    assert "\n" not in str(caught.value)
    assert "attnprobe.toml" in str(caught.value)


def test_unknown_waiver_and_baseline_figure(tmp_path: Path) -> None:
    from attnprobe.audit.baseline import watches

    content = "presets='gated'\n[[waivers]]\nrule='gated/x*'\nreason='y'\nexpires=2030-01-01"
    loaded = written(tmp_path, content)
    with pytest.raises(InputError, match=r":2: .*there is no rule 'gated/x\*'|:3: .*gated/x"):
        waivers.check(loaded, ["gated/f-attr"])
    with pytest.raises(InputError, match=r"no figure 'ppll'.*did you mean 'ppl'"):
        watches(written(tmp_path, "[baseline.metrics.ppll]\nrelative = 0.1"))


def test_rule_with_the_id_of_a_preset_changes_only_what_it_says(tmp_path: Path) -> None:
    content = "presets = 'gated'\n[[rules]]\nid = 'gated/f-attr'\nmax = 0.01\n"
    loaded = written(tmp_path, content)
    book = build(loaded)
    assert [r.id for r in book.rules] == [*PRESETS["gated"].entries()]
    rule = book.rules[0]
    assert (rule.metric, rule.max, rule.source.line) == ("f_attr", 0.01, 2)
    assert build(loaded, ["health"]).rules[0].id == "health/collapse"


def test_overrides_by_name_and_path_the_last_wins(tmp_path: Path) -> None:
    content = """
presets = "gated"
[[overrides]]
checkpoints = "old*"
rules."gated/*" = {level = "warn"}
[[overrides]]
checkpoints = ["*/old-2.pt"]
reason = "kept for comparison"
rules."gated/f-attr" = {max = 0.9}
"""
    found = findings(written(tmp_path, content), "new", "old-1", "old-2", f_attr=0.5)
    rule = "gated/f-attr"
    assert (found["new", rule].status, found["new", rule].level) == ("broken", "error")
    assert (found["old-1", rule].status, found["old-1", rule].level) == ("broken", "warn")
    assert found["old-2", rule].status == "passed"
    assert found["old-1", rule].source.line == 5


def test_flags_win_over_overrides_and_file(tmp_path: Path) -> None:
    content = """
[[rules]]
metric = "f_attr"
max = 0.1
[[overrides]]
checkpoints = "*"
rules."model.f_attr" = {max = 0.2}
"""
    loaded = written(tmp_path, content)

    def bound(*texts: str) -> list[tuple[str, float | None]]:
        asked = [Asked(text) for text in texts]
        return [(r.id, r.max) for r in build(loaded, None, asked).rules_of(make())]

    assert bound() == [("model.f_attr", 0.2)]
    assert bound("f_attr<=0.5") == [("model.f_attr", 0.5)]
    assert bound("model.f_attr <= 0.5", "f_attr<=0.6") == [("model.f_attr", 0.6)]
    assert bound("f_attr>=0.1") == [("model.f_attr", 0.2), ("model.f_attr-2", None)]
    assert bound("heads.erank:min>=2") == [("model.f_attr", 0.2), ("heads.erank.min", None)]


@pytest.mark.parametrize("bad", ["f_attr", "f_attr<0.1", "f_attr<=x", "f_attr<=nan", "<=1"])
def test_bad_bounds(bad: str) -> None:
    with pytest.raises(InputError, match="--rule"):
        build(Loaded(), [], [Asked(bad)])


def test_no_rule_is_an_error() -> None:
    with pytest.raises(InputError, match="no rule to judge by"):
        build(Loaded(), [])


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    content = "presets='health'\n[input]\nlength = 16\nsamples = 2\nseed = 7\ntext_file='a.txt'\n"
    loaded = written(tmp_path, content)
    environment = settings.from_environment(
        {
            "ATTNPROBE_LENGTH": "32",
            "ATTNPROBE_SAMPLES": "4",
            "ATTNPROBE_PRESET": "gated, kv-cache",
            "ATTNPROBE_EXIT_ZERO": "true",
            "ATTNPROBE_RULE": "ppl<=9,f_attr<=1",
            "ATTNPROBE_CACHE": "elsewhere",
            "ATTNPROBE_DEVICE": "",
            "PATH": "/bin",
        }
    )
    config = settings.in_force(loaded, environment, {"length": 64}).config
    assert (config.input.length, config.input.samples, config.input.seed) == (64, 4, 7)
    assert config.presets == ["gated", "kv-cache"]
    assert config.output.exit_zero is True
    assert environment.rules == ("ppl<=9", "f_attr<=1")
    assert config.input.text_file == [str(tmp_path / "a.txt")]
    config = settings.in_force(loaded, environment, {"random_tokens": True}).config
    assert (config.input.text_file, config.input.random_tokens) == ([], True)
    assert settings.in_force(loaded, environment, {"text": ["x"]}).config.input.text_file == []


def test_what_is_shown_replaces_what_was(tmp_path: Path) -> None:
    content = "presets = 'health'\n[input]\ntext_file = 'a.jsonl'\nchat_template = true\n"
    loaded = written(tmp_path, content)

    def shown(flags: dict[str, Any], environ: dict[str, str] | None = None) -> Any:
        environment = settings.from_environment(environ or {})
        return settings.in_force(loaded, environment, flags).config.input

    assert shown({"length": 8}).chat_template is True
    assert shown({"chat_template": False}).text_file == [str(tmp_path / "a.jsonl")]
    repeated = shown({"repeated_token": "the"})
    assert (repeated.text_file, repeated.chat_template) == ([], None)
    pictures = shown({}, {"ATTNPROBE_IMAGE": "a.png, b.png"})
    assert (pictures.image, pictures.text_file) == (["a.png", "b.png"], [])
    assert shown({"text": ["x"]}, {"ATTNPROBE_REPEATED_TOKEN": "17"}).repeated_token is None


def test_environment_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ATTNPROBE_LENGHT; did you mean 'ATTNPROBE_LENGTH'"):
        settings.from_environment({"ATTNPROBE_LENGHT": "3"})
    for name, value in (("LENGTH", "many"), ("PRESET", "gatd"), ("JOBS", "0")):
        environment = settings.from_environment({f"ATTNPROBE_{name}": value})
        with pytest.raises(InputError, match=f"ATTNPROBE_{name}"):
            settings.in_force(Loaded(), environment, {})


def test_paths_of_the_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    content = """
checkpoints = ["runs", "gated", "runs/*.pt"]
[baseline]
file = "main.json"
[output]
files = ["audit.sarif", "junit:out/audit.xml"]
"""
    config = settings.in_force(written(tmp_path, content), settings.from_environment({}), {}).config
    assert config.checkpoints == [str(tmp_path / "runs"), "gated", str(tmp_path / "runs/*.pt")]
    assert config.baseline.file == str(tmp_path / "main.json")
    assert config.output.files == [
        str(tmp_path / "audit.sarif"),
        f"junit:{tmp_path / 'out/audit.xml'}",
    ]


WAIVED = """
presets = "gated"
[[waivers]]
rule = "gated/f-*"
checkpoints = "old*"
reason = "retrained in spring"
expires = 2026-03-31
"""


@pytest.mark.parametrize(
    ("today", "status", "note"),
    [
        (date(2026, 3, 31), "waived", None),
        (date(2026, 4, 1), "broken", "expired on 2026-03-31: it is void"),
    ],
)
def test_waivers_hold_to_the_end_of_their_day(
    tmp_path: Path, today: date, status: str, note: str | None
) -> None:
    loaded = written(tmp_path, WAIVED)
    found = judge([make("old-1", f_attr=0.9)], build(loaded).rules_of)
    granted, notes = waivers.grant(found, loaded.config.waivers, today)
    finding = next(f for f in granted if f.rule == "gated/f-attr")
    assert finding.status == status
    assert finding.failed == (status == "broken")
    assert (notes == []) if note is None else note in notes[0]
    if finding.waiver is not None:
        assert finding.waiver.reason == "retrained in spring"


def test_waivers_are_for_their_checkpoints_and_rules_alone(tmp_path: Path) -> None:
    loaded = written(tmp_path, WAIVED)
    found = judge([make("new", f_attr=0.9), make("old", sink_rate=0.9)], build(loaded).rules_of)
    granted, notes = waivers.grant(found, loaded.config.waivers, date(2026, 1, 1))
    assert {f.status for f in granted} == {"passed", "broken"}
    assert "was not needed" in notes[0]
    others = [f for f in found if f.name == "new"]
    _, notes = waivers.grant(others, loaded.config.waivers, date(2026, 1, 1))
    assert "is for no checkpoint that was judged" in notes[0]


def test_waivers_go_by_the_name_even_where_two_have_it(tmp_path: Path) -> None:
    loaded = written(tmp_path, WAIVED)
    twice = [make("old", f_attr=0.9, path=f"{n}/x.json") for n in "ab"]
    granted, _ = waivers.grant(
        judge(twice, build(loaded).rules_of), loaded.config.waivers, date(2026, 1, 1)
    )
    assert [f.checkpoint for f in granted if f.status == "waived"] == ["old #1", "old #2"]


def test_rule_for_no_checkpoint_is_noted(tmp_path: Path) -> None:
    content = "[[rules]]\nmetric='ppl'\nmax=9\n[[rules]]\nmetric='ppl'\nmax=1\ncheckpoints='prd*'\n"
    report = audit([make("prod")], build(written(tmp_path, content)))
    assert report.notes == ("the rule model.ppl-2 is for prd*, and no checkpoint is called so",)


def test_sites_that_were_not_measured_are_noted(tmp_path: Path) -> None:
    notes = [{"site": f"layers.{n}.mixer", "metric": "all", "reason": "linear"} for n in (2, 3)]
    report = audit([make(rows={"not_measured": notes})], build(Loaded(), ["gated"]))
    assert report.notes == ("model: 2 sites were not measured and not judged: linear",)
    assert not report.errors


@pytest.mark.parametrize("name", PRESETS)
def test_template_parses_and_judges_by_its_preset(tmp_path: Path, name: str) -> None:
    loaded = written(tmp_path, text(name))
    assert [r.id for r in build(loaded).rules] == [*PRESETS[name].entries()]
    assert all(len(line) <= 100 for line in text(name).splitlines())


def test_all_that_the_template_offers_is_valid(tmp_path: Path) -> None:
    """Its examples, taken out of their comments."""
    lines = []
    for line in text("gated").splitlines():
        code = line.removeprefix("# ") if line.startswith("# ") else line
        is_code = code[:1] in '["' or (code.split(" = ")[0].isidentifier() and " = " in code)
        lines.append(code if is_code else "")
    loaded = written(tmp_path, "\n".join(lines))
    assert len(loaded.config.rules) == 4
    assert loaded.config.waivers
    assert loaded.config.overrides
    assert loaded.config.input.length == 512
    book = build(loaded)
    assert {r.id for r in book.rules} >= {"no-dead-heads", "heads.collapsed.count"}
