"""The engine against dense float64 attention, over masks × groups × dtypes × lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnprobe.capture import AttentionCall, Documents, Mask, Site
from attnprobe.engine import AttentionStats, measure, plan

SITE = Site("layers.0.attention", "decoder", "self", 0)
BATCH, HEADS, WIDTH = 2, 4, 8
LENGTHS = (1, 2, 7, 64, 300)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """A mask as the engine gets it, and as a dense matrix made without it."""

    mask: Mask
    visible: Tensor | None = None  # broadcasts to (B, H, Tq, Tk)
    bias: Tensor | None = None
    query_ids: Tensor | None = None  # (B, Tq), None where every query is in document 0
    key_ids: Tensor | None = None


def grid(n_queries: int, n_keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n_queries)[:, None], torch.arange(n_keys)[None, :]


def full(n: int) -> Case:
    return Case(Mask(n, n))


def causal(n: int) -> Case:
    i, j = grid(n, n)
    return Case(Mask(n, n, causal=True), j <= i)


def cached(n: int) -> Case:
    """Fewer queries than keys: the lower right corners meet."""
    few = max(1, n // 3)
    i, j = grid(few, n)
    return Case(Mask(few, n, causal=True, offset=n - few), j <= i + n - few)


def upper_left(n: int) -> Case:
    """Fewer queries than keys, but the upper left corners meet, as `is_causal` has it."""
    few = max(1, n // 3)
    i, j = grid(few, n)
    return Case(Mask(few, n, causal=True), j <= i)


def more_queries(n: int) -> Case:
    """More queries than keys, the lower right corners meet: the first queries see nothing."""
    few = max(1, n // 3)
    i, j = grid(n, few)
    return Case(Mask(n, few, causal=True, offset=few - n), j <= i + few - n)


def cross(n: int) -> Case:
    return Case(Mask(n, n + 3))


def window(n: int) -> Case:
    i, j = grid(n, n)
    return Case(Mask(n, n, causal=True, window=5), (j <= i) & (i - j < 5))


def padding(n: int, left: bool) -> tuple[Tensor, Tensor]:
    """(B, T) real tokens, a different number a row, and their ids."""
    real = torch.ones(BATCH, n, dtype=torch.bool)
    for row in range(BATCH):
        pads = min(n - 1, row * (n // 3) + (n > 4))
        if pads:
            real[row, :pads] = not left
            real[row, pads:] = left
            if not left:
                real[row] = torch.arange(n) < n - pads
    return real, torch.where(real, 0, -1)


def left_padding(n: int) -> Case:
    real, ids = padding(n, left=True)
    i, j = grid(n, n)
    mask = Mask(n, n, causal=True, key_padding=real)
    return Case(mask, (j <= i) & real[:, None, None], query_ids=ids, key_ids=ids)


def right_padding(n: int) -> Case:
    real, ids = padding(n, left=False)
    i, j = grid(n, n)
    mask = Mask(n, n, causal=True, key_padding=real)
    return Case(mask, (j <= i) & real[:, None, None], query_ids=ids, key_ids=ids)


def bidirectional_padding(n: int) -> Case:
    real, ids = padding(n, left=True)
    return Case(Mask(n, n, key_padding=real), real[:, None, None], query_ids=ids, key_ids=ids)


def packed_ids(n: int) -> Tensor:
    """Three documents and a pad in the first row, one document in the second."""
    ids = torch.zeros(BATCH, n, dtype=torch.long)
    ids[0] = torch.tensor([min(3 * t // n, 2) for t in range(n)])
    if n > 6:
        ids[0, -1] = -1
    return ids


def packed(n: int) -> Case:
    ids = packed_ids(n)
    i, j = grid(n, n)
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    mask = Mask(n, n, causal=True, documents=(ids, ids))
    return Case(mask, same & (j <= i), query_ids=ids, key_ids=ids)


def leaking(n: int) -> Case:
    """Packed documents that a plain causal mask does not part: the first key is still each own."""
    i, j = grid(n, n)
    return replace(packed(n), mask=Mask(n, n, causal=True), visible=j <= i)


def by_head(n: int) -> Case:
    """A boolean mask of its own for every head; some queries of some heads see nothing."""
    visible = torch.rand(BATCH, HEADS, n, n) < 0.4
    visible[:, 0] = False
    visible[0, 1, n // 2 :] = False
    return Case(Mask(n, n, dense=visible), visible)


def alibi(n: int) -> Case:
    i, j = grid(n, n)
    slope = 2.0 ** -torch.arange(1, HEADS + 1)[None, :, None, None]
    bias = (slope * (j - i)).masked_fill(j > i, -torch.inf)
    return Case(Mask(n, n, dense=bias), j <= i, bias.nan_to_num(neginf=0.0))


def smallest_float(n: int) -> Case:
    """The causal mask as the smallest number of a type, alone and added to a bias."""
    i, j = grid(n, n)
    bias = torch.zeros(1, 1, n, n).masked_fill(j > i, torch.finfo(torch.float32).min)
    return Case(Mask(n, n, dense=bias), j <= i)


def prefix(n: int) -> Case:
    i, j = grid(n, n)
    visible = (j <= i) | (j < 3)
    return Case(Mask(n, n, rule=lambda rows, keys: visible[None, None, rows, keys]), visible)


def empty_rows(n: int) -> Case:
    """Queries that see nothing at all, by a mask of one row a query."""
    i, j = grid(n, n)
    visible = (j <= i) & (i % 3 != 1)
    return Case(Mask(n, n, dense=visible[None, None]), visible)


def nothing(n: int) -> Case:
    return Case(Mask(n, n, dense=torch.zeros(1, 1, n, n, dtype=torch.bool)), torch.tensor(False))


CASES: dict[str, Callable[[int], Case]] = {
    case.__name__: case
    for case in (
        *(full, causal, cached, upper_left, more_queries, cross, window),
        *(left_padding, right_padding, bidirectional_padding, packed, leaking),
        *(by_head, alibi, smallest_float, prefix, empty_rows, nothing),
    )
}


def make_call(
    case: Case,
    *,
    groups: int = 2,
    dtype: torch.dtype = torch.float32,
    v_width: int = WIDTH,
    q: Tensor | None = None,
    k: Tensor | None = None,
    size: float = 1.0,
    **extra: object,
) -> AttentionCall:
    n_queries, n_keys = case.mask.n_queries, case.mask.n_keys
    if q is None:
        q = size * torch.randn(BATCH, HEADS, n_queries, WIDTH, dtype=torch.double)
    if k is None:
        k = size * torch.randn(BATCH, groups, n_keys, WIDTH, dtype=torch.double)
    v = torch.randn(BATCH, groups, n_keys, v_width)
    queries = Documents(_ids(case.query_ids, n_queries))
    alike = case.query_ids is case.key_ids and n_queries == n_keys
    return AttentionCall(
        site=SITE,
        query=q.to(dtype),
        key=k.to(dtype),
        value=v.to(dtype),
        output=torch.zeros(BATCH, HEADS, n_queries, v_width, dtype=dtype),
        scale=WIDTH**-0.5,
        mask=case.mask,
        queries=queries,
        keys=queries if alike else Documents(_ids(case.key_ids, n_keys)),
        **extra,
    )


def _ids(ids: Tensor | None, length: int) -> Tensor:
    return torch.zeros(BATCH, length, dtype=torch.long) if ids is None else ids


def expected(case: Case, call: AttentionCall) -> tuple[reference.Stats, float]:
    """What the definitions say, and the largest |s| there is."""
    dense = reference.attend(
        call.query,
        call.key,
        call.value,
        case.visible,
        case.bias,
        call.scale,
        call.softcap,
        call.sinks,
    )
    seen = dense.logits[dense.visible]
    largest = float(seen.abs().max()) if seen.numel() else 0.0
    return reference.stats(dense, call.queries.ids, call.keys.ids), largest


def assert_agrees(got: AttentionStats, want: reference.Stats, largest: float) -> None:
    exact = {"rtol": 0, "atol": 0}
    for name in ("valid", "visible", "sees_first", "sees_other", "seen"):
        theirs = getattr(want, name)
        torch.testing.assert_close(getattr(got, name).expand_as(theirs), theirs, msg=name, **exact)
    loose = {"rtol": 1e-5, "atol": 1e-5 + 5e-7 * largest}
    for name in ("first", "first4", "null", "lse", "entropy", "max_logit"):
        mine, theirs = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(
            mine.double(), theirs, msg=lambda m, n=name: f"{n}: {m}", **loose
        )
    where = want.sees_other
    torch.testing.assert_close(
        got.entropy_nosink.double()[where], want.entropy_nosink[where], **loose
    )
    queries = want.seen.clamp_min(1)  # a sum over queries errs by as much a query
    torch.testing.assert_close(got.mass.double() / queries, want.mass / queries, **loose)
    assert bool((got.entropy >= 0).all())
    assert bool((got.entropy_nosink >= 0).all())
    for name, values in vars(got).items():
        assert not (isinstance(values, Tensor) and bool(values.isnan().any())), name


def assert_all_agree(case: Case, call: AttentionCall) -> None:
    want, largest = expected(case, call)
    assert_agrees(measure(call), want, largest)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_any_mask(name: str, groups: int, dtype: torch.dtype, length: int) -> None:
    case = CASES[name](length)
    call = make_call(case, groups=groups, dtype=dtype, v_width=5 if groups == 2 else WIDTH)
    assert_all_agree(case, call)


@pytest.mark.parametrize("name", CASES)
def test_entropy_is_left_out_if_nobody_wants_it(name: str) -> None:
    call = make_call(CASES[name](40))
    whole, found = measure(call), measure(call, entropy=False)
    assert bool(found.entropy.isnan().all())
    assert bool(found.entropy_nosink.isnan().all())
    for field, values in vars(whole).items():
        if isinstance(values, Tensor) and "entropy" not in field:
            torch.testing.assert_close(getattr(found, field), values, rtol=0, atol=0)


def learned_sinks(kind: str, n_queries: int) -> Tensor | None:
    return {
        "none": None,
        "per head": torch.linspace(-2, 6, HEADS)[None, :, None],
        "zero": torch.zeros(()),
        "per query": torch.randn(BATCH, HEADS, n_queries),
    }[kind]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", ["none", "per head", "zero", "per query"])
@pytest.mark.parametrize("length", [1, 40])
def test_soft_cap_and_learned_sinks(
    name: str, softcap: float | None, sinks: str, length: int
) -> None:
    case = CASES[name](length)
    logits = learned_sinks(sinks, case.mask.n_queries)
    call = make_call(case, size=2.0, softcap=softcap, sinks=logits)
    assert_all_agree(case, call)
    if sinks == "none":
        assert not bool(measure(call).null.any())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("elements", "rows"), [(1, 1), (64, 3), (257, 128), (1 << 20, 7)])
def test_any_block_size(
    name: str, elements: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name](37)
    call = make_call(case, sinks=learned_sinks("per head", case.mask.n_queries))
    monkeypatch.setitem(plan.BLOCK_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(plan, "BLOCK_ROWS", rows)
    assert_all_agree(case, call)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [10.0, 100.0], ids=["peaked", "one-hot"])
def test_huge_logits(name: str, size: float) -> None:
    case = CASES[name](50)
    call = make_call(case, size=size)
    assert_all_agree(case, call)


@pytest.mark.parametrize("name", ["full", "causal", "window", "packed", "left_padding"])
def test_equal_logits_are_uniform(name: str) -> None:
    """Uniform attention has H = ln n, a first mass of 1 / n and the logits' own maximum."""
    case = CASES[name](64)
    zero = torch.zeros(BATCH, HEADS, 64, WIDTH)
    got = measure(make_call(case, q=zero, size=3.0))
    count = got.visible.expand_as(got.entropy).double()
    valid = got.valid.expand_as(got.entropy)
    torch.testing.assert_close(got.entropy[valid].double(), count[valid].log(), rtol=0, atol=2e-6)
    seen = got.sees_first.expand_as(got.first)
    torch.testing.assert_close(got.first[seen].double(), 1 / count[seen], rtol=1e-6, atol=0)
    assert got.max_logit is None or bool((got.max_logit == 0).all())


@pytest.mark.parametrize("column", [0, 3])
def test_one_hot_rows_have_no_entropy(column: int) -> None:
    case = full(16)
    query = torch.zeros(BATCH, HEADS, 16, WIDTH)
    query[..., 0] = 1.0
    key = torch.zeros(BATCH, 1, 16, WIDTH)
    key[..., column, 0] = 1e4
    got = measure(make_call(case, q=query, k=key))
    assert float(got.entropy.abs().max()) == 0.0
    assert bool((got.first == (1.0 if column == 0 else 0.0)).all())
    if column == 0:  # the other fifteen are equal
        torch.testing.assert_close(
            got.entropy_nosink, torch.full_like(got.entropy, 15.0).log(), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7, 1e-10, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_entropy_without_the_sink_holds_at_any_sink(rest: float, dtype: torch.dtype) -> None:
    """A sink of 1 - rest: the row without it is known to 1e-6, however little is left of it."""
    n = 40
    case = causal(n)
    key = torch.randn(BATCH, 2, n, WIDTH, dtype=torch.double) * 0.5
    query = torch.randn(BATCH, HEADS, n, WIDTH, dtype=torch.double)
    query[..., 0], key[..., 0] = WIDTH**0.5, 0.0
    key[:, :, 0] = 0.0
    # p = 1 - rest against 39 keys of about equal weight
    key[:, :, 0, 0] = float(torch.tensor(1 / rest).log()) + 3.7
    call = make_call(case, q=query, k=key, dtype=dtype)
    want, _ = expected(case, call)
    where = want.sees_other
    assert float((1 - want.first[..., -1]).max()) < 20 * rest
    got = measure(call)
    error = (got.entropy_nosink.double() - want.entropy_nosink)[where].abs().max()
    assert float(error) < 1e-6
    assert float((got.entropy.double() - want.entropy).abs().max()) < 1e-6


def test_a_masked_first_key_is_no_sink() -> None:
    """Where nobody sees the document's first key, it has no mass and the row no hole."""
    n = 12
    visible = torch.ones(1, 1, n, n, dtype=torch.bool)
    visible[..., 0] = False
    case = Case(Mask(n, n, dense=visible), visible)
    call = make_call(case)
    got, (want, largest) = measure(call), expected(case, call)
    assert_agrees(got, want, largest)
    assert not bool(got.sees_first.any())
    torch.testing.assert_close(got.entropy, got.entropy_nosink)


def test_half_precision_is_upcast_and_double_stays() -> None:
    case = causal(8)
    got = measure(make_call(case, dtype=torch.bfloat16))
    assert got.entropy.dtype == torch.float32
    call = make_call(causal(200), dtype=torch.float64)
    want, _ = expected(causal(200), call)
    got = measure(call)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.mass, want.mass, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "value", [-1e9, -1e9 + 100, -998244352.0, -1e30, float("-inf"), torch.finfo(torch.float32).min]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_hides_a_key_in_a_mask_of_numbers(value: float, dtype: torch.dtype) -> None:
    """-1e9 and all that is used for it hides a key in every type it can be written in."""
    n = 9
    i, j = grid(n, n)
    value = max(value, torch.finfo(dtype).min) if value > -torch.inf else value
    bias = torch.zeros(1, 1, n, n, dtype=torch.float32).masked_fill(j > i, value).to(dtype)
    got = measure(make_call(Case(Mask(n, n, dense=bias)), dtype=dtype))
    assert got.visible[0, 0].tolist() == list(range(1, n + 1))


def test_a_bias_as_large_as_a_logit_hides_nothing() -> None:
    bias = torch.full((1, 1, 5, 5), -1e4)
    bias[..., 0] = 0.0
    got = measure(make_call(Case(Mask(5, 5, dense=bias), None, bias)))
    assert bool((got.visible == 5).all())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    n_queries=st.integers(1, 12),
    n_keys=st.integers(1, 12),
    density=st.floats(0, 1),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    offset=st.integers(-4, 8),
    pieces=st.integers(1, 3),
    size=st.sampled_from([0.1, 1.0, 20.0]),
    elements=st.sampled_from([1, 30, 1 << 20]),
)
def test_random_masks(
    seed: int,
    n_queries: int,
    n_keys: int,
    density: float,
    causal: bool,
    window: int | None,
    offset: int,
    pieces: int,
    size: float,
    elements: int,
) -> None:
    """Every part of a mask at once, in any size of block."""
    torch.manual_seed(seed)
    i, j = grid(n_queries, n_keys)
    dense = torch.rand(1, HEADS, n_queries, n_keys) < density
    real = torch.rand(BATCH, n_keys) < 0.8
    query_ids = torch.randint(-1, pieces, (BATCH, n_queries)).sort(-1).values
    key_ids = torch.randint(-1, pieces, (BATCH, n_keys)).sort(-1).values
    mask = Mask(
        n_queries,
        n_keys,
        causal=causal,
        offset=offset,
        window=window,
        key_padding=real,
        documents=(query_ids, key_ids),
        dense=dense,
    )
    back = i + offset - j
    visible = dense & real[:, None, None] & (query_ids[:, :, None] == key_ids[:, None])[:, None]
    if causal:
        visible = visible & (back >= 0)
    if window is not None:
        visible = visible & (back < window)
    case = Case(mask, visible, None, query_ids, key_ids)
    call = make_call(case, size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plan.BLOCK_ELEMENTS, "cpu", elements)
        assert_all_agree(case, call)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    length=st.integers(1, 40),
    causal=st.booleans(),
    kind=st.sampled_from(["packed", "padded", "scattered", "hidden", "none"]),
    parted=st.booleans(),
    sinks=st.sampled_from(["none", "per head", "per query"]),
)
def test_random_rules(
    seed: int, length: int, causal: bool, kind: str, parted: bool, sinks: str
) -> None:
    """Rules of documents and padding, which the faster engine takes apart where it can."""
    torch.manual_seed(seed)
    ids = {
        "packed": torch.randint(-1, 4, (BATCH, length)).sort(-1).values,
        "padded": _between(length),
        "scattered": torch.randint(-1, 2, (BATCH, length)),
        "hidden": torch.zeros(BATCH, length, dtype=torch.long),
        "none": torch.full((BATCH, length), -1),
    }[kind]
    real = ids >= 0
    if kind == "hidden":  # real tokens that no query sees
        real = torch.rand(BATCH, length) < 0.7
    documents = (ids, ids) if parted else None
    mask = Mask(length, length, causal=causal, key_padding=real, documents=documents)
    i, j = grid(length, length)
    visible = real[:, None, None] & ((j <= i) | (not causal))
    if parted:
        visible = visible & (ids[:, :, None] == ids[:, None, :])[:, None]
    case = Case(mask, visible, None, ids, ids)
    assert_all_agree(case, make_call(case, sinks=learned_sinks(sinks, length)))


def _between(length: int) -> Tensor:
    """One document a row, padding on both sides."""
    column = torch.arange(length)
    low = torch.randint(0, length, (BATCH, 1))
    high = low + torch.randint(1, length + 1, (BATCH, 1))
    return torch.where((column >= low) & (column < high), 0, -1)
