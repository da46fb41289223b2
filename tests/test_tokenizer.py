"""Tokenizers of transformers as vocabularies, made and saved in the test: no network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny_tokenizers as tiny

from attnprobe import tokenizer
from attnprobe.errors import CheckpointError, InputError
from attnprobe.tokenizer import Tokenizer


def loaded(made: Any, folder: Path) -> Tokenizer:
    found = tokenizer.load(tiny.saved(made, folder), local_only=True)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("made", "prefix", "suffix", "bos"),
    [
        (tiny.bert, ["[CLS]"], ["[SEP]"], None),
        (tiny.gpt2, [], [], "<|endoftext|>"),
        (tiny.llama, ["<s>"], [], "<s>"),
        (tiny.t5, [], ["</s>"], None),
    ],
)
def test_what_stands_around_a_text_is_the_tokenizers_own_rule(
    tmp_path: Path, made: Any, prefix: list[str], suffix: list[str], bos: str | None
) -> None:
    found = loaded(made(), tmp_path)
    assert [found.token(i) for i in found.prefix] == prefix
    assert [found.token(i) for i in found.suffix] == suffix
    assert (None if found.bos is None else found.token(found.bos)) == bos
    text = "the whale and the sea"
    framed = [*found.prefix, *found.encode(text), *found.suffix]
    assert framed == made()(text)["input_ids"]


def test_a_start_token_can_be_switched_off_in_the_tokenizers_own_settings(tmp_path: Path) -> None:
    made = tiny.llama()
    made.backend_tokenizer.post_processor = None
    assert loaded(made, tmp_path).prefix == ()


def test_settings_that_cut_or_pad_leave_texts_whole(tmp_path: Path) -> None:
    made = tiny.gpt2()
    made.backend_tokenizer.enable_truncation(4)
    made.backend_tokenizer.enable_padding(length=50)
    found = loaded(made, tmp_path)
    assert len(found.encode("the whale " * 9)) == len(tiny.gpt2().encode("the whale " * 9)) > 4
    assert len(found.encode("the")) < 50


def test_tokens_are_spelled_as_text(tmp_path: Path) -> None:
    pairs = loaded(tiny.gpt2(), tmp_path / "gpt2")
    text = " whale\t\n ïï €"
    spelled = [pairs.token(i) for i in pairs.encode(text)]
    assert spelled[-3:] == ["<0xE2>", "<0x82>", "<0xAC>"]  # no merge puts € together
    whole = "".join(spelled).replace("<0xE2><0x82><0xAC>", "€").replace("<0xC3><0xAF>", "ï")
    assert whole == text
    pieces = loaded(tiny.llama(), tmp_path / "llama")
    spelled = [pieces.token(i) for i in pieces.encode("the é\n")]
    assert spelled == [" the", " ", "<0xC3>", "<0xA9>", "\n"]
    assert pieces.token(1) == "<s>"
    marked = loaded(tiny.t5(), tmp_path / "t5")
    assert [marked.token(i) for i in marked.encode("the whale")] == [" the", " whale"]
    words = loaded(tiny.bert(), tmp_path / "bert")
    assert [words.token(i) for i in words.encode("whales")] == ["whale", "##s"]


def test_ids_that_stand_for_no_text_are_known(tmp_path: Path) -> None:
    found = loaded(tiny.bert(), tmp_path)
    assert found.special == {0, 1, 2, 3, 4}
    assert (found.vocab_size, found.token(99)) == (10, "<id 99>")
    made = tiny.words("a", "b")
    made.add_special_tokens({"extra_special_tokens": ["<x>"]})
    assert loaded(made, tmp_path / "words").special == {2}
    free = ("[unused7]", "<unused1>", "<|reserved_token_3|>", "madeupword0001")
    kept = tiny.words("unused", "[CLS", *free)
    assert loaded(kept, tmp_path / "free").special == {2, 3, 4, 5}


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert tokenizer.load(tmp_path, local_only=True) is None
    # of its settings alone transformers would make a tokenizer that knows five words
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer"})
    )
    assert tokenizer.load(tmp_path, local_only=True) is None


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "[]"])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"^the tokenizer of .* cannot be read: .") as raised:
        tokenizer.load(tmp_path, local_only=True)
    assert "\n" not in str(raised.value)


def test_an_unknown_family_is_read_from_the_file_alone(tmp_path: Path) -> None:
    tiny.saved(tiny.llama(), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "NobodysTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys"}))
    found = tokenizer.load(tmp_path, local_only=True)
    assert found is not None
    assert found.prefix == (1,)


def test_local_folders_and_cached_repositories_need_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    from transformers.utils import hub

    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--llama"
    tiny.saved(tiny.llama(), repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    found = tokenizer.load("someone/llama", local_only=True)
    assert found is not None
    assert found.prefix == (1,)
    assert tokenizer.load("someone/else", local_only=True) is None
    assert tokenizer.load(tiny.saved(tiny.bert(), tmp_path / "bert"), local_only=False) is not None


def test_a_text_that_no_token_stands_for(tmp_path: Path) -> None:
    found = loaded(tiny.words("sea"), tmp_path)
    with pytest.raises(InputError, match="cannot read the text: ") as raised:
        found.encode("whale")
    assert "\n" not in str(raised.value)


def test_states_tell_tokenizers_apart(tmp_path: Path) -> None:
    first = loaded(tiny.words("a", "b"), tmp_path / "1").state()
    assert first == loaded(tiny.words("a", "b"), tmp_path / "2").state()
    assert first != loaded(tiny.words("b", "a"), tmp_path / "3").state()
    cut = tiny.words("a", "b")
    cut.backend_tokenizer.enable_truncation(4)
    assert first == loaded(cut, tmp_path / "4").state()


def test_conversations(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    found = loaded(tiny.llama(chat_template=tiny.CHAT), tmp_path)
    asked = [{"role": "user", "content": "the whale"}]
    ids = found.chat(asked)
    assert ids.count(found.bos) == 1
    assert ids[0] == found.bos
    assert "".join(map(found.token, ids)).endswith("[assistant]")
    answered = found.chat([*asked, {"role": "assistant", "content": "the sea"}])
    assert "".join(map(found.token, answered)).endswith("the sea ")
    with pytest.raises(InputError, match="takes no such messages"):
        loaded(tiny.llama(chat_template="{{ raise_exception('no') }}"), tmp_path / "2").chat(asked)
    with pytest.raises(InputError, match="has no chat template"):
        loaded(tiny.llama(), tmp_path / "3").chat(asked)
