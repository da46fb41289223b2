"""Numbers and names as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnprobe.render import numbers
from attnprobe.render.names import layers_text, printable, ranges, token_text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.20712, 3, "0.207"),
        (0.074123, 2, "0.074"),
        (0.0002234, 2, "0.00022"),
        (1053.2, 3, "1053"),
        (0.9996, 3, "0.9996"),  # a share is not rounded to all
        (0.99538, 2, "0.995"),
        (-0.9996, 3, "-0.9996"),
        (9.999, 3, "10.0"),
        (1.5e-7, 3, "1.50e-07"),
        (3.2e12, 2, "3.2e+12"),
        (-12.34, 3, "-12.3"),
        (0.0, 3, "0"),
        (None, 3, "–"),
        (math.inf, 3, "inf"),
    ],
)
def test_significant_digits(value: float | None, digits: int, text: str) -> None:
    assert numbers.significant(value, digits) == text


@given(st.floats(min_value=1e-12, max_value=1e12), st.integers(2, 6))
def test_significant_is_as_close_as_its_digits(value: float, digits: int) -> None:
    shown = float(numbers.significant(value, digits))
    assert abs(shown - value) <= 0.5 * value * 10 ** (1 - digits) * (1 + 1e-9)


def test_a_column_shares_its_decimals_and_shows_the_smallest() -> None:
    assert numbers.column([0.2, 0.0741, None]) == ["0.200", "0.074", "–"]
    assert numbers.column([0.5, 0.00034]) == ["0.50000", "0.00034"]
    assert numbers.column([None, None]) == ["–", "–"]
    assert numbers.column([0.0, 1.0]) == ["0.000", "1.000"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.001, "<1 %"), (0.42, "42 %"), (0.999, ">99 %"), (1.0, "100 %"), (None, "–")],
)
def test_a_share_is_never_rounded_to_none_or_all(share: float | None, text: str) -> None:
    assert numbers.percent(share) == text


def test_times_the_floor() -> None:
    assert numbers.times(0.21, 0.074) == "2.8×"
    assert numbers.times(0.9, 0.0022) == "409×"
    assert numbers.times(0.2, 0.0) == numbers.times(None, 1.0) == "–"


def test_whole_numbers_keep_no_decimals() -> None:
    assert (numbers.whole(96.0), numbers.whole(95.5), numbers.whole(None)) == ("96", "95.5", "–")


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "␣the"),
        ("a\nb\t", r"a\nb\t"),
        ("\x1b[31m", r"\x1b[31m"),
        ("‮x", r"\u202ex"),  # would turn the line around
        ("e\u0301", r"e\u0301"),
        ("\ud800", r"\ud800"),
        ("中", "中"),
        ("🙂", r"\U0001f642"),
        ("\u1161", r"\u1161"),  # a vowel of Hangul, which joins the letter before it
        ("\u200b\u200d", r"\u200b\u200d"),
        ("\\", r"\\"),
        ("\u00a0", r"\xa0"),
        ("", "(empty)"),
        (None, "–"),
    ],
)
def test_tokens_cannot_move_the_cursor(token: str | None, shown: str) -> None:
    assert token_text(token) == shown


def test_a_token_without_text_has_its_id() -> None:
    assert token_text(None, 17) == "id 17"


@given(st.text())
def test_what_is_printed_is_one_line_that_can_be_encoded(text: str) -> None:
    for shown in (token_text(text), printable(text)):
        assert len(shown.splitlines()) <= 1
        assert shown.isprintable()
        shown.encode()


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 2]) == "0-2, 5"
    assert layers_text([3]) == "layer 3"
    assert layers_text(range(4)) == "layers 0-3"
