"""What can be chosen when a model is trained, without importing what trains it."""

from __future__ import annotations

from typing import Literal, get_args

Task = Literal["backcopy", "text"]
Tokens = Literal["bytes", "bpe"]
GatePosition = Literal["none", "G1", "G2", "G3", "G4", "G5"]
Granularity = Literal["element", "head", "head-shared"]
GateSource = Literal["query", "input-independent"]
GateActivation = Literal["sigmoid", "silu", "relu", "gelu", "identity", "half-sigmoid"]
GateMode = Literal["multiplicative", "additive"]
Positions = Literal["rotary", "sinusoidal", "learned"]
Norm = Literal["pre", "post"]
FeedForward = Literal["relu", "gelu", "swiglu"]

#: Option of `attnprobe train` to its choices.
SPACE: dict[str, tuple[str, ...]] = {
    "--task": get_args(Task),
    "--tokens": get_args(Tokens),
    "--gate": get_args(GatePosition),
    "--granularity": get_args(Granularity),
    "--source": get_args(GateSource),
    "--activation": get_args(GateActivation),
    "--mode": get_args(GateMode),
    "--positions": get_args(Positions),
    "--norm": get_args(Norm),
    "--feed-forward": get_args(FeedForward),
}
