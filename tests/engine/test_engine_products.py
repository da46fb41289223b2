"""Products of queries and keys: the same by either library, and without the private operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attnprobe.capture import AttentionCall, Documents, Mask, Site
from attnprobe.engine import blocks, measure, plan, products


@pytest.fixture(params=["as it is", "gone", "wrong"])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def gone(rows: Tensor, columns: Tensor) -> Tensor:
        raise AttributeError("no such operator")

    def wrong(rows: Tensor, columns: Tensor) -> Tensor:
        return 1.01 * (rows @ columns.mT)

    if request.param != "as it is":
        monkeypatch.setattr(products, "_product", gone if request.param == "gone" else wrong)
    products.works.cache_clear()
    yield request.param
    monkeypatch.undo()
    products.works.cache_clear()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "width"), [(1, 1, 1), (5, 3, 0), (130, 70, 64), (200, 2100, 8)]
)
def test_logits(
    operator: str, count: int, dtype: torch.dtype, rows: int, columns: int, width: int
) -> None:
    query = torch.randn(count, rows, width, dtype=torch.double).to(dtype)
    key = torch.randn(count, 2 * columns, width, dtype=torch.double).to(dtype)[:, ::2]
    out = torch.empty(count, rows, columns, dtype=dtype)
    found = products.logits(query, key, out)
    exact = query.double() @ key.double().mT
    error = 5e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=error)
    assert found is out


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_are_in_full_precision_and_the_setting_is_put_back(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        for _ in range(2):
            with products.exact():
                inside = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
                assert inside == "ieee"
            assert torch.get_float32_matmul_precision() == precision
            assert torch.backends.cuda.matmul.allow_tf32 is (precision != "highest")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("rows", [1, 127, 128, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_linear_maps(rows: int, bias: bool, dtype: torch.dtype, operator: str) -> None:
    random = torch.Generator().manual_seed(0)
    input = torch.randn(rows, 24, generator=random).to(dtype)
    weight = torch.randn(1500, 24, generator=random).to(dtype)
    more = torch.randn(1500, generator=random).to(dtype) if bias else None
    given = more.clone() if more is not None else None
    found = products.linear(input, weight, more)
    assert found.dtype == dtype
    exact = input.double() @ weight.double().mT + (0.0 if given is None else given.double())
    rounding = 5e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=rounding)
    assert given is None or torch.equal(more, given)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_matter(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "WORTH_THREADS", 0)
    monkeypatch.setitem(plan.BLOCK_ELEMENTS, "cpu", 1 << 12)
    documents = Documents.whole(3, 90)
    query = torch.randn(3, 4, 90, 8, generator=torch.Generator().manual_seed(0))
    call = AttentionCall(
        Site("attention", "decoder", "self", 0),
        *(query, query[:, :2], query[:, :2], query),
        scale=0.5,
        mask=Mask(90, 90, causal=True),
        queries=documents,
        keys=documents,
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            found = measure(call)
        assert torch.get_num_threads() == threads
        torch.set_num_threads(1)
        alone = measure(call)
    finally:
        torch.set_num_threads(before)
    for name in ("first", "entropy", "entropy_nosink", "mass", "max_logit", "seen"):
        torch.testing.assert_close(getattr(found, name), getattr(alone, name), rtol=0, atol=0)


def test_the_engine_needs_no_private_operator(operator: str) -> None:
    documents = Documents.whole(1, 300)
    query, key = torch.randn(2, 1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    call = AttentionCall(
        Site("attention", "decoder", "self", 0),
        *(query, key, key, query),
        scale=0.25,
        mask=Mask(300, 300, causal=True),
        queries=documents,
        keys=documents,
    )
    hidden = ~torch.ones(300, 300).tril().bool()
    exact = (query.double() @ key.double().mT * 0.25).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(measure(call).mass.double(), exact.sum(-2), rtol=1e-5, atol=1e-5)
