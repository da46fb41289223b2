"""Folders and ids on the command line: every verb takes them as it takes a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from tiny_models import Ran

from attnprobe import load_results, scan
from attnprobe.loading.identity import beside_sha256, sha256_of

TEXT = "the whale and the sea and the ship that sailed at dawn"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2", "bert", "t5"):
        tiny.save(kind, folder / kind, words=True)
    tiny.save("vit", folder / "vit")
    tiny.save("qwen3", folder / "bare")
    return folder


def test_a_folder_on_a_text(models: Path, run: Callable[..., Ran]) -> None:
    ran = run("scan", models / "llama", "--text", TEXT, "--no-bos", "--format", "json")
    assert (ran.code, ran.err) == (0, "")
    (result,) = json.loads(ran.out)["results"]
    assert result["checkpoint"]["architecture"] == "LlamaForCausalLM"
    words = ["<unk>", "<s>", "</s>", *tiny.WORDS]
    tokens = torch.tensor([[words.index(word) for word in TEXT.split()]])
    expected = scan(tiny.small("llama").eval(), tokens)
    assert [row["f_attr"] for row in result["heads"]] == expected.heads["f_attr"].tolist()
    assert result["model"]["ppl"] == expected.model["ppl"].item()


def test_all_kinds_at_once(models: Path, run: Callable[..., Ran], tmp_path: Path) -> None:
    kinds = ("llama", "gpt2", "bert", "t5", "vit")
    folders = [models / kind for kind in kinds]
    ran = run("scan", *folders, "--length", "8", "--samples", "2", "--output", tmp_path / "r.json")
    assert ran.code == 0
    results = load_results(tmp_path / "r.json")
    assert [result.checkpoint["name"] for result in results] == list(kinds)
    assert all(result.layers["f_attr"].notna().all() for result in results)
    assert set(results[3].layers["kind"]) == {"self", "cross"}
    for verb in ("scan", "sink"):
        ran = run(verb, tmp_path / "r.json")
        assert ran.code == 2
        assert "is a saved result, not a checkpoint: attnprobe compare and attnprobe" in ran.err


def test_without_a_tokenizer_random_tokens_are_shown(models: Path, run: Callable[..., Ran]) -> None:
    ran = run("sink", models / "bare", "--length", "8", "--samples", "2")
    assert ran.code == 0
    assert ran.err == (
        "attnprobe: note: bare comes without a tokenizer: measured on random tokens "
        "(--tokens FILE gives others)\n"
    )
    assert run("sink", models / "bare", "--length", "8", "--samples", "2", "--quiet").err == ""


def test_a_tokenizer_that_is_damaged_is_said(
    models: Path, run: Callable[..., Ran], tmp_path: Path
) -> None:
    tiny.save("llama", tmp_path / "m", words=True)
    (tmp_path / "m/tokenizer.json").write_text("{")
    ran = run("sink", tmp_path / "m", "--length", "8", "--samples", "2")
    assert ran.code == 2
    assert re.fullmatch(
        r"attnprobe: error: the tokenizer of .*: give --tokens FILE or --random-tokens\n", ran.err
    )
    ran = run("sink", tmp_path / "m", "--length", "8", "--samples", "2", "--random-tokens")
    assert (ran.code, ran.err) == (0, "")


def test_ids_and_their_flags(
    models: Path, run: Callable[..., Ran], hub_cache: Path, tmp_path: Path
) -> None:
    tiny.cached(hub_cache, "org/m", models / "llama", ref="v1")
    arguments = ("org/m", "--text", TEXT, "--format", "json")
    ran = run("sink", *arguments, "--offline")
    assert ran.code == 2
    assert "org/m is no path here and not in the cache" in ran.err
    ran = run("sink", *arguments, "--revision", "v1", "--offline")
    assert ran.code == 0
    (result,) = json.loads(ran.out)["results"]
    assert result["checkpoint"]["hub"] == {"id": "org/m", "commit": "c" * 40}


def test_compare_and_audit_take_them(
    models: Path,
    run: Callable[..., Ran],
    hub_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTNPROBE_CACHE", str(tmp_path / "cache"))
    tiny.cached(hub_cache, "org/m", models / "gpt2")
    tiny.save("gpt2", tmp_path / "runs/checkpoint-20", words=True)
    tiny.save("llama", tmp_path / "runs/checkpoint-3", words=True)
    arguments = (models / "llama", "org/m", "--text", TEXT)
    ran = run("compare", *arguments, "--format", "json")
    assert (ran.code, "2 of 2: m measured" in ran.err) == (0, True), ran.err
    assert "m known from the cache" in run("compare", *arguments, "--format", "json").err
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\nid = "some"\nmetric = "f_attr"\nmin = 0.0\n')
    ran = run("audit", tmp_path / "runs", "--config", rules, "--text", TEXT, "--format", "json")
    assert ran.code == 0, ran.err
    assert ran.out.index("checkpoint-3") < ran.out.index("checkpoint-20")
    assert ran.err.count("known from the cache") == 2  # the same weights as those before


def test_what_figures_depend_on_is_in_the_key(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "m", words=True)
    before = sha256_of(tmp_path / "m"), beside_sha256(tmp_path / "m")
    tiny.change_config(tmp_path / "m", lambda config: config.update(rms_norm_eps=1e-3))
    after = sha256_of(tmp_path / "m"), beside_sha256(tmp_path / "m")
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)
    (tmp_path / "m/tokenizer.json").write_text("{}")
    assert beside_sha256(tmp_path / "m") != after[1]
    about = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "m")}
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(about))
    (tmp_path / "a/adapter_model.safetensors").write_bytes(
        (tmp_path / "m/model.safetensors").read_bytes()
    )
    adapter = beside_sha256(tmp_path / "a")
    tiny.change_weights(tmp_path / "m", lambda w: {n: t * 2 for n, t in w.items()})
    assert beside_sha256(tmp_path / "a") != adapter


def test_models_says_what_a_folder_is(models: Path, run: Callable[..., Ran]) -> None:
    ran = run("models", models / "llama", models / "bare")
    assert (ran.code, ran.err) == (0, "")
    parameters = sum(p.numel() for p in tiny.small("llama").parameters())
    assert f"LlamaForCausalLM, llama, {parameters:,} parameters, float32" in ran.out
    assert "2 × 2, 1 key–value head" in ran.out
    assert "32 tokens, with a tokenizer" in ran.out
    assert "32 tokens, no tokenizer in the folder" in ran.out
    ran = run("models", models / "gpt2", "--format", "json")
    (entry,) = json.loads(ran.out)["checkpoints"]
    assert entry["config"]["num_hidden_layers"] == 2
    assert entry["format"] == "safetensors"
