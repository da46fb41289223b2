"""Small tokenizers of every kind, made here and saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "the whale and the sea, the harpoon and the naïve sailor ✓\n" * 20
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _framed(tokenizer: Tokenizer, single: str, *special: str) -> Tokenizer:
    ids = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


def bert() -> PreTrainedTokenizerFast:
    """Word pieces between [CLS] and [SEP]."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "whale", "sea", "##s", "."]
    pieces = models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    inner = Tokenizer(pieces)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner = _framed(inner, "[CLS] $A [SEP]", "[CLS]", "[SEP]")
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def gpt2(size: int = 280) -> PreTrainedTokenizerFast:
    """Byte-level pairs, with a token that ends texts and that nothing puts anywhere."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=end, eos_token=end)


def llama(**more: Any) -> PreTrainedTokenizerFast:
    """SentencePiece pairs with bytes to fall back on, behind <s>."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"thewalsnd", "▁t", "he", "▁the"]
    vocabulary = {p: n for n, p in enumerate(["<unk>", "<s>", "</s>", *bytes_, *letters])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner = _framed(inner, "<s> $A", "<s>")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names, **more)


def t5() -> PreTrainedTokenizerFast:
    """A unigram model with </s> behind the text."""
    pieces = ["<pad>", "</s>", "<unk>", "▁the", "▁", "▁whale", *"thewalsn"]
    scores = [(piece, -float(n)) for n, piece in enumerate(pieces)]
    inner = Tokenizer(models.Unigram(scores, unk_id=2))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    inner.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    inner = _framed(inner, "$A </s>", "</s>")
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def words(*plain: str, unknown: str | None = None) -> PreTrainedTokenizerFast:
    """Whole words and nothing else: a word that is none of them is unknown, or an error."""
    listed = [*([] if unknown is None else [unknown]), *plain]
    model = models.WordLevel({word: n for n, word in enumerate(listed)}, unk_token=unknown or "?")
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=unknown)


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """The folder with its files, and a config that names a family."""
    tokenizer.save_pretrained(folder)
    return folder
