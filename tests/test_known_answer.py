"""The known answer of the whole pipeline: back-copy grows a drained sink unless there is a gate.

Guo et al. 2024: in text where every trigger character is followed by a copy of the one before it, a
softmax head has nothing to do at other characters, looks at the start token, and empties its value.
Two small models are trained by the command line and read by it, some ten seconds each.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from attnprobe import Result
from attnprobe.cli import main

RECIPE = (
    "--task backcopy --steps 600 --batch-size 32 --length 32 --lr 1e-2 --width 32 --layers 2 "
    "--heads 2 --ff 32 --norm post --positions rotary --seed 0 --save-every 0 --monitor-every 0 "
    "--device cpu --quiet"
)


def layers_of(folder: Path, gate: str) -> pd.DataFrame:
    """Trains a model and gives the layers of `attnprobe sink` on its own task."""
    checkpoint, output = str(folder / f"{gate}.pt"), str(folder / f"{gate}.json")
    assert main(["train", checkpoint, "--gate", gate, *RECIPE.split()]) == 0
    assert main(["sink", checkpoint, "--quiet", "--output", output]) == 0
    return Result.load(output).layers


@pytest.fixture(scope="module")
def ungated(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return layers_of(tmp_path_factory.mktemp("ungated"), "none")


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return layers_of(tmp_path_factory.mktemp("gated"), "G1")


def test_without_a_gate_a_drained_sink_grows(ungated: pd.DataFrame) -> None:
    second = ungated.loc[1]
    assert second["f_attr"] > 0.35 > 2.5 * second["f_attr_uniform"]
    assert second["sink_rate"] > 0.5
    assert second["value_drain"] < 0.5


def test_with_a_gate_neither_does(gated: pd.DataFrame) -> None:
    assert gated["f_attr"].max() < 1.4 * gated["f_attr_uniform"].max()
    assert gated.loc[1, "sink_rate"] < 0.1
    assert gated.loc[1, "value_drain"] > 0.6
