"""The measuring verbs on checkpoints that are there, and what comes out of them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from tiny import LENGTH, Folder, Ran

from attnprobe import load_checkpoint, load_results
from attnprobe.cli.options import ranges
from attnprobe.cli.reporting import gravest
from attnprobe.errors import InputError
from attnprobe.loading import places

Run = Callable[..., Ran]
VERBS = ("scan", "sink", "entropy", "rank", "gate")


@pytest.fixture
def pair(checkpoints: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the packaged checkpoints."""
    folder = tmp_path / "packaged"
    folder.mkdir()
    for name in ("gated", "ungated"):
        shutil.copy(checkpoints / f"{name}.pt", folder)
    shutil.copy(checkpoints / "gated.pt", folder / "gated-head.pt")
    monkeypatch.setattr(places, "PRETRAINED", folder)
    return folder


@pytest.fixture
def results(run: Run, tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a verb with JSON on stdout and gives the results."""

    def get(*arguments: object) -> list[Any]:
        ran = run(*arguments, "--format", "json")
        assert ran.code == 0, ran.err
        path = tmp_path / "stdout.json"
        path.write_text(ran.out)
        return load_results(path)

    return get


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_checkpoint_the_packaged_pair_is_measured(
    verb: str, pair: Path, run: Run
) -> None:
    ran = run(verb)
    assert ran.code == 0
    assert "gated" in ran.out
    assert "gated-head" not in ran.out
    if verb == "gate":
        note = "attnprobe: note: ungated: nothing could be measured: no gate"
        assert ran.err.startswith(note)
    else:
        assert "ungated" in ran.out
        assert ran.err == ""


@pytest.mark.parametrize(
    ("verb", "format"),
    [
        *((verb, "json") for verb in VERBS),
        *(("scan", format) for format in ("jsonl", "csv", "md", "latex")),
    ],
)
def test_formats(verb: str, format: str, checkpoints: Folder, run: Run) -> None:
    ran = run(verb, checkpoints / "gated.pt", "--samples", 20, "--format", format)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("\n")
    assert "\x1b" not in ran.out


@pytest.mark.parametrize("verb", VERBS)
def test_lines_fit_80_columns_in_a_pipe(verb: str, checkpoints: Folder, run: Run) -> None:
    ran = run(verb, checkpoints / "gated.pt", checkpoints / "ungated.pt")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "\x1b" not in ran.out


def test_columns_is_honoured(
    checkpoints: Folder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, run("sink", checkpoints / "gated.pt").out.splitlines())) <= 50


def test_who_and_on_what_is_written_down(checkpoints: Folder, results: Any) -> None:
    (result,) = results("scan", checkpoints / "gated.pt")
    about = result.checkpoint
    assert about["name"] == "gated"
    assert about["path"] == checkpoints / "gated.pt"
    assert (about["step"], about["loss"], about["seed"]) == (7, 1.5, 0)
    assert len(about["sha256"]) == 64
    assert result.input["source"].startswith("its own task")
    assert (result.input["bos"], result.input["seed"]) == (True, 0)
    assert result.input["length"] == LENGTH
    assert result.run["device"] == "cpu"
    assert result.measured


@pytest.mark.parametrize(
    ("arguments", "layers", "heads"),
    [
        (["--layer", "1"], [1], [0, 1]),
        (["--layer", "-1"], [2], [0, 1]),
        (["--layers", "0-1"], [0, 1], [0, 1]),
        (["--layer", "0,-1"], [0, 2], [0, 1]),
        (["--layer", "0", "--layer", "2"], [0, 2], [0, 1]),
        (["--head", "1"], [0, 1, 2], [1]),
        (["--head", "-1"], [0, 1, 2], [1]),
        (["--layer", "2", "--head", "0-1"], [2], [0, 1]),
    ],
)
def test_layers_and_heads_are_chosen(
    arguments: list[str], layers: list[int], heads: list[int], checkpoints: Folder, results: Any
) -> None:
    (result,) = results("sink", checkpoints / "wide.pt", *arguments)
    assert sorted(result.layers["layer"].unique()) == layers
    assert sorted(result.heads["head"].unique()) == heads


@pytest.mark.parametrize("verb", VERBS)
def test_one_layer_is_shown_in_depth(verb: str, checkpoints: Folder, run: Run) -> None:
    ran = run(verb, checkpoints / "gated.pt", checkpoints / "wide.pt", "--layer", "-1")
    assert ran.code == 0
    assert "layer 1" in ran.out


def test_what_a_verb_runs(checkpoints: Folder, results: Any) -> None:
    def metrics(verb: str) -> set[str]:
        (result,) = results(verb, checkpoints / "gated.pt", "--samples", 20)
        return set(result.run["metrics"])

    assert metrics("sink") == {"sink"}
    assert metrics("entropy") == {"entropy", "sink"}
    assert metrics("rank") == {"rank", "sink"}
    assert metrics("gate") == {"gate"}
    assert metrics("scan") >= {"sink", "entropy", "rank", "gate", "activation", "perplexity"}


def test_options_reach_the_scan(checkpoints: Folder, results: Any) -> None:
    path = checkpoints / "gated.pt"
    (plain,) = results("scan", path)
    (other,) = results("scan", path, "--pre-gate", "--epsilon", "0.05")
    assert other.run["pre_gate"] is True
    assert other.run["epsilon"] == 0.05
    assert plain.layers["erank"].iloc[0] != other.layers["erank"].iloc[0]
    assert other.sinks["documents"].sum() > plain.sinks["documents"].sum()


@pytest.mark.parametrize("size", [1, 7])
def test_batch_size_changes_nothing(size: int, checkpoints: Folder, results: Any) -> None:
    path = checkpoints / "gated.pt"
    (plain,) = results("sink", path, "--samples", 20)
    (cut,) = results("sink", path, "--samples", 20, "--batch-size", size)
    assert cut.run["batch_size"] == size
    np.testing.assert_allclose(plain.heads["f_attr"], cut.heads["f_attr"], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast(dtype: str, checkpoints: Folder, results: Any) -> None:
    (result,) = results("sink", checkpoints / "gated.pt", "--dtype", dtype)
    assert result.run["dtype"] == dtype
    assert result.heads["f_attr"].notna().all()


def test_a_text_names_its_tokens_and_is_measured_as_it_is(
    checkpoints: Folder, results: Any
) -> None:
    path = checkpoints / "text.pt"
    (result,) = results("sink", path, "--text", "whale", "--text", "a ship")
    assert (result.input["samples"], result.input["length"]) == (2, 7)
    assert result.input["tokens"] == len("whale") + len("a ship") + 2
    (bare,) = results("sink", path, "--text", "whale", "--no-bos")
    assert bare.input["tokens"] == 5
    assert bare.input["bos"] is False


def test_a_bare_state_dict_is_measured_on_random_tokens_and_says_so(
    checkpoints: Folder, run: Run
) -> None:
    shape = ["--model-config", checkpoints / "shape.json"]
    ran = run("sink", checkpoints / "bare.pt", *shape)
    assert ran.code == 0
    assert ran.err.startswith("attnprobe: note: bare comes without a tokenizer")
    assert run("sink", checkpoints / "bare.pt", *shape, "--quiet").err == ""
    assert run("sink", checkpoints / "bare.pt", *shape, "--random-tokens").err == ""


def test_safetensors(tmp_path: Path, checkpoints: Folder, results: Any) -> None:
    checkpoint = load_checkpoint(checkpoints / "gated.pt")
    config = json.dumps(checkpoint.config.to_dict())
    save_file(checkpoint.model.state_dict(), tmp_path / "g.safetensors", {"attnprobe": config})
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[0, 3, 4, 5, 6], [0, 7, 8]]))
    (ours,) = results("scan", tmp_path / "g.safetensors", "--tokens", ids)
    (same,) = results("scan", checkpoints / "gated.pt", "--tokens", ids)
    assert ours.input["sha256"] == same.input["sha256"]
    assert ours.heads["f_attr"].tolist() == same.heads["f_attr"].tolist()


def test_an_encoder_decoder(checkpoints: Folder, results: Any) -> None:
    (result,) = results("scan", checkpoints / "translator.pt", "--length", "12")
    assert set(result.layers["kind"]) == {"self", "cross"}
    assert result.layers["f_attr"].notna().all()


def test_a_folder_stands_for_its_checkpoints(
    tmp_path: Path, checkpoints: Folder, results: Any
) -> None:
    for name in ("step10", "step9"):
        shutil.copy(checkpoints / "gated.pt", tmp_path / f"{name}.pt")
    (tmp_path / "step9.metrics.csv").touch()
    assert [result.name for result in results("sink", tmp_path)] == ["step9", "step10"]


def test_different_tokens_are_pointed_out(checkpoints: Folder, run: Run) -> None:
    ran = run("sink", checkpoints / "gated.pt", checkpoints / "text.pt")
    assert ran.code == 0
    assert "different tokens" in ran.err


def test_nothing_measured_is_exit_3(checkpoints: Folder, run: Run) -> None:
    ran = run("gate", checkpoints / "ungated.pt", "--format", "json")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("attnprobe: error: nothing could be measured: no gate")
    assert ran.err.endswith("attnprobe scan measures the others\n")
    assert len(ran.error_lines) == 1


@pytest.mark.parametrize(
    "arguments", [["ungated.pt"], ["ungated.pt", "--layer", "1"], ["translator.pt", "--layer", "0"]]
)
def test_a_model_without_a_gate_is_told_what_measures_it(
    arguments: list[str], checkpoints: Folder, run: Run
) -> None:
    ran = run("gate", checkpoints / arguments[0], *arguments[1:], "-q")
    assert (ran.code, ran.out) == (3, "")
    (line,) = ran.error_lines
    assert line.startswith("attnprobe: error: nothing could be measured: no gate")
    assert line.endswith(
        "attnprobe gate is for models with one, attnprobe scan measures the others"
    )
    assert "only some layers" not in line


def test_a_broken_checkpoint_outweighs_nothing_measured(
    tmp_path: Path, checkpoints: Folder, run: Run
) -> None:
    assert run("gate", checkpoints / "ungated.pt", tmp_path / "missing.pt").code == 2


def test_files_of_every_kind(tmp_path: Path, checkpoints: Folder, run: Run) -> None:
    pytest.importorskip("pyarrow")
    names = ["r.json", "r.jsonl", "r.csv", "r.md", "r.tex", "r.parquet"]
    outputs = [part for name in names for part in ("--output", tmp_path / name)]
    ran = run("scan", checkpoints / "gated.pt", *outputs, "--table", "heads")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    (result,) = load_results(tmp_path / "r.json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert [float(row["f_attr"]) for row in rows] == result.heads["f_attr"].tolist()
    assert "F-Attr" in ran.out, "the table goes to stdout all the same"


def test_an_old_file_stays_when_the_run_fails(tmp_path: Path, run: Run) -> None:
    (tmp_path / "out.json").write_text("old")
    assert run("scan", tmp_path / "missing.pt", "--output", tmp_path / "out.json").code == 2
    assert (tmp_path / "out.json").read_text() == "old"


def test_csv_of_gates_is_the_default_of_gate(checkpoints: Folder, run: Run) -> None:
    header = run("gate", checkpoints / "gated.pt", "--format", "csv").out.splitlines()[0]
    assert "granularity" in header
    header = run("sink", checkpoints / "gated.pt", "--format", "csv").out.splitlines()[0]
    assert "f_attr" in header


@pytest.mark.parametrize("format", ["png", "svg"])
def test_plots(format: str, tmp_path: Path, checkpoints: Folder, run: Run) -> None:
    pytest.importorskip("attnprobe.render.plots")
    folder = tmp_path / "new" / "figures"
    ran = run("sink", checkpoints / "gated.pt", "--plots", folder, "--plot-format", format)
    assert (ran.code, ran.err) == (0, "")
    drawn = list(folder.iterdir())
    assert drawn
    assert {path.suffix for path in drawn} == {f".{format}"}


def test_the_same_seed_draws_the_same(checkpoints: Folder, results: Any) -> None:
    def digest(*arguments: object) -> str:
        (result,) = results("sink", checkpoints / "gated.pt", "--samples", 20, *arguments)
        return str(result.input["sha256"])

    assert digest("--seed", 1) == digest("--seed", 1) != digest("--seed", 2)
    assert digest("--random-tokens") == digest("--random-tokens") != digest()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("0-3,-1", [0, 1, 2, 3, -1]),
        ("-3--1", [-3, -2, -1]),
        (" 1 , 2 - 4 ", [1, 2, 3, 4]),
        ("2,2,1-2", [2, 1]),
    ],
)
def test_ranges_include_both_ends(text: str, numbers: list[int]) -> None:
    assert ranges("--layer", [text]) == numbers


@pytest.mark.parametrize("text", ["", "a", "1-", "1..3", "2--1", "3-1", "0-99999999999", "٣"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(InputError, match="--layer"):
        ranges("--layer", [text])


def test_the_gravest_code_wins() -> None:
    assert gravest() == gravest(0) == 0
    assert gravest(3, 0) == 3
    assert gravest(3, 1) == 1
    assert gravest(3, 2, 1, 0) == 2
    assert gravest(2, 130) == 130
