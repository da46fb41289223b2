"""Which document a token belongs to and where it stands in it, on any side of the padding."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnprobe.capture import Documents

IDS = {
    "whole": [[0, 0, 0, 0, 0, 0]],
    "left": [[-1, -1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    "right": [[0, 0, 0, -1, -1, -1], [0, 0, 0, 0, 0, 0]],
    "both": [[-1, 0, 0, 0, -1, -1], [-1, -1, -1, -1, -1, 0]],
    "packed": [[5, 5, 2, 2, 2, -1], [7, 7, 7, 7, 7, 7]],
    "a hole": [[0, 0, -1, 0, 0, 0]],
    "none": [[-1, -1]],
}


def slow_positions(ids: torch.Tensor) -> torch.Tensor:
    position = torch.full_like(ids, -1)
    for row, columns in reference.documents(ids):
        for n, c in enumerate(columns):
            position[row, c] = n
    return position


def assert_documents(ids: torch.Tensor) -> None:
    documents, slow = Documents(ids), reference.documents(ids)
    assert len(documents) == len(slow)
    assert documents.lengths.tolist() == [len(columns) for _, columns in slow]
    assert documents.names[:, 0].tolist() == [row for row, _ in slow]
    assert torch.equal(documents.position, slow_positions(ids))
    assert documents.valid.tolist() == (ids >= 0).tolist()
    for d, (row, columns) in enumerate(slow):
        assert (documents.index[row] == d).nonzero().flatten().tolist() == columns
        assert documents.leading[d].tolist() == (columns + [-1] * 4)[:4]
    assert bool((documents.index[ids < 0] == -1).all())


@pytest.mark.parametrize("name", IDS)
def test_positions_and_leading_keys(name: str) -> None:
    assert_documents(torch.tensor(IDS[name]))


@given(st.lists(st.lists(st.integers(-1, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_any_ids(rows: list[list[int]]) -> None:
    assert_documents(torch.tensor(rows))


@given(
    st.lists(st.lists(st.integers(-1, 2), min_size=5, max_size=5), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(-1, 2), min_size=6, max_size=6), min_size=2, max_size=2),
)
def test_leading_keys_of_queries_on_another_side(
    queries: list[list[int]], keys: list[list[int]]
) -> None:
    query_ids, key_ids = torch.tensor(queries), torch.tensor(keys)
    slow = reference.first_columns(query_ids, key_ids, 4)
    found = Documents(key_ids).leading_for(Documents(query_ids))
    want = [[(columns + [-1] * 4)[:4] for columns in row] for row in slow]
    assert found.tolist() == want


def test_from_mask_and_whole() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    packed = torch.tensor([[9, 9, 3, 3], [1, 2, 2, 2]])
    assert Documents.from_mask(mask).ids.tolist() == [[-1, -1, 0, 0], [0, 0, 0, -1]]
    assert Documents.from_mask(mask, packed).ids.tolist() == [[-1, -1, 3, 3], [1, 2, 2, -1]]
    assert Documents.from_mask(mask.bool()).ids.tolist() == Documents.from_mask(mask).ids.tolist()
    whole = Documents.whole(2, 3)
    assert whole.ids.tolist() == [[0] * 3] * 2
    assert whole.leading.tolist() == [[0, 1, 2, -1]] * 2
