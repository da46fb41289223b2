"""Memory is linear in the length: no tensor of queries × keys, and no quadratic growth."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnprobe import scan
from attnprobe.capture import AttentionCall
from attnprobe.models import Decoder, GateConfig, ModelConfig
from attnprobe.scanning import Scan

LENGTH = 2048


class Largest(TorchDispatchMode):
    """The most elements in memory of their own that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.name = 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                numel = leaf.untyped_storage().nbytes() // max(1, leaf.element_size())
                if numel > self.numel:
                    self.numel, self.name = numel, str(func)
        return result


def model(gate: GateConfig, **changes: object) -> Decoder:
    values = {"vocab_size": 11, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 16384}
    return Decoder(ModelConfig(**{**values, "gate": gate, **changes}))


@pytest.mark.parametrize("gate", [GateConfig(), GateConfig("G1")], ids=["plain", "gated"])
def test_no_tensor_of_queries_by_keys(gate: GateConfig) -> None:
    tokens = torch.randint(0, 11, (2, LENGTH))
    with Largest() as largest:
        scan(model(gate), tokens)
    assert 0 < largest.numel < LENGTH * LENGTH // 2, largest.name


def test_the_watch_would_see_one() -> None:
    with Largest() as largest:
        torch.ones(LENGTH, 1) * torch.ones(1, LENGTH)
    assert largest.numel == LENGTH * LENGTH


PROBE = """
import json, sys, torch
from attnprobe import scan
from attnprobe.capture import AttentionCall
from attnprobe.models import Decoder, ModelConfig
torch.set_num_threads(1)
model = Decoder(ModelConfig(vocab_size=11, d_model=32, n_layers=4, n_heads=1, d_ff=32,
                            max_length=1))
def held(name):  # not ru_maxrss, which a child takes over from a large parent
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
scan(model, torch.randint(0, 11, (1, 512)))
before = held("VmRSS:")
scan(model, torch.randint(0, 11, (1, int(sys.argv[1]))))
print(json.dumps([before, held("VmHWM:")]))
"""


def growth(length: int) -> int:
    """Bytes by which a scan of that length raised the process above what it held before."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(length)], capture_output=True, text=True, check=True
    )
    before, peak = json.loads(done.stdout)
    return peak - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_linear() -> None:
    """Twice the tokens take at most 2.2 times the memory, and less than a matrix of them."""
    short, long = growth(8192), growth(16384)
    assert long < 2.2 * short + (8 << 20), (short, long)  # the allocator rounds up
    assert long < 16384 * 16384  # a quarter of one float32 matrix


@pytest.mark.parametrize("gate", [GateConfig(), GateConfig("G1")], ids=["plain", "gated"])
def test_a_layer_lets_go_of_its_tensors(gate: GateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive while a layer is measured does not grow from layer to layer."""
    alive: list[int] = []
    measured = Scan._on_call

    def on_call(self: Scan, call: AttentionCall) -> None:
        held = [x for x in gc.get_objects() if type(x) is torch.Tensor and 67 in x.shape]
        alive.append(len({x.untyped_storage().data_ptr() for x in held if x.is_floating_point()}))
        measured(self, call)

    monkeypatch.setattr(Scan, "_on_call", on_call)
    scan(model(gate, n_layers=6), torch.randint(0, 11, (1, 67)))
    assert len(alive) == 6
    assert max(alive[2:]) <= alive[1], alive
