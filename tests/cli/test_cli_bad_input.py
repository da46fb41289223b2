"""Every mistake is answered with one clear line, exit code 2 and no traceback."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Folder, Ran, make

from attnprobe import probing
from attnprobe.models import load_checkpoint
from attnprobe.tasks import Bytes

Make = Callable[[Path, Folder], list[object]]
CASES: dict[str, tuple[Make, str]] = {}


def case(says: str) -> Callable[[Make], Make]:
    """Registers arguments of a command line, and what the one line must say."""

    def register(build: Make) -> Make:
        CASES[build.__name__] = (build, says)
        return build

    return register


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.target),)


@case("missing.pt does not exist")
def missing_file(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", tmp / "missing.pt"]


@case("is a folder without a model")
def folder_without_model(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "notes.txt").write_text("nothing here")
    return ["sink", tmp]


@case("cut.pt")
def truncated(tmp: Path, ready: Folder) -> list[object]:
    whole = Path(ready / "gated.pt").read_bytes()
    (tmp / "cut.pt").write_bytes(whole[: len(whole) // 2])
    return ["sink", tmp / "cut.pt"]


@case("empty.pt")
def empty_file(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "empty.pt").touch()
    return ["sink", tmp / "empty.pt"]


@case("never run here")
def pickle_with_payload(tmp: Path, ready: Folder) -> list[object]:
    torch.save({"state_dict": Payload(tmp / "owned")}, tmp / "evil.pt")
    return ["sink", tmp / "evil.pt"]


@case("evil.pt")
def plain_pickle_with_payload(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "evil.pt").write_bytes(pickle.dumps(Payload(tmp / "owned")))
    return ["sink", tmp / "evil.pt"]


@case("layers.0.attention.query.weight holds NaN")
def weights_with_nan(tmp: Path, ready: Folder) -> list[object]:
    content = torch.load(ready / "gated.pt", weights_only=True)
    content["state_dict"]["layers.0.attention.query.weight"][0, 0] = torch.nan
    torch.save(content, tmp / "nan.pt")
    return ["sink", tmp / "nan.pt"]


@case("layers.0.attention.query.weight is (8, 8), the config makes it (16, 16)")
def shapes_disagree(tmp: Path, ready: Folder) -> list[object]:
    content = torch.load(ready / "gated.pt", weights_only=True)
    content["state_dict"]["layers.0.attention.query.weight"] = torch.zeros(8, 8)
    torch.save(content, tmp / "shapes.pt")
    return ["sink", tmp / "shapes.pt"]


@case("--model-config FILE.json")
def bare_without_shape(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "bare.pt"]


@case("unknown key n_layer")
def shape_with_unknown_key(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "shape.json").write_text(json.dumps({"n_layer": 2}))
    return ["sink", ready / "bare.pt", "--model-config", tmp / "shape.json"]


@case("model.safetensors is no safetensors file, or is cut short")
def transformers_folder(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["X"]}))
    (tmp / "model.safetensors").write_bytes(b"")
    return ["sink", tmp]


@case("model.safetensors is no safetensors file, or is cut short")
def transformers_weights(tmp: Path, ready: Folder) -> list[object]:
    transformers_folder(tmp, ready)
    return ["sink", tmp / "model.safetensors"]


@case("no attention layer 99: this model has 0-1")
def layer_that_is_not_there(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--layer", "99"]


@case("no attention layer -3")
def layer_before_the_first(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--layer", "-3"]


@case("no head 5: this model has heads 0-1")
def head_that_is_not_there(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--head", "5"]


@case("--layer 'x' is no range")
def range_of_letters(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--layer", "0,x"]


@case("write the smaller end first")
def range_backwards(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--layer", "3-1"]


@case("--text is empty")
def empty_text(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text", ""]


@case("empty.txt is empty")
def empty_text_file(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "empty.txt").touch()
    return ["sink", ready / "text.pt", "--text-file", tmp / "empty.txt"]


@case("--text has 6 tokens with the start token, --length asks for 64")
def text_shorter_than_length(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text", "whale", "--length", "64"]


@case("is not UTF-8 text: byte 0xff at offset 3")
def text_that_cannot_be_decoded(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "latin.txt").write_bytes(b"abc\xff")
    return ["sink", ready / "text.pt", "--text-file", tmp / "latin.txt"]


@case("--text is not valid text")
def text_with_half_a_character(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text", "abc\udcff"]


@case("cannot read")
def text_file_that_is_missing(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text-file", tmp / "missing.txt"]


@case("line 2 of docs.jsonl")
def jsonl_without_text(tmp: Path, ready: Folder) -> list[object]:
    os.chdir(tmp)
    Path("docs.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    return ["sink", ready / "text.pt", "--text-file", "docs.jsonl"]


@case("comes without a tokenizer")
def text_without_tokenizer(tmp: Path, ready: Folder) -> list[object]:
    shape = ready / "shape.json"
    return ["sink", ready / "bare.pt", "--model-config", shape, "--text", "hello"]


@case("token id 257 in sample 2 is outside the vocabulary of text, which has ids 0 to 256")
def token_outside_vocabulary(tmp: Path, ready: Folder) -> list[object]:
    np.save(tmp / "ids.npy", np.array([[1, 2], [3, 257]]))
    return ["sink", ready / "text.pt", "--tokens", tmp / "ids.npy"]


@case("must hold whole numbers")
def tokens_that_are_floats(tmp: Path, ready: Folder) -> list[object]:
    np.save(tmp / "ids.npy", np.array([[1.0, 2.0]]))
    return ["sink", ready / "text.pt", "--tokens", tmp / "ids.npy"]


@case("cannot be read as .npy")
def tokens_pickled(tmp: Path, ready: Folder) -> list[object]:
    np.save(tmp / "ids.npy", np.array([Payload(tmp / "owned")], dtype=object), allow_pickle=True)
    return ["sink", ready / "text.pt", "--tokens", tmp / "ids.npy"]


@case("token ids are read from .npy")
def tokens_of_unknown_kind(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--tokens", tmp / "ids.xls"]


@case("--text and --random-tokens exclude each other")
def two_kinds_of_input(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text", "a", "--random-tokens"]


@case("--samples asks for 9, the input gives 1")
def more_samples_than_there_are(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text", "a whale", "--samples", "9"]


@case("has learned 16 positions: use --length 16")
def longer_than_positions(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "learned.pt", "--random-tokens", "--length", "17"]


@case("leaves no room behind the start token")
def length_of_one(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "text.pt", "--text", "a", "--length", "1"]


@case("bare has no start token")
def start_token_that_is_not_there(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "bare.pt", "--model-config", ready / "shape.json", "--bos"]


@case("there is no folder")
def output_without_folder(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--output", tmp / "missing" / "out.json"]


@case("it is a folder")
def output_over_a_folder(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "out.json").mkdir()
    return ["sink", ready / "gated.pt", "--output", tmp / "out.json"]


@case("no regular file")
def output_over_a_device(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "null.json").symlink_to("/dev/null")
    return ["sink", ready / "gated.pt", "--output", tmp / "null.json"]


@case("cannot tell the format")
def output_of_unknown_kind(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--output", tmp / "out.docx"]


@case("it is no folder")
def plots_over_a_file(tmp: Path, ready: Folder) -> list[object]:
    (tmp / "figures").touch()
    return ["sink", ready / "gated.pt", "--plots", tmp / "figures"]


@case("--table chooses what")
def table_without_a_use(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--table", "heads"]


@case("there is no device 'cuda:7' here")
def device_that_is_not_there(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--device", "cuda:7"]


@case("there is no device 'toaster' here")
def device_that_does_not_exist(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--device", "toaster"]


@case("--epsilon is 1.5")
def epsilon_out_of_range(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--epsilon", "1.5"]


@case("see attnprobe sink --help")
def unknown_option(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", "--nonsense"]


@case("there is no verb")
def unknown_verb(tmp: Path, ready: Folder) -> list[object]:
    return ["snk"]


@case("float8")
def unknown_dtype(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--dtype", "float8"]


@case("--length")
def length_of_nothing(tmp: Path, ready: Folder) -> list[object]:
    return ["sink", ready / "gated.pt", "--length", "0"]


@case("there is no folder")
def training_into_nowhere(tmp: Path, ready: Folder) -> list[object]:
    return ["train", tmp / "missing" / "out.pt"]


@case("does not exist")
def resuming_from_nothing(tmp: Path, ready: Folder) -> list[object]:
    return ["train", tmp / "out.pt", "--resume"]


@case("--width=16 is not a multiple of --heads=3")
def heads_that_do_not_divide(tmp: Path, ready: Folder) -> list[object]:
    return ["train", tmp / "out.pt", "--width", "16", "--heads", "3", "--steps", "1"]


@case("missing.pt does not exist")
def describing_what_is_missing(tmp: Path, ready: Folder) -> list[object]:
    return ["models", tmp / "missing.pt"]


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_and_exit_2(
    name: str,
    tmp_path: Path,
    checkpoints: Folder,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    build, says = CASES[name]
    arguments = build(tmp_path, checkpoints)
    before = set(tmp_path.rglob("*"))
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.error_lines) == 1, ran.err
    assert ran.err.startswith("attnprobe: error: ")
    assert says in ran.err
    assert "Traceback" not in ran.err
    assert set(tmp_path.rglob("*")) == before, "something was left behind, or a payload ran"


def test_verbose_shows_the_traceback(checkpoints: Folder, run: Callable[..., Ran]) -> None:
    ran = run("sink", checkpoints / "missing.pt", "--verbose")
    assert ran.code == 2
    assert "Traceback" in ran.err
    assert ran.error_lines[-1].startswith("attnprobe: error: ")


def test_what_libraries_log_is_there_under_verbose_only(
    checkpoints: Folder, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = probing.scan
    log, heard = logging.getLogger("some.library"), io.StringIO()
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(heard)])

    def talkative(*arguments: object, **options: object) -> object:
        log.warning("falling back to a slow kernel")
        return measured(*arguments, **options)

    monkeypatch.setattr("attnprobe.probing.scan", talkative)
    arguments = ("sink", checkpoints / "gated.pt", "--samples", 1)
    assert (run(*arguments).code, heard.getvalue()) == (0, "")
    assert run(*arguments, "--verbose").code == 0
    assert heard.getvalue() == "falling back to a slow kernel\n"
    assert log.isEnabledFor(logging.WARNING), "logging is as it was"


def test_an_unforeseen_error_is_one_line_too(
    checkpoints: Folder, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("attnprobe.probing.scan", broken)
    ran = run("sink", checkpoints / "gated.pt")
    assert (ran.code, ran.out) == (2, "")
    assert ran.error_lines == [
        "attnprobe: error: RuntimeError: first line second line (--verbose shows the traceback)"
    ]


def test_a_bad_one_among_others_is_reported_and_the_others_measured(
    tmp_path: Path, checkpoints: Folder, run: Callable[..., Ran]
) -> None:
    shutil.copy(checkpoints / "gated.pt", tmp_path / "good.pt")
    (tmp_path / "bad.pt").write_bytes(b"no checkpoint")
    ran = run("sink", tmp_path / "bad.pt", tmp_path / "good.pt")
    assert ran.code == 2
    assert "good" in ran.out
    assert [line for line in ran.error_lines if "bad.pt" in line] == ran.error_lines


def test_the_same_mistake_in_several_checkpoints_is_said_once(
    checkpoints: Folder, run: Callable[..., Ran]
) -> None:
    ran = run("sink", checkpoints / "gated.pt", checkpoints / "ungated.pt", "--layer", "99")
    assert ran.code == 2
    assert len(ran.error_lines) == 1


def test_a_checkpoint_of_the_wrong_vocabulary_is_no_index_error(
    tmp_path: Path, run: Callable[..., Ran]
) -> None:
    make(tmp_path / "small.pt", Bytes(), vocab_size=100)
    ran = run("sink", tmp_path / "small.pt", "--text", "zebra")
    assert ran.code == 2
    assert "outside the vocabulary" in ran.err
    assert load_checkpoint(tmp_path / "small.pt").config.vocab_size == 100


@pytest.mark.parametrize("option", ["--length", "--samples"])
def test_more_than_memory_holds(checkpoints: Folder, run: Callable[..., Ran], option: str) -> None:
    ran = run("sink", checkpoints / "gated.pt", "--random-tokens", option, 10**13)
    assert (ran.code, ran.out) == (2, "")
    assert "out of memory" in ran.err
    assert len(ran.error_lines) == 1


def test_a_seed_that_torch_cannot_take(checkpoints: Folder, run: Callable[..., Ran]) -> None:
    ran = run("sink", checkpoints / "gated.pt", "--seed", 2**63)
    assert (ran.code, ran.out) == (2, "")
    assert "--seed" in ran.err
