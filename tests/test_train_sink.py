"""The known answer: back-copy grows a sink in a softmax layer, and none in its gated twin.

Guo et al. 2024 ("Active-Dormant Attention Heads") find it in a single layer: where there is nothing
to copy, the head looks at the start token, whose value has shrunk to nearly nothing. A gate on the
head's output does that work itself, so neither is needed.
"""

from __future__ import annotations

import pytest

import attnprobe
from attnprobe import tasks
from attnprobe.models import GateConfig, load_checkpoint
from attnprobe.train import TrainConfig, train

LENGTH = 48
FLOOR = sum(1 / n for n in range(1, LENGTH + 1)) / LENGTH  # uniform attention: 0.093


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """F-Attr and value drain of the one layer, without and with a gate."""
    folder, figures = tmp_path_factory.mktemp("sink"), {}
    for name, gate in {"ungated": GateConfig(), "gated": GateConfig("G1", "head")}.items():
        config = TrainConfig(
            steps=400,
            batch_size=32,
            length=LENGTH,
            lr=2e-2,
            width=32,
            layers=1,
            heads=1,
            ff=32,
            norm="post",
            gate=gate,
            save_every=0,
            monitor_every=0,
            device="cpu",
        )
        checkpoint = load_checkpoint(train(config, folder / f"{name}.pt").path)
        tokens = tasks.load(checkpoint.inputs).sample(64, LENGTH, seed=1)
        figures[name] = attnprobe.scan(checkpoint.model, tokens, metrics=["sink"]).layers.iloc[0]
    return figures


def test_softmax_grows_a_sink(measured):
    assert measured["ungated"]["f_attr_uniform"] == pytest.approx(FLOOR, abs=1e-6)
    assert measured["ungated"]["f_attr"] > 5 * FLOOR
    assert measured["ungated"]["value_drain"] < 0.3


def test_a_gate_needs_none(measured):
    assert measured["gated"]["f_attr"] < measured["ungated"]["f_attr"] / 2.5
    assert measured["gated"]["value_drain"] > 0.5
