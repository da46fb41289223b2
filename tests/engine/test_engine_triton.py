"""The CUDA kernels, run by Triton's interpreter on the CPU, against blocks of logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnprobe.capture import AttentionCall, Documents, Mask, Site
from attnprobe.engine import blocks, measuring
from attnprobe.engine.coverage import cover
from attnprobe.engine.sums import Sums

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
from attnprobe.engine import triton_kernels

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 150, 24
SITE = Site("attention", "decoder", "self", 0)
MASKS = ("causal", "full", "window", "left", "right", "packed", "cached", "cross")


def call(
    name: str, groups: int = 2, dtype: torch.dtype = torch.float32, **extra: object
) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    n_queries = {"cached": 40, "cross": 70}.get(name, LENGTH)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    if name in ("left", "right"):
        ids[0, : LENGTH // 3] = ids[1, :99] = -1
        ids = ids.flip(1) if name == "right" else ids
    if name == "packed":
        ids[:, 50:], ids[1, 53:], ids[0, 140:] = 1, 2, -1
    keys = Documents(ids)
    queries = keys if n_queries == LENGTH else Documents(ids[:, -n_queries:])
    mask = Mask(
        n_queries,
        LENGTH,
        causal=name not in ("full", "cross"),
        offset=LENGTH - n_queries if name == "cached" else 0,
        window=20 if name == "window" else None,
        key_padding=keys.valid if name in ("left", "right") else None,
        documents=(ids, ids) if name == "packed" else None,
    )
    query = torch.randn(BATCH, n_queries, HEADS, WIDTH, generator=generator).transpose(1, 2) * 2
    key = torch.randn(BATCH, groups, LENGTH, WIDTH, generator=generator)
    given = {"sinks": None} | extra
    parts = (query.to(dtype), key.to(dtype), key.to(dtype), query.to(dtype))
    return AttentionCall(
        SITE, *parts, scale=WIDTH**-0.5, mask=mask, queries=queries, keys=keys, **given
    )


def assert_filled_alike(one: AttentionCall) -> None:
    theirs, ours = (Sums(one, cover(one)) for _ in range(2))
    assert triton_kernels.supports(ours)
    triton_kernels.fill(ours)
    blocks.reduce(theirs)
    mine, want = ours.stats("triton"), theirs.stats("blocks")
    assert mine.engine == "triton"
    for name in (
        *("first", "first4", "null", "lse", "entropy", "entropy_nosink", "mass", "max_logit"),
        *("valid", "visible", "sees_first", "seen"),
    ):
        torch.testing.assert_close(
            getattr(mine, name), getattr(want, name), rtol=2e-5, atol=2e-5, msg=name
        )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_mask_of_runs(name: str, groups: int) -> None:
    assert_filled_alike(call(name, groups))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_half_precision(dtype: torch.dtype, name: str) -> None:
    assert_filled_alike(call(name, dtype=dtype))


@pytest.mark.parametrize("name", ["causal", "window"])
def test_learned_sinks(name: str) -> None:
    assert_filled_alike(call(name, sinks=torch.linspace(-2, 6, HEADS)[None, :, None]))


def test_a_sink_that_takes_all() -> None:
    one = call("causal")
    one.query[..., 0], one.key[..., 0] = 1, 0
    one.key[:, :, 0] = 0
    one.key[:, :, 0, 0] = 70 * WIDTH**0.5
    assert_filled_alike(one)


@pytest.mark.parametrize("change", ["softcap", "bias", "pieces", "double"])
def test_what_the_kernels_leave_to_blocks(change: str) -> None:
    one = call("full", dtype=torch.float64 if change == "double" else torch.float32)
    if change == "softcap":
        one = replace(one, softcap=5.0)
    elif change in ("bias", "pieces"):
        dense = torch.rand(1, 1, LENGTH, LENGTH)
        one = replace(
            one, mask=Mask(LENGTH, LENGTH, dense=dense if change == "bias" else dense < 0.5)
        )
    assert not triton_kernels.supports(Sums(one, cover(one)))


def test_kernels_that_disagree_or_fail_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = torch.device("cpu"), torch.float32, 32
    assert measuring.agree(triton_kernels, *shape)
    assert not measuring.agree(triton_kernels, torch.device("cpu"), torch.float32, 8)

    def fails(sums: Sums) -> None:
        raise RuntimeError("no compiler")

    for broken in (lambda sums: None, fails):
        with monkeypatch.context() as patch:
            patch.setattr(triton_kernels, "fill", broken)
            assert not measuring.agree(triton_kernels, *shape)
