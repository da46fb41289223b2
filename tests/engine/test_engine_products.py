"""Products of queries and keys: the same by either library, and without the private operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attnprobe.capture import AttentionCall, Documents, Mask, Site
from attnprobe.engine import measure, products


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


def test_gram(operator: str) -> None:
    rows = torch.randn(90, 24)
    torch.testing.assert_close(
        products.gram(rows).double(), rows.double().mT @ rows.double(), rtol=0, atol=1e-4
    )


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
