"""A scan leaves nothing behind in the model, in transformers and in torch, and stands alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from inputs import cases
from zoo import built

import attnprobe

# through the interface (with a registry of its own, with gates and linear layers, with dropout's
# own switch), through torch's function, written out, an encoder–decoder
TYPES = [
    ("causal", "llama"),
    ("causal", "doge"),
    ("causal", "qwen3_next"),
    ("causal", "gpt2"),
    ("causal", "falcon"),
    ("causal", "bloom"),
    ("seq2seq", "t5"),
]
HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


class Stopped(Exception):
    """Raised in the middle of a pass."""


def state(model: Any) -> dict[str, Any]:
    """Everything that a scan might leave changed."""
    from transformers import masking_utils, modeling_utils

    registries = (
        modeling_utils.AttentionInterface,
        modeling_utils.ALL_ATTENTION_FUNCTIONS,
        masking_utils.AttentionMaskInterface,
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
    )
    modules = list(model.modules())
    return {
        "registries": [dict(registry._global_mapping) for registry in registries],
        "own registries": [dict(getattr(r, "_local_mapping", {})) for r in registries],
        "classes": [{**vars(r if isinstance(r, type) else type(r))} for r in registries],
        "functions": [dict(vars(m)) for m in (modeling_utils, masking_utils)],
        "torch": [dict(vars(nn.functional)), torch._C._len_torch_function_stack()],
        "implementations": [
            getattr(m, "config", model.config)._attn_implementation for m in modules
        ],
        "hooks": [[list(getattr(m, name).values()) for name in HOOKS] for m in modules],
        "attributes": [sorted(vars(m)) for m in modules],
        "training": [m.training for m in modules],
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "random": torch.get_rng_state().tolist(),
    }


def shown(task: str, name: str, **options: Any) -> tuple[Any, Tensor, dict[str, Any]]:
    """A model in a mode of its own and what it is given."""
    model: Any = built(task, name, **options)
    padded, _ = cases(task, model)
    model.train()
    next(iter(model.children())).eval()
    return model, padded.tokens, padded.options


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for part, own in before.items():
        assert after[part] == own, part


@pytest.mark.parametrize("implementation", ["default", "eager"])
@pytest.mark.parametrize(("task", "name"), TYPES)
def test_nothing_is_left_of_a_scan(task: str, name: str, implementation: str) -> None:
    options = {} if implementation == "default" else {"attn_implementation": implementation}
    model, tokens, given = shown(task, name, **options)
    attnprobe.scan(model, tokens, metrics="sink", **given)  # what is built at first use is there
    before = state(model)
    attnprobe.scan(model, tokens, **given)
    same(before, state(model))


@pytest.mark.parametrize(("task", "name"), TYPES)
def test_nothing_is_left_of_a_scan_that_raised(task: str, name: str) -> None:
    model, tokens, given = shown(task, name)
    attnprobe.scan(model, tokens, metrics="sink", **given)
    last = [m for m in model.modules() if not isinstance(m, nn.ModuleList)][-1]

    def stop(*_: Any) -> None:
        raise Stopped

    handle = last.register_forward_hook(stop)
    before = state(model)
    with pytest.raises(Stopped):
        attnprobe.scan(model, tokens, **given)
    same(before, state(model))
    handle.remove()


def figures(model: nn.Module, tokens: Tensor, **options: Any) -> pd.DataFrame:
    return attnprobe.scan(model, tokens, **options).heads


def test_a_scan_within_another_changes_neither() -> None:
    outer, tokens, given = shown("causal", "llama")
    inner, others, more = shown("causal", "bloom")
    alone = figures(outer, tokens, **given), figures(inner, others, **more)
    found = []
    again = figures(
        outer,
        tokens,
        batch_size=1,
        progress=lambda *_: found.append(figures(inner, others, **more)),
        **given,
    )
    pd.testing.assert_frame_equal(again, alone[0], rtol=1e-5, atol=1e-6)
    assert len(found) == len(tokens)
    for own in found:
        pd.testing.assert_frame_equal(own, alone[1])


def test_two_scans_at_once_change_neither() -> None:
    models = [shown("causal", name) for name in ("llama", "mistral")]
    runs: list[Callable[[], pd.DataFrame]] = [
        lambda m=m, t=t, o=o: figures(m, t, batch_size=1, **o) for m, t, o in models
    ]
    alone = [run() for run in runs]
    before = [state(model) for model, _, _ in models]
    found: dict[int, pd.DataFrame] = {}
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        barrier.wait()
        found[number] = runs[number]()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, own in enumerate(alone):
        pd.testing.assert_frame_equal(found[number], own)
    for (model, _, _), own in zip(models, before, strict=True):
        same(own, state(model))


@pytest.mark.parametrize(("task", "name"), TYPES)
def test_dropout_is_off_while_measuring(task: str, name: str) -> None:
    model, tokens, given = shown(task, name)
    for module in model.modules():
        for rate in ("attention_dropout", "dropout", "p", "dropout_rate"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.5)
    trained = figures(model, tokens, **given)
    model.eval()
    pd.testing.assert_frame_equal(trained, figures(model, tokens, **given))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_next", "bloom", "falcon"])
def test_half_precision_is_near_single(name: str) -> None:
    model = built("causal", name)
    padded, _ = cases("causal", model)
    columns = ["f_attr", "entropy"]
    single = figures(model, padded.tokens, **padded.options)[columns]
    half = figures(model.bfloat16(), padded.tokens, **padded.options)[columns]
    off = (single - half).abs().max()
    assert 0 < off["f_attr"] < 2e-3, off["f_attr"]
    assert 0 < off["entropy"] < 2e-2, off["entropy"]
