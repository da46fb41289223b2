"""The law of back-copy: what is drawn is what was counted, and triggers copy."""

from __future__ import annotations

import itertools

import pytest
import torch

from attnprobe import tasks
from attnprobe.errors import CheckpointError, InputError
from attnprobe.tasks import BackCopy

TEXT = "the cat sat on the mat; the dog ate the hat and the cat ran to the dog. " * 3


@pytest.fixture(scope="module")
def task() -> BackCopy:
    return BackCopy.learn(TEXT, n_triggers=2)


def test_triggers_are_the_most_frequent_letters(task):
    assert task.triggers == "ta"
    assert task.vocab_size == len(set(TEXT)) + 1
    assert task.bos == 0


def test_triggers_copy_and_everything_else_follows_the_bigram(task):
    tokens = task.sample(200, 40, seed=0)
    assert tokens.shape == (200, 40)
    assert (tokens[:, 0] == task.bos).all()
    assert not (tokens[:, 1:] == task.bos).any()
    trigger = task.is_trigger(tokens)
    assert not trigger[:, :2].any()
    assert trigger.float().mean() > 0.1
    before, at, after = tokens[:, :-2], trigger[:, 1:-1], tokens[:, 2:]
    assert torch.equal(after[at], before[at])
    assert not (trigger[:, 1:] & trigger[:, :-1]).any()
    pairs = set(itertools.pairwise(TEXT))
    for row, triggers in zip(tokens.tolist(), trigger.tolist(), strict=True):
        for t in range(1, 39):
            if not triggers[t]:
                assert (task.token(row[t]), task.token(row[t + 1])) in pairs


def test_frequencies_are_those_of_the_text(task):
    tokens = task.sample(4000, 20, seed=1)
    h = task.encode("h")[0]
    followers = tokens[:, 1:][tokens[:, :-1] == h]
    for character in "ea":
        expected = TEXT.count("h" + character) / TEXT.count("h")
        drawn = (followers == task.encode(character)[0]).float().mean().item()
        assert drawn == pytest.approx(expected, abs=0.02)


def test_the_same_seed_draws_the_same(task):
    assert torch.equal(task.sample(3, 20, seed=5), task.sample(3, 20, seed=5))
    assert not torch.equal(task.sample(3, 20, seed=5), task.sample(3, 20, seed=6))
    state = torch.get_rng_state()
    task.sample(3, 20, seed=5)
    assert torch.equal(state, torch.get_rng_state())


def test_text_round_trip(task):
    ids = task.encode("the cat")
    assert "".join(map(task.token, ids)) == "the cat"
    assert task.token(task.bos) == "<s>"
    assert "".join(map(task.token, task.encode("the©cat"))) == "the cat"


def test_state_round_trip(task):
    again = tasks.load(task.state())
    assert isinstance(again, BackCopy)
    assert torch.equal(again.sample(2, 30, seed=3), task.sample(2, 30, seed=3))


@pytest.mark.parametrize("spoil", ["triggers", "cumulative", "shape"])
def test_damaged_states_are_refused(task, spoil):
    state = task.state()
    if spoil == "shape":
        state["cumulative"] = state["cumulative"][:3]
    elif spoil == "triggers":
        state["triggers"] = "Z"
    else:
        del state["cumulative"]
    with pytest.raises(CheckpointError, match="damaged"):
        tasks.load(state)


def test_a_last_character_without_successor_still_goes_on():
    task = BackCopy.learn("abcabcabdab!", n_triggers=1)
    assert task.sample(50, 50, seed=0).max() < task.vocab_size


@pytest.mark.parametrize("text", ["", "aaaa", "1234567", "ab"])
def test_texts_without_letters_enough_are_refused(text):
    with pytest.raises(InputError, match="longer --text-file"):
        BackCopy.learn(text)


def test_no_space_to_fall_back_on():
    task = BackCopy.learn("abcabcabd", n_triggers=1)
    with pytest.raises(InputError, match="'Z'"):
        task.encode("abZ")
