"""What a model is shown: texts, token files, its own task, or tokens drawn at random."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.subject import Subject

DEFAULT_TEXT = Path(__file__).with_name("data") / "moby_dick.txt"
DEFAULT_TEXT_SHARE = 0.1  # at its end: what attnprobe train holds out
LONGEST_DEFAULT = 512  # tokens a sample
FEWEST_SAMPLES, DEFAULT_TOKENS = 16, 8192
STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How the input is chosen; `docs/cli.md` says what each option means.

    At most one of `texts` with `text_files`, `tokens` and `random_tokens` is given; without any
    of them a checkpoint is measured on what it was trained on.
    """

    texts: Sequence[str] = ()
    text_files: Sequence[str] = ()
    tokens: str | None = None
    random_tokens: bool = False
    length: int | None = None
    samples: int | None = None
    seed: int = 0
    bos: bool | None = None


@dataclass(frozen=True)
class Inputs:
    """What `scan` is given.

    Attributes:
        tokens: (samples, length) ids, padded on the right.
        attention_mask: (samples, length), 1 at tokens; None where no sample is padded.
        about: for `Result.input`: `source` (a sentence), `kind`, `bos`, `seed`.
        kwargs: further arguments of the model.
        note: something the user should know, and may not expect.
    """

    tokens: Tensor
    attention_mask: Tensor | None
    about: dict[str, Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True)
class _Drawn:
    """Samples of a source: ids (T,) each, one sentence on where they come from."""

    rows: list[Tensor]
    source: str
    kind: str
    bos: bool
    note: str | None = None


class Source(Protocol):
    """Where samples come from. It is read before any model is, and once for all of them."""

    def draw(self, subject: Subject, options: InputOptions) -> _Drawn:
        """The samples for one model."""


def read(options: InputOptions) -> Source:
    """Reads the files and texts that were asked for.

    Raises:
        InputError: they cannot be read, are empty, or are several kinds at once.
    """
    kinds = {
        "--text": bool(options.texts or options.text_files),
        "--tokens": options.tokens is not None,
        "--random-tokens": options.random_tokens,
    }
    asked = [name for name, is_given in kinds.items() if is_given]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} exclude each other: choose one")
    if options.tokens is not None:
        return _Rows(options.tokens, _read_rows(Path(options.tokens)))
    if options.random_tokens:
        return _Random()
    if not asked:
        return _Default()
    texts = [_Text(_label(n, options.texts), t) for n, t in enumerate(options.texts, start=1)]
    return _Texts([*texts, *(text for file in options.text_files for text in _read_texts(file))])


def prepare(subject: Subject, source: Source, options: InputOptions) -> Inputs:
    """The tokens of one model, checked against what it can take.

    Raises:
        InputError: ids outside its vocabulary, samples longer than it has positions for, a text
            that is too short, or a model without a tokenizer.
    """
    drawn = source.draw(subject, options)
    _check(drawn.rows, subject)
    tokens, mask = _padded(drawn.rows)
    kwargs: dict[str, Any] = {}
    sentence = drawn.source
    if subject.is_encoder_decoder:
        kwargs = {"decoder_tokens": tokens}
        kwargs |= {} if mask is None else {"decoder_attention_mask": mask}
        sentence += "; encoder and decoder read the same tokens"
    about = {
        "source": sentence,
        "kind": drawn.kind,
        "bos": drawn.bos,
        "seed": options.seed if drawn.kind in ("task", "random") else None,
    }
    return Inputs(tokens, mask, about, kwargs, drawn.note)


# texts


@dataclass(frozen=True)
class _Text:
    """A text and what to call it. Of a *collection*, short ones may be passed over."""

    name: str
    content: str
    is_file: bool = False
    of_collection: bool = False

    def __post_init__(self) -> None:
        if not self.content:
            raise InputError(f"{self.name} is empty: there is nothing to measure")
        try:
            self.content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{self.name} is not valid text: character {error.start} stands for no character"
            ) from None


@dataclass(frozen=True)
class _Texts:
    """Texts as they are, or in windows where a length is asked for or a file is long."""

    texts: Sequence[_Text]
    described: str | None = None

    def draw(self, subject: Subject, options: InputOptions) -> _Drawn:
        vocabulary = subject.vocabulary
        if vocabulary is None:
            raise InputError(
                f"{subject.name} comes without a tokenizer, so it cannot read text: "
                "give --tokens FILE or --random-tokens"
            )
        start = _start_token(subject, options, default=True)
        pieces: list[Tensor] = []
        passed_over = 0
        for text in self.texts:
            ids = torch.tensor(vocabulary.encode(text.content), dtype=torch.int64)
            length = options.length
            if text.is_file and length is None:
                usual = default_length(subject)
                length = usual if len(ids) + (start is not None) > usual else None
            cut = _cut(ids, length, start, text.name, may_be_short=text.of_collection)
            passed_over += not cut
            pieces += cut
        if not pieces:
            raise InputError(
                f"none of the {len(self.texts)} texts has the {options.length} tokens that "
                "--length asks for: shorten it"
            )
        has_files = any(text.is_file for text in self.texts)
        rows = _chosen(pieces, options, default_samples(pieces) if has_files else None)
        names = self.described or _named([text.name for text in self.texts])
        note = None
        if passed_over:
            note = f"{passed_over} of {len(self.texts)} texts are shorter than --length: left out"
        sentence = f"{_share(rows, pieces)}{names}{_behind(subject, start)}"
        return _Drawn(rows, sentence, "text", start is not None, note)


def _label(number: int, texts: Sequence[str]) -> str:
    return "--text" if len(texts) == 1 else f"--text {number}"


def _read_texts(file: str) -> list[_Text]:
    name = "stdin" if file == STDIN else file
    if file == STDIN:
        raw = sys.stdin.buffer.read()
    else:
        try:
            raw = Path(file).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    try:
        content = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert it first"
        ) from None
    if Path(file).suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(name, content)
    return [_Text(name, content, is_file=True)]


def _read_jsonl(name: str, content: str) -> list[_Text]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise InputError(f"line {number} of {name} is not JSON") from None
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise InputError(f"line {number} of {name} has no 'text' that is a string")
        texts.append(_Text(f"line {number} of {name}", text, is_file=True, of_collection=True))
    if not texts:
        raise InputError(f"{name} is empty: there is nothing to measure")
    return texts


# token ids


@dataclass(frozen=True)
class _Rows:
    """Token ids from a file, as they are unless a length or a start token is asked for."""

    name: str
    rows: Sequence[Tensor]

    def draw(self, subject: Subject, options: InputOptions) -> _Drawn:
        start = _start_token(subject, options, default=False)
        pieces = [
            piece
            for number, row in enumerate(self.rows, start=1)
            for piece in _cut(row, options.length, start, f"row {number} of {self.name}")
        ]
        rows = _chosen(pieces, options, None)
        sentence = f"{_share(rows, pieces)}{self.name}{_behind(subject, start)}"
        return _Drawn(rows, sentence, "tokens", start is not None)


def _read_rows(path: Path) -> list[Tensor]:
    readers = {".npy": _from_npy, ".json": _from_json, ".pt": _from_pt, ".txt": _from_txt}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InputError(f"{path}: token ids are read from {', '.join(readers)}")
    try:
        content = reader(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, IndexError):
        raise InputError(f"{path} cannot be read as {path.suffix} of token ids") from None
    is_flat = isinstance(content, Tensor) and content.dim() == 1
    is_flat |= isinstance(content, list) and all(not isinstance(row, list) for row in content)
    try:
        rows = [_row(row) for row in ([content] if is_flat else content)]
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError):
        raise InputError(
            f"{path} must hold whole numbers, one sample or one sample a row"
        ) from None
    if not rows or not all(len(row) for row in rows):
        raise InputError(f"{path} is empty or has an empty row: there is nothing to measure")
    return rows


def _row(row: Any) -> Tensor:
    if isinstance(row, list):
        if not all(type(n) is int for n in row):
            raise TypeError
        return torch.tensor(row, dtype=torch.int64)
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise TypeError
    return row.long()


def _from_npy(path: Path) -> Any:
    import numpy as np

    array = np.load(path, allow_pickle=False)
    if array.dtype.kind not in "iu":
        return [[None]]
    return torch.from_numpy(array.astype(np.int64))


def _from_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _from_pt(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _from_txt(path: Path) -> Any:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[int(n) for n in line.replace(",", " ").split()] for line in lines if line.strip()]


# drawn


@dataclass(frozen=True)
class _Random:
    """Tokens drawn uniformly from the vocabulary: a control without any structure."""

    note: str | None = None

    def draw(self, subject: Subject, options: InputOptions) -> _Drawn:
        start = _start_token(subject, options, default=True)
        length, samples = _shape(subject, options)
        generator = torch.Generator().manual_seed(options.seed)
        vocabulary = subject.vocabulary
        bos = None if vocabulary is None else vocabulary.bos
        others = _vocab_size(subject) - (bos is not None)
        tokens = torch.randint(others, (samples, length), generator=generator)
        if bos is not None:
            tokens += tokens >= bos  # every id but that of the start token
        if start is not None:
            tokens[:, 0] = start
        sentence = f"tokens drawn uniformly from the vocabulary{_behind(subject, start)}"
        return _Drawn(list(tokens), sentence, "random", start is not None, self.note)


@dataclass(frozen=True)
class _Default:
    """What a checkpoint was trained on: draws from its task, or the packaged text."""

    def draw(self, subject: Subject, options: InputOptions) -> _Drawn:
        if subject.vocabulary is None:
            note = (
                f"{subject.name} comes without a tokenizer: measured on random tokens "
                "(--tokens FILE gives others)"
            )
            return _Random(note).draw(subject, options)
        if hasattr(subject.vocabulary, "sample"):
            return self._from_task(subject, options)
        content = DEFAULT_TEXT.read_text(encoding="utf-8")
        kept = content[int(len(content) * (1 - DEFAULT_TEXT_SHARE)) :]
        text = _Text(DEFAULT_TEXT.name, kept, is_file=True)
        return _Texts([text], "the last tenth of the packaged Moby-Dick").draw(subject, options)

    def _from_task(self, subject: Subject, options: InputOptions) -> _Drawn:
        start = _start_token(subject, options, default=True)
        length, samples = _shape(subject, options)
        surplus = start is None  # the task's sequences begin with the start token
        tokens = subject.vocabulary.sample(samples, length + surplus, options.seed)  # type: ignore[union-attr]
        sentence = f"its own task, bigram back-copy{_behind(subject, start)}"
        return _Drawn(list(tokens[:, int(surplus) :]), sentence, "task", start is not None)


# common


def default_length(subject: Subject) -> int:
    """Tokens a sample where none are asked for: as trained, within reason."""
    return min(subject.limits.usual_length, LONGEST_DEFAULT)


def default_samples(rows: Sequence[Tensor]) -> int:
    """How many samples make a steady figure: some 8,192 tokens, and 16 at least."""
    longest = max(len(row) for row in rows)
    return max(FEWEST_SAMPLES, DEFAULT_TOKENS // longest)


def _shape(subject: Subject, options: InputOptions) -> tuple[int, int]:
    length = options.length or default_length(subject)
    return length, options.samples or max(FEWEST_SAMPLES, DEFAULT_TOKENS // length)


def _start_token(subject: Subject, options: InputOptions, *, default: bool) -> int | None:
    """The id that samples start with, None if with none."""
    wanted = default if options.bos is None else options.bos
    bos = None if subject.vocabulary is None else subject.vocabulary.bos
    if options.bos and bos is None:
        raise InputError(f"--bos: {subject.name} has no start token")
    return bos if wanted else None


def _cut(
    ids: Tensor, length: int | None, start: int | None, name: str, may_be_short: bool = False
) -> list[Tensor]:
    """Windows of `length` tokens, the start token included; all of it where no length is asked."""
    head = ids.new_empty(0) if start is None else ids.new_tensor([start])
    if length is None:
        return [torch.cat((head, ids))]
    room = length - len(head)
    if room < 1:
        raise InputError(f"--length {length} leaves no room behind the start token: use 2 or more")
    if len(ids) < room:
        if may_be_short:
            return []
        behind = " with the start token" if len(head) else ""
        raise InputError(
            f"{name} has {len(ids) + len(head)} tokens{behind}, --length asks for {length}: "
            "shorten it, or leave it out to measure the text as it is"
        )
    return [torch.cat((head, window)) for window in ids[: len(ids) // room * room].view(-1, room)]


def _chosen(rows: Sequence[Tensor], options: InputOptions, default: int | None) -> list[Tensor]:
    """As many rows as asked for, spread evenly over all of them."""
    if options.samples is not None and options.samples > len(rows):
        raise InputError(
            f"--samples asks for {options.samples}, the input gives {len(rows)}: "
            "give more of it, or a shorter --length"
        )
    wanted = options.samples or default or len(rows)
    if wanted >= len(rows):
        return list(rows)
    return [rows[n * len(rows) // wanted] for n in range(wanted)]


def _vocab_size(subject: Subject) -> int:
    if subject.limits.vocab_size is None:
        raise InputError(f"{subject.name} reads no tokens, but {subject.reads}")
    return subject.limits.vocab_size


def _check(rows: Sequence[Tensor], subject: Subject) -> None:
    size = _vocab_size(subject)
    for number, row in enumerate(rows, start=1):
        outside = row[(row < 0) | (row >= size)]
        if len(outside):
            raise InputError(
                f"token id {int(outside[0])} in sample {number} is outside the vocabulary of "
                f"{subject.name}, which has ids 0 to {size - 1}"
            )
    longest, room = max(len(row) for row in rows), subject.limits.max_length
    if room is not None and longest > room:
        raise InputError(
            f"a sample has {longest} tokens, {subject.name} has learned {room} positions: "
            f"use --length {room} or less"
        )


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    longest = max(len(row) for row in rows)
    if all(len(row) == longest for row in rows):
        return torch.stack(list(rows)), None
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return tokens, mask


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, … {names[-1]}"


def _share(taken: Sequence[Tensor], there: Sequence[Tensor]) -> str:
    """ "16 of 78 samples of " where not all were taken."""
    return "" if len(taken) == len(there) else f"{len(taken)} of {len(there)} samples of "


def _behind(subject: Subject, start: int | None) -> str:
    if start is None or subject.vocabulary is None:
        return ""
    return f", behind the start token {subject.vocabulary.token(start)}"
