"""The check that a captured call gives what its module gave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch
from test_engine_blocks import CASES, HEADS, WIDTH, Case, make_call

from attnprobe.capture import AttentionCall
from attnprobe.engine.check import problem


def honest(name: str, **options: object) -> AttentionCall:
    """A call with the output that its arguments give."""
    case: Case = CASES[name](40)
    call = make_call(case, **options)
    dense = reference.attend(
        *(call.query, call.key, call.value, case.visible, case.bias),
        softcap=call.softcap,
        sinks=call.sinks,
    )
    return replace(call, output=dense.output.to(call.value.dtype))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_an_honest_call_passes(name: str, dtype: torch.dtype) -> None:
    assert problem(honest(name, dtype=dtype)) is None
    sinks = torch.linspace(-1, 3, HEADS)[None, :, None]
    assert problem(honest(name, dtype=dtype, softcap=3.0, sinks=sinks)) is None


@pytest.mark.parametrize("name", ["full", "causal", "window", "left_padding", "packed"])
def test_another_scale_or_mask_is_found(name: str) -> None:
    call = honest(name)
    assert "does not give" in str(problem(replace(call, scale=1.0)))
    wider = replace(call.mask, causal=False, window=3)
    assert "does not give" in str(problem(replace(call, mask=wider)))
    assert problem(replace(call, reasons={"all": "dropout"})) == "dropout"


@pytest.mark.parametrize("part", ["query", "key", "value", "output"])
def test_what_is_no_number_is_told(part: str) -> None:
    call = honest("causal")
    spoiled = getattr(call, part).clone()
    spoiled[1, 0, 20, 3] = torch.inf
    assert f"NaN or infinity ({part}" in str(problem(replace(call, **{part: spoiled})))


@pytest.mark.parametrize("name", ["left_padding", "right_padding"])
@pytest.mark.parametrize("value", [5.0, torch.nan])
def test_what_padding_holds_does_not_matter(name: str, value: float) -> None:
    """Models differ in what a query of padding attends to, and some give NaN there."""
    call = honest(name)
    there = call.queries.valid[:, None, :, None].expand(-1, HEADS, -1, WIDTH)
    output = torch.where(there, call.output, torch.tensor(value))
    assert problem(replace(call, output=output)) is None
