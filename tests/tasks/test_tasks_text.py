"""Bytes and byte pairs, and windows of them."""

from __future__ import annotations

import pytest
import torch

from attnprobe import tasks
from attnprobe.errors import CheckpointError, InputError
from attnprobe.tasks import BytePairs, Bytes
from attnprobe.tasks.stream import TextWindows

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 20


def vocabularies():
    return [Bytes(), BytePairs.learn(TEXT, 300)]


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: type(v).__name__)
def test_text_round_trip(vocabulary):
    ids = vocabulary.encode("Some sea")
    assert "".join(map(vocabulary.token, ids)) == "Some sea"
    assert vocabulary.token(vocabulary.bos) == "<s>"
    assert vocabulary.bos not in vocabulary.encode("a literal <s>")
    assert max(vocabulary.encode("naïve ✓")) < vocabulary.vocab_size
    assert vocabulary.encode("") == []
    assert tasks.load(vocabulary.state()).encode("Some sea") == ids


def test_byte_pairs_merge():
    pairs = BytePairs.learn(TEXT, 300)
    assert pairs.vocab_size == 300
    assert len(pairs.encode(TEXT)) < len(TEXT) / 1.5


def test_part_of_a_character_is_shown_as_its_byte():
    assert Bytes().token(0xE2) == "<0xE2>"
    pairs = BytePairs.learn(TEXT, 257)
    assert [pairs.token(i) for i in pairs.encode("é\n")] == ["<0xC3>", "<0xA9>", "\n"]


def test_too_small_a_vocabulary():
    with pytest.raises(InputError, match="at least 257"):
        BytePairs.learn(TEXT, 100)


@pytest.mark.parametrize(
    "state", [{}, {"kind": "words"}, {"kind": "bpe"}, {"kind": "bpe", "tokenizer": "{"}]
)
def test_unknown_or_damaged_states_are_refused(state):
    with pytest.raises(CheckpointError):
        tasks.load(state)


def test_windows_are_cut_from_the_text():
    ids = torch.arange(20)
    drawn = TextWindows(ids, bos=99).sample(500, 6, seed=0)
    assert drawn.shape == (500, 6)
    assert (drawn[:, 0] == 99).all()
    assert (drawn[:, 1:].diff() == 1).all()
    assert (drawn[:, 1].min(), drawn[:, -1].max()) == (0, 19)
    assert torch.equal(drawn, TextWindows(ids, bos=99).sample(500, 6, seed=0))
    assert TextWindows(ids, bos=99).sample(3, 21, seed=0)[:, 1:].tolist() == [ids.tolist()] * 3


def test_a_text_shorter_than_a_window():
    with pytest.raises(InputError, match="20 tokens where 21"):
        TextWindows(torch.arange(20), bos=99).sample(1, 22, seed=0)
