"""Texts, token files, tasks and random tokens as what a model is shown."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attnprobe.errors import InputError
from attnprobe.inputs import InputOptions, Inputs, prepare, read
from attnprobe.models import ModelConfig
from attnprobe.subject import Limits, Subject
from attnprobe.tasks import BackCopy, Bytes, Vocabulary

BOS = Bytes.bos


def model(vocabulary: Vocabulary | None = None, **changes: Any) -> Subject:
    """A subject whose weights nobody needs."""
    size = 257 if vocabulary is None else vocabulary.vocab_size
    shape: dict[str, Any] = {"vocab_size": size, "d_model": 8, "n_layers": 1, "n_heads": 1}
    config = ModelConfig(**{**shape, "max_length": 16, **changes})
    return Subject(
        *("m", {}, nn.Identity(), Limits.of(config), vocabulary, {}),
        is_encoder_decoder=config.architecture == "encoder-decoder",
        config=config,
    )


TEXT = model(Bytes())


def shown(subject: Subject, **options: Any) -> Inputs:
    asked = InputOptions(**options)
    return prepare(subject, read(asked), asked)


def strings(inputs: Inputs) -> list[str]:
    """Rows as text, ^ for the start token, without padding."""
    mask = (
        torch.ones_like(inputs.tokens) if inputs.attention_mask is None else inputs.attention_mask
    )
    return [
        "".join("^" if i == BOS else chr(i) for i in row[keep == 1].tolist())
        for row, keep in zip(inputs.tokens, mask, strict=True)
    ]


# texts


def test_a_text_is_measured_as_it_is_whatever_its_length() -> None:
    assert strings(shown(TEXT, texts=["whale"])) == ["^whale"]
    assert strings(shown(TEXT, texts=["whale"], bos=False)) == ["whale"]
    assert strings(shown(TEXT, texts=["a" * 100])) == ["^" + "a" * 100]


def test_texts_of_different_length_are_padded_on_the_right() -> None:
    found = shown(TEXT, texts=["whale", "sea"])
    assert strings(found) == ["^whale", "^sea"]
    assert found.attention_mask is not None
    assert found.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert shown(TEXT, texts=["ab", "cd"]).attention_mask is None


def test_a_length_cuts_windows_and_drops_the_rest() -> None:
    assert strings(shown(TEXT, texts=["abcdefgh"], length=4)) == ["^abc", "^def"]
    assert strings(shown(TEXT, texts=["abcdefgh"], length=4, bos=False)) == ["abcd", "efgh"]


def test_samples_are_spread_evenly() -> None:
    found = shown(TEXT, texts=["abcdefghijkl"], length=3, samples=3)
    assert strings(found) == ["^ab", "^ef", "^ij"]
    assert found.about["source"] == "3 of 6 samples of --text, behind the start token <s>"


def test_a_long_file_is_cut_as_the_model_was_trained(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a" * 31)
    found = shown(TEXT, text_files=[str(path)])
    assert strings(found) == ["^" + "a" * 15] * 2
    path.write_text("a" * 15)
    assert strings(shown(TEXT, text_files=[str(path)])) == ["^" + "a" * 15]
    path.write_text("a" * 16)  # one too many, so the last is dropped
    assert strings(shown(TEXT, text_files=[str(path)])) == ["^" + "a" * 15]
    path.write_text("a" * 9)
    assert strings(shown(TEXT, text_files=[str(path)])) == ["^" + "a" * 9]


def test_files_of_many_texts(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    lines = [json.dumps({"text": text, "id": 1}) for text in ("whale", "sea", "a harpoon")]
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    assert strings(shown(TEXT, text_files=[str(path)])) == ["^whale", "^sea", "^a harpoon"]
    found = shown(TEXT, text_files=[str(path)], length=5)
    assert strings(found) == ["^whal", "^a ha", "^rpoo"]
    assert found.note == "1 of 3 texts are shorter than --length: left out"
    with pytest.raises(InputError, match="none of the 3 texts has the 50 tokens"):
        shown(TEXT, text_files=[str(path)], length=50)


def test_a_line_separator_within_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\r\n", "utf-8")
    found = shown(TEXT, text_files=[str(path)], bos=False)
    assert bytes(found.tokens[0].tolist()).decode() == "a\u2028b"


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ünder".encode())))
    found = shown(TEXT, text_files=["-"])
    assert found.tokens.shape == (1, 7)
    assert found.about["source"].startswith("stdin")


def test_marks_and_line_ends_of_windows_are_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert strings(shown(TEXT, text_files=[str(path)])) == ["^a\nb"]


def test_many_windows_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a" * 100_000)
    assert len(shown(TEXT, text_files=[str(path)]).tokens) == 8192 // 16
    assert len(shown(TEXT, text_files=[str(path)], samples=700).tokens) == 700


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"texts": [""]}, "--text is empty"),
        ({"texts": ["a", ""]}, "--text 2 is empty"),
        ({"texts": ["abc"], "length": 5}, "--text has 4 tokens with the start token"),
        ({"texts": ["abc"], "length": 5, "bos": False}, "--text has 3 tokens, --length asks for 5"),
        ({"texts": ["abc"], "length": 1}, "no room"),
        ({"texts": ["abc"], "samples": 2}, "--samples asks for 2, the input gives 1"),
        ({"texts": ["abc"], "tokens": "x.npy"}, "--text and --tokens exclude each other"),
        ({"tokens": "x.npy", "random_tokens": True}, "exclude each other"),
        ({"text_files": ["/nowhere/x.txt"]}, "cannot read /nowhere/x.txt"),
    ],
)
def test_texts_that_cannot_be_measured(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        shown(TEXT, **options)


@pytest.mark.parametrize(
    ("content", "says"),
    [("{bad", "line 1 of .* is not JSON"), ("[1]", "has no 'text'"), ("\n", "is empty")],
)
def test_lines_that_are_no_texts(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        shown(TEXT, text_files=[str(path)])


# token ids


def write_tokens(path: Path, rows: Any) -> str:
    if path.suffix == ".npy":
        np.save(path, np.array(rows, dtype=np.uint16))
    elif path.suffix == ".pt":
        torch.save(torch.tensor(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(" ".join(map(str, row)) for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".npy", ".json", ".pt", ".txt"])
def test_token_files(tmp_path: Path, suffix: str) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    path = write_tokens(tmp_path / f"ids{suffix}", rows)
    found = shown(TEXT, tokens=path)
    assert found.tokens.tolist() == rows
    assert found.tokens.dtype == torch.int64
    assert (found.about["bos"], found.about["seed"]) == (False, None)
    assert shown(TEXT, tokens=path, bos=True).tokens.tolist() == [[BOS, *row] for row in rows]
    assert shown(TEXT, tokens=path, length=2).tokens.tolist() == [[1, 2], [4, 5]]
    assert shown(TEXT, tokens=path, samples=1).tokens.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("suffix", [".npy", ".json", ".pt"])
def test_a_flat_file_is_one_sample(tmp_path: Path, suffix: str) -> None:
    path = write_tokens(tmp_path / f"ids{suffix}", [1, 2, 3, 4])
    assert shown(TEXT, tokens=path).tokens.tolist() == [[1, 2, 3, 4]]
    assert shown(TEXT, tokens=path, length=2).tokens.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("suffix", [".json", ".txt"])
def test_rows_of_different_length(tmp_path: Path, suffix: str) -> None:
    found = shown(TEXT, tokens=write_tokens(tmp_path / f"ids{suffix}", [[1], [2, 3]]))
    assert found.tokens.tolist() == [[1, 0], [2, 3]]
    assert found.attention_mask is not None
    assert found.attention_mask.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "[[1, 2.5]]", "whole numbers"),
        ("a.json", "[[1, true]]", "whole numbers"),
        ("a.json", "[[[1]]]", "whole numbers"),
        ("a.json", "[1, [2]]", "whole numbers"),
        ("a.json", '{"a": 1}', "whole numbers"),
        ("a.json", "3", "whole numbers"),
        ("a.json", "[[99999999999999999999]]", "whole numbers"),
        ("a.json", "[]", "is empty"),
        ("a.json", "[[]]", "empty row"),
        ("a.json", "{", "cannot be read as .json"),
        ("a.txt", "1 two 3", "cannot be read as .txt"),
        ("a.txt", "", "is empty"),
        ("a.npy", "garbage", "cannot be read as .npy"),
        ("a.npy", "", "cannot be read as .npy"),
        ("a.pt", "garbage", "cannot be read as .pt"),
        ("a.csv", "1,2", "token ids are read from .npy"),
        ("a.txt", "1 257", "token id 257 in sample 1 is outside the vocabulary of m"),
        ("a.txt", "1 -1", "token id -1 in sample 1 is outside"),
    ],
)
def test_files_without_token_ids(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=says):
        shown(TEXT, tokens=str(tmp_path / name))


@pytest.mark.parametrize(
    "value",
    [torch.tensor([[0.5]]), torch.tensor([[True]]), torch.tensor(3), {"a": 1}, [1.5], "text"],
)
def test_pt_files_without_token_ids(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "ids.pt")
    with pytest.raises(InputError, match="whole numbers"):
        shown(TEXT, tokens=str(tmp_path / "ids.pt"))


def test_tensors_of_every_layout(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 0, 2]])
    for number, value in enumerate((ids, ids.to_sparse(), ids.to(torch.uint8), [ids[0]])):
        torch.save(value, tmp_path / f"{number}.pt")
        assert shown(TEXT, tokens=str(tmp_path / f"{number}.pt")).tokens.tolist() == [[1, 0, 2]]
    for value in (ids.to("meta"), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])):
        torch.save(value, tmp_path / "ids.pt")
        with pytest.raises(InputError, match=r"ids.pt cannot be read as .pt"):
            shown(TEXT, tokens=str(tmp_path / "ids.pt"))


def test_ids_beyond_those_of_torch(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.full((1, 3), 2**63 + 5, dtype=np.uint64))
    with pytest.raises(InputError, match="token id 9223372036854775807 in sample 1 is outside"):
        shown(TEXT, tokens=str(tmp_path / "ids.npy"))


def test_a_missing_token_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        shown(TEXT, tokens=str(tmp_path / "ids.npy"))


# drawn


def test_random_tokens_never_hit_the_start_token() -> None:
    task = BackCopy.learn("the whale and the sea")
    found = shown(model(task), random_tokens=True, samples=50, seed=1)
    assert found.tokens.shape == (50, 16)
    assert (found.tokens[:, 0] == task.bos).all()
    assert (found.tokens[:, 1:] != task.bos).all()
    assert set(found.tokens[:, 1:].unique().tolist()) == set(range(1, task.vocab_size))
    again = shown(model(task), random_tokens=True, samples=50, seed=1)
    assert torch.equal(found.tokens, again.tokens)


def test_a_task_is_sampled() -> None:
    task = BackCopy.learn("the whale and the sea")
    found = shown(model(task), seed=5)
    assert torch.equal(found.tokens, task.sample(8192 // 16, 16, 5))
    assert (found.about["kind"], found.about["seed"]) == ("task", 5)
    bare = shown(model(task), samples=3, length=7, bos=False)
    assert bare.tokens.shape == (3, 7)
    assert (bare.tokens != task.bos).all()


def test_a_text_model_is_shown_the_end_of_the_packaged_text() -> None:
    found = shown(TEXT)
    assert found.tokens.shape == (8192 // 16, 16)
    assert "last tenth" in found.about["source"]
    assert found.about["bos"] is True
    assert shown(model(Bytes(), max_length=4096)).tokens.shape == (16, 512)


def test_without_a_vocabulary_tokens_are_random_and_that_is_said() -> None:
    found = shown(model(None))
    assert found.about["kind"] == "random"
    assert found.note is not None
    assert "without a tokenizer" in found.note
    assert shown(model(None), random_tokens=True).note is None
    with pytest.raises(InputError, match="cannot read text"):
        shown(model(None), texts=["abc"])
    with pytest.raises(InputError, match="no start token"):
        shown(model(None), bos=True)


def test_one_token_repeated() -> None:
    given = shown(TEXT, repeated_token="a", samples=2, length=5)
    assert strings(given) == ["^aaaa", "^aaaa"]
    assert given.about == {
        "source": "one token repeated, id 97 'a', behind the start token <s>",
        "kind": "repeated",
        "bos": True,
        "seed": None,
    }
    assert strings(shown(TEXT, repeated_token="98", length=3, bos=False)) == ["bbb"]
    drawn = shown(TEXT, repeated_token="random", samples=300, seed=3)
    assert drawn.tokens.shape == (300, 16)
    assert (drawn.tokens[:, 1:] == drawn.tokens[:, 1:2]).all()
    assert set(drawn.tokens[:, 1].tolist()) == set(range(256))  # each before any comes again
    assert drawn.about["seed"] == 3
    other = shown(TEXT, repeated_token="random", samples=300, seed=4)
    assert not torch.equal(drawn.tokens, other.tokens)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeated_token": "ab"}, "'ab' is 2 tokens of m: give the text of one, or an id"),
        ({"repeated_token": ""}, "'' is 0 tokens of m"),
        ({"repeated_token": "257"}, "257 is outside the vocabulary of m, which has ids 0 to 256"),
        ({"repeated_token": "a", "random_tokens": True}, "exclude each other"),
        ({"repeated_token": "a", "length": 1}, "no room behind the start token: use 2 or more"),
        ({"random_tokens": True, "length": 1}, "no room behind the start token"),
        ({"chat_template": True}, "--chat-template goes with --text"),
        ({"texts": ["a"], "chat_template": True}, "m has no chat template"),
    ],
)
def test_controls_and_chats_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        shown(TEXT, **options)


def test_a_sample_longer_than_those_of_training_is_noted() -> None:
    assert shown(TEXT, texts=["a" * 15]).note is None
    note = shown(TEXT, texts=["a" * 16]).note
    assert note is not None
    assert note.startswith("a sample has 17 tokens, m was made for 16")


def test_an_encoder_decoder_reads_the_same_tokens_twice() -> None:
    found = shown(model(Bytes(), architecture="encoder-decoder"), texts=["ab", "c"])
    assert torch.equal(found.kwargs["decoder_tokens"], found.tokens)
    assert found.kwargs["decoder_attention_mask"] is found.attention_mask


def test_learned_positions_bound_the_length() -> None:
    learned = model(Bytes(), positions="learned")
    assert shown(learned, texts=["a" * 15]).tokens.shape == (1, 16)
    with pytest.raises(InputError, match="17 tokens, m has learned 16 positions"):
        shown(learned, texts=["a" * 16])
