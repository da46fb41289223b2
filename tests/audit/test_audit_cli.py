"""`attnprobe audit` and `attnprobe init` as they are called: exit codes, precedence, outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from audit_results import make

from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rules import Rule
from attnprobe.cli import main
from attnprobe.result import KEY, TABLES, TEXT, Result, load_results, save_results


@dataclass
class Ran:
    """What a command line gave."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with results, and none of our variables set."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("ATTNPROBE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path / "cache"))
    save_results([make("good")], "good.json")
    save_results([make("bad", f_attr=0.467, sink_rate=0.9)], "bad.json")
    return tmp_path


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `attnprobe …` there."""

    def run_it(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capfd.readouterr())

    return run_it


def test_passes_and_fails(run: Run) -> None:
    assert run("audit", "good.json", "--preset", "gated").code == 0
    ran = run("audit", "good.json", "bad.json", "--preset", "gated")
    assert ran.code == 1
    assert ran.err == ""
    assert "gated/f-attr  model.f_attr is 0.467, expected <= 0.15" in ran.out
    assert ran.out.endswith("failed: 1 of 2 checkpoints (2 errors)\n")


@pytest.mark.parametrize("preset", ["health", "quantization", "kv-cache"])
def test_presets_on_a_healthy_result(run: Run, preset: str) -> None:
    assert run("audit", "good.json", "--preset", preset).code == 0


def test_without_rules_it_is_health_and_says_so(run: Run) -> None:
    ran = run("audit", "good.json")
    assert ran.code == 0
    assert "preset health" in ran.err
    assert "health/overflow" in ran.out
    assert run("audit", "good.json", "--quiet").err == ""


def test_gravest_code_wins(run: Run, folder: Path) -> None:
    (folder / "torn.json").write_text('{"schema": 1, "res')
    save_results([Result.from_rows({}, checkpoint={"name": "empty"})], "empty.json")
    gated = ("--preset", "gated", "-q")
    assert run("audit", "good.json", "torn.json", *gated).code == 2
    assert run("audit", "bad.json", "torn.json", "empty.json", *gated).code == 2
    assert run("audit", "bad.json", "empty.json", *gated).code == 1
    assert run("audit", "good.json", "empty.json", *gated).code == 3
    assert run("audit", "empty.json", *gated).code == 3
    assert run("audit", "bad.json", "torn.json", *gated, "--exit-zero").code == 0
    ran = run("audit", "good.json", "torn.json", *gated)
    assert "good  4 passed" in ran.out
    assert "torn.json is not a result file" in " ".join(ran.out.split())


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnprobe.audit import runner

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "gather", stop)
    ran = run("audit", "good.json", "--exit-zero")
    assert (ran.code, ran.out) == (130, "")
    assert "interrupted" in ran.err


def test_warnings_never_fail(run: Run, folder: Path) -> None:
    (folder / "attnprobe.toml").write_text(
        '[[rules]]\nmetric = "f_attr"\nmax = 0.1\nlevel = "warn"\n'
    )
    ran = run("audit", "bad.json")
    assert ran.code == 0
    assert "passed: 1 checkpoint (1 warning)" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "gatd"], "--preset: there is no preset 'gatd'; did you mean 'gated'?"),
        (["--rule", "f_atr<=1"], "did you mean 'f_attr'? attnprobe audit --list-rules lists all"),
        (["--rule", "F-Attr<=1"], "did you mean 'f_attr'?"),
        (["--rule", "perplexity<=9"], "did you mean 'ppl'?"),
        (
            ["--rule", "xyz<=9"],
            "table model; attnprobe audit --list-rules lists all",
        ),
        (["--rule", "head.erank:min>=2"], "there is no table 'head'; did you mean 'heads'?"),
        (["--rule", "heads.erank:mni>=2"], "aggregate: there is no 'mni'; did you mean 'min'?"),
        (
            ["--rule", "gatd/f-attr<=1"],
            "there is no rule 'gatd/f-attr'; did you mean 'gated/f-attr'?",
        ),
        (["--rule", "gated/f-attr<=1"], "its preset is not used: add --preset gated"),
        (["--rule", "f_attr"], "write f_attr<=0.15"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--baseline", "none.json"], "there is no baseline none.json"),
        (["--update-baseline"], "--baseline FILE"),
        (["--output", "report"], "cannot tell the format of report"),
        (["--output", "no/where.json"], "there is no folder no"),
        (["--format", "html"], "'html' is not one of"),
        (["--plots", "good.json"], "it is no folder"),
        (["--list-rules", "--format", "json"], "--list-rules is text"),
        (["--epsilon", "2"], "--epsilon=2.0: should be less than 1"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    ran = run("audit", "good.json", *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


def test_no_run_is_no_plot_and_said(run: Run, folder: Path) -> None:
    ran = run("audit", "good.json", "--plots", "figures", "--rule", "f_attr<=1")
    assert ran.err == (
        "attnprobe: note: no plot is drawn: a trend needs steps of one run in one folder\n"
    )
    assert not (folder / "figures").exists()
    assert run("audit", "good.json", "--plots", "figures", "--rule", "f_attr<=1", "-q").err == ""


def test_a_wrong_rule_is_one_short_line(run: Run) -> None:
    for rule in ("f_atr<=1", "xyz<=1", "heads.entropy_nrm:p05>=0.1", "gated/f-atr<=1"):
        assert len(run("audit", "good.json", "--rule", rule).err) < 160


def test_all_rules_and_figures_can_be_listed(run: Run) -> None:
    ran = run("audit", "--list-rules")
    assert (ran.code, ran.err) == (0, "")
    for preset in PRESETS.values():
        for rule in preset.entries():
            assert f"\n  {rule} " in ran.out
    listed = set(re.findall(r"[\w.-]+", ran.out))
    for table, names in TABLES.items():
        figures = {c for c in names if c not in (*KEY, *TEXT, "kind")} - {"position"}
        assert table == "not_measured" or figures <= listed
    assert max(map(len, ran.out.splitlines())) <= 80


def test_what_is_listed_can_be_bounded(run: Run) -> None:
    lines = run("audit", "--list-rules").out.partition("Figures that")[2].splitlines()[1:]
    rows = " ".join(lines[: lines.index("")]).split()
    tables = [word for word in rows if word in TABLES]
    assert tables == [table for table in TABLES if table != "not_measured"]
    for word in rows:
        if word in TABLES:
            table = word
        else:
            keys = {"table": table, "metric": word.rstrip(","), "max": 1.0}
            assert Rule.model_validate(keys).metric == word.rstrip(",")


def test_unknown_checkpoint(run: Run) -> None:
    ran = run("audit", "nowhere.pt", "-q")
    assert ran.code == 2
    assert "nowhere.pt does not exist" in ran.out


def test_fault_in_the_file_says_where(run: Run, folder: Path) -> None:
    (folder / "attnprobe.toml").write_text('presets = ["gated"]\n\n[[rules]]\nmetrik = "ppl"\n')
    ran = run("audit", "good.json")
    assert ran.code == 2
    assert "attnprobe.toml:4: rules[0].metrik: there is no such key; did you mean 'metric'?" in (
        ran.err
    )


def test_flags_over_environment_over_file(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "attnprobe.toml").write_text('[[rules]]\nmetric = "f_attr"\nmax = 0.1\n')
    assert run("audit", "bad.json").code == 1
    monkeypatch.setenv("ATTNPROBE_RULE", "f_attr<=0.5")
    assert run("audit", "bad.json").code == 0
    assert run("audit", "bad.json", "--rule", "f_attr<=0.2").code == 1
    monkeypatch.setenv("ATTNPROBE_PRESET", "gated")
    assert "gated/sink-rate" in run("audit", "bad.json").out
    assert "health/overflow" in run("audit", "bad.json", "--preset", "health").out
    monkeypatch.setenv("ATTNPROBE_FORMAT", "json")
    assert json.loads(run("audit", "bad.json").out)["counts"]["errors"] == 1
    assert run("audit", "bad.json", "--format", "csv").out.startswith("checkpoint,")
    monkeypatch.setenv("ATTNPROBE_FORMAT", "jsn")
    assert "did you mean 'json'" in run("audit", "bad.json").err
    monkeypatch.delenv("ATTNPROBE_FORMAT")
    monkeypatch.setenv("ATTNPROBE_PRESETS", "gated")
    ran = run("audit", "bad.json")
    assert (ran.code, "did you mean 'ATTNPROBE_PRESET'" in ran.err) == (2, True)


def test_targets_of_the_file_and_from_a_folder_below(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "attnprobe.toml").write_text('presets = "gated"\ncheckpoints = ["b*.json"]\n')
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    ran = run("audit")
    assert ran.code == 1
    assert "bad" in ran.out
    assert "good" not in ran.out
    monkeypatch.setenv("ATTNPROBE_CHECKPOINTS", "../good.json")
    assert run("audit").code == 0


def test_outputs_all_at_once(run: Run, folder: Path) -> None:
    files = ["a.json", "a.jsonl", "a.md", "a.csv", "a.txt", "a.xml", "a.sarif", "github:a.log"]
    outputs = [part for file in files for part in ("--output", file)]
    ran = run("audit", "bad.json", "--preset", "gated", *outputs, "--format", "github")
    assert ran.code == 1
    for file in files:
        assert (folder / file.rpartition(":")[2]).stat().st_size > 100, file
    assert (folder / "a.log").read_text() == ran.out
    assert ran.out.startswith("::error title=attnprobe gated/f-attr::bad: model.f_attr")


def test_baseline_from_the_command_line(run: Run, folder: Path) -> None:
    against = ("--baseline", "base.json", "-q", "--rule", "f_attr<=1")
    ran = run("audit", "good.json", *against, "--update-baseline")
    assert (ran.code, "good: added" in ran.out) == (0, True)
    assert run("audit", "good.json", *against).code == 0
    save_results([make("good", f_attr=0.3)], "good.json")
    ran = run("audit", "good.json", *against)
    assert ran.code == 1
    assert "after 0.05 in the baseline" in ran.out
    save_results([make("good", about={"sha256": "00" * 32})], "good.json")
    assert run("audit", "good.json", *against).code == 2
    for spelling in ("--allow-different", "--allow-different-input"):
        assert run("audit", "good.json", *against, spelling).code == 0
    assert load_results("base.json")[0].figure("f_attr") == 0.05


def test_a_baseline_alone_is_enough_to_judge_by(run: Run) -> None:
    ran = run("audit", "bad.json", "--baseline", "good.json")
    assert ran.code == 1
    assert ran.err == ""
    assert "baseline/f_attr" in ran.out


def test_trend_of_a_folder(run: Run, folder: Path) -> None:
    (folder / "runs").mkdir()
    for n, value in enumerate([0.05, 0.06, 0.12]):
        result = make(f"s{n}", step=n * 100, path=f"ckpt/s{n}.pt", f_attr=value)
        save_results([result], folder / f"runs/step{n}.json")
    (folder / "attnprobe.toml").write_text('[[rules]]\nmetric = "f_attr"\nmax_increase = 0.05\n')
    ran = run("audit", "runs", "--plots", "plots")
    assert ran.code == 1
    assert "after 0.06 at step 100" in ran.out
    assert "Trend of ckpt" in ran.out
    assert (folder / "plots/trend-ckpt.png").exists()


def test_init(run: Run, folder: Path) -> None:
    ran = run("init", "--preset", "gated")
    assert ran.code == 0
    before = (folder / "attnprobe.toml").read_text()
    again = run("init")
    assert (again.code, "--force" in again.err) == (2, True)
    assert (folder / "attnprobe.toml").read_text() == before
    assert run("audit", "good.json").code == 0
    assert run("audit", "bad.json").code == 1
    assert run("init", "--force").code == 0
    assert 'presets = ["health"]' in (folder / "attnprobe.toml").read_text()
    assert run("init", "--force").out.endswith("Next: attnprobe audit\n")
    assert run("init", "my rules.toml").out.endswith("attnprobe audit --config 'my rules.toml'\n")
    assert "did you mean 'gated'" in run("init", "x.toml", "--preset", "gatd").err
    assert run("init", "pyproject.toml").code == 2


def test_measures_checkpoints_and_takes_options_of_the_file(run: Run, folder: Path) -> None:
    import torch

    from attnprobe.models import GateConfig, ModelConfig, build, save_checkpoint

    torch.manual_seed(0)
    shape = ModelConfig(
        vocab_size=30, d_model=16, n_layers=2, n_heads=2, max_length=64, gate=GateConfig("G1")
    )
    save_checkpoint(folder / "tiny.pt", build(shape), None, {"step": 1})
    (folder / "attnprobe.toml").write_text(
        'presets = "gated"\ncheckpoints = "tiny.pt"\n[input]\nlength = 48\nsamples = 3\n'
    )
    ran = run("audit", "--format", "json")
    assert ran.code in (0, 1)
    (measured,) = json.loads(ran.out)["checkpoints"]
    assert measured == "tiny"
    ran = run("audit", "--baseline", "b.json", "--update-baseline", "--preset", "health")
    (saved,) = load_results("b.json")
    assert (saved.input["length"], saved.input["samples"]) == (48, 3)


def test_result_files_take_no_torch_and_no_second(folder: Path) -> None:
    code = (
        "import sys; from attnprobe.cli import main; "
        "code = main(['audit', 'good.json', 'bad.json', '--preset', 'gated', '--output', 'a.sarif',"
        " '--output', 'a.xml', '--output', 'a.md']); "
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(code)"
    )
    before = time.process_time(), _children()
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert _children() - before[1] < 3.0  # seconds of processor; a third of it on an idle machine


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, attnprobe.cli.audit, attnprobe.cli.init, attnprobe.audit; "
        "print({'torch', 'pandas', 'pydantic', 'matplotlib', 'junitparser'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_packaged_pair_under_gated(run: Run) -> None:
    ran = run("audit", "--preset", "gated", "--samples", "16", "-q", "--output", "a.json")
    assert ran.code == 1
    findings = json.loads(Path("a.json").read_text())["findings"]
    broken = {(f["checkpoint"], f["rule"]) for f in findings if f["status"] == "broken"}
    assert broken == {
        ("ungated", "gated/f-attr"),
        ("ungated", "gated/sink-rate"),
        ("ungated", "gated/gate-mean"),
    }
    assert "gated  4 passed" in ran.out
    assert "failed: 1 of 2 checkpoints (3 errors)" in ran.out
    assert run("audit", "gated", "--preset", "gated", "--samples", "16", "-q").code == 0
    assert run("audit", "ungated", "--preset", "gated", "--samples", "16", "-q").code == 1
