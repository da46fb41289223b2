"""What checkpoints are shown, as the command line says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import Folder, Ran

Run = Callable[..., Ran]


def result(ran: Ran) -> dict[str, Any]:
    assert (ran.code, ran.err) == (0, "")
    return json.loads(ran.out)["results"][0]


def test_one_token_repeated_from_end_to_end(checkpoints: Folder, run: Run) -> None:
    asked = ("scan", checkpoints / "text.pt", "--format", "json", "--length", 8)
    shown = result(run(*asked, "--repeated-token", "e", "--no-bos"))
    assert shown["input"]["source"].endswith("'e', without a start token")
    # whatever the weights are, attention to equal values adds the same vector everywhere
    assert [row["erank"] for row in shown["layers"]] == pytest.approx([1, 1], abs=1e-3)
    drawn = result(run(*asked, "--repeated-token", "random", "--samples", 3))
    assert drawn["input"]["samples"] == 3
    assert drawn["input"]["bos"] is True


def test_an_audit_measures_on_the_same(checkpoints: Folder, run: Run, tmp_path: Path) -> None:
    asked = (checkpoints / "text.pt", "--repeated-token", "e", "--length", 8, "--samples", 2)
    ours = result(run("sink", *asked, "--format", "json"))
    saved = tmp_path / "kept.json"
    audited = run("audit", *asked, "--no-cache", "--rule", "f_attr<=1", "--output", saved, "-q")
    assert audited.code == 0
    compared = run("compare", saved, checkpoints / "text.pt", *asked[1:], "-q")
    assert "another input" not in compared.out + compared.err
    assert ours["input"]["kind"] == "repeated"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--repeated-token", "whale"], "'whale' is 5 tokens of text: give the text of one, or"),
        (["--repeated-token", "a", "--random-tokens"], "exclude each other: choose one"),
        (["--chat-template", "--text", "a"], "text has no chat template: leave --chat-template"),
        (["--image", "nowhere.png"], "cannot read nowhere.png: No such file or directory"),
        (["--image", "a.png", "--tokens", "b.npy"], "--tokens and --image exclude each other"),
    ],
)
def test_one_line_says_what_is_wrong(
    options: list[str], says: str, checkpoints: Folder, run: Run
) -> None:
    ran = run("sink", checkpoints / "text.pt", *options)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert len(ran.err.strip().splitlines()) == 1
