"""The decoder language model and the original encoder–decoder, from one block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe.models.attention import Attention
from attnprobe.models.config import ModelConfig
from attnprobe.models.layout import Layout, bidirectional, causal
from attnprobe.models.positions import LearnedPositions, sinusoids


class FeedForward(nn.Module):
    """Two linear maps around ReLU or GELU, or three for SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        if config.activation == "swiglu":
            self.swish = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) to the same."""
        if self.activation == "swiglu":
            return self.down(F.silu(self.swish(x)) * self.up(x))
        return self.down(F.relu(self.up(x)) if self.activation == "relu" else F.gelu(self.up(x)))


class Block(nn.Module):
    """Self attention, cross attention where there is a memory, and a feed-forward map.

    Each is added to the residual stream and normed before (`pre`) or after the sum (`post`).
    """

    def __init__(self, config: ModelConfig, cross: bool = False) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = Attention(config)
        self.attention_norm = _norm(config)
        if cross:
            self.cross_attention = Attention(config)
            self.cross_attention_norm = _norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
    ) -> Tensor:
        """The residual stream (B, T, d_model) after the block."""
        x = self._add(x, self.attention_norm, self.attention, layout)
        if memory is not None:
            norm = self.cross_attention_norm
            x = self._add(x, norm, self.cross_attention, memory_layout, memory)
        return self._add(x, self.feed_forward_norm, self.feed_forward)

    def _add(self, x: Tensor, norm: nn.Module, branch: nn.Module, *args: object) -> Tensor:
        if self.pre:
            return x + self.dropout(branch(norm(x), *args))
        return norm(x + self.dropout(branch(x, *args)))


class Stack(nn.Module):
    """One side of the encoder–decoder: blocks in a row and, where they norm before, a last norm."""

    def __init__(self, config: ModelConfig, cross: bool = False) -> None:
        super().__init__()
        self.layers = _blocks(config, cross)
        self.norm = _final_norm(config)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
    ) -> Tensor:
        """The hidden states (B, T, d_model) of embedded tokens."""
        for layer in self.layers:
            x = layer(x, layout, memory, memory_layout)
        return self.norm(x)


class Embedding(nn.Module):
    """Tokens to vectors, positions added unless attention rotates; and back again when tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sinusoidal = config.positions == "sinusoidal"
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.positions = LearnedPositions(config.max_length, config.d_model)
        if not config.tie_embeddings:
            self.unembedding = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        """(B, T) to (B, T, d_model)."""
        x = self.tokens(tokens)
        if self.sinusoidal:
            # the code has unit amplitude; the embedding is scaled up to it, as in the original
            x = x * x.shape[-1] ** 0.5 + sinusoids(layout.positions, x.shape[-1]).to(x.dtype)
        elif hasattr(self, "positions"):
            x = x + self.positions(layout.positions)
        return self.dropout(x)

    @property
    def output(self) -> nn.Linear | nn.Embedding:
        """The module whose weight maps to the vocabulary."""
        return self.unembedding if hasattr(self, "unembedding") else self.tokens

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, d_model) to (B, T, vocab_size)."""
        if hasattr(self, "unembedding"):
            return self.unembedding(hidden)
        return F.linear(hidden, self.tokens.weight)


class Decoder(nn.Module):
    """A causal language model; its attention sits at `layers.{i}.attention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.layers = _blocks(config)
        self.norm = _final_norm(config)
        _initialise(self, config)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Next-token logits (B, T, vocab_size).

        Args:
            tokens: (B, T) token ids.
            attention_mask: (B, T), 1 where a token is real; padding may be on either side.
            document_ids: (B, T), equal within each of several documents packed into a row.
            logits_to_keep: of how many of the last tokens; 0 for all, as transformers has it.
        """
        layout = causal(tokens, attention_mask, document_ids, self.config.window)
        x = self.embedding(tokens, layout)
        for layer in self.layers:
            x = layer(x, layout)
        return self.embedding.logits(self.norm(x)[:, -logits_to_keep:])

    def get_output_embeddings(self) -> nn.Module:
        """As transformers calls the module that maps to the vocabulary."""
        return self.embedding.output


class EncoderDecoder(nn.Module):
    """The transformer of Vaswani et al. 2017, one embedding shared by both sides.

    Its attention sits at `encoder.layers.{i}.attention`, `decoder.layers.{i}.attention` and
    `decoder.layers.{i}.cross_attention`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.encoder = Stack(config)
        self.decoder = Stack(config, cross=True)
        _initialise(self, config)

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Next-token logits of the decoder's side (B, Td, vocab_size).

        Args:
            tokens: (B, T) the source; decoder_tokens: (B, Td) the target so far.
            attention_mask: (B, T); decoder_attention_mask: (B, Td), 1 where a token is real.
        """
        source = bidirectional(tokens, attention_mask)
        target = causal(decoder_tokens, decoder_attention_mask, window=self.config.window)
        memory = self.encoder(self.embedding(tokens, source), source)
        x = self.decoder(self.embedding(decoder_tokens, target), target, memory, source)
        return self.embedding.logits(x)


def build(config: ModelConfig) -> Decoder | EncoderDecoder:
    """A freshly initialised model of that config, drawn from torch's global random state."""
    return Decoder(config) if config.architecture == "decoder" else EncoderDecoder(config)


def _norm(config: ModelConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, bias=config.bias)


def _final_norm(config: ModelConfig) -> nn.Module:
    return _norm(config) if config.norm == "pre" else nn.Identity()  # post: the last block normed


def _blocks(config: ModelConfig, cross: bool = False) -> nn.ModuleList:
    return nn.ModuleList(Block(config, cross) for _ in range(config.n_layers))


def _initialise(model: nn.Module, config: ModelConfig) -> None:
    """Unit-variance maps; those that write to the residual stream share one unit among them."""
    depth = 2 * config.n_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            writes = name.endswith((".output", ".down"))
            fan_in = module.in_features * (depth if writes else 1)
            nn.init.normal_(module.weight, std=fan_in**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.d_model**-0.5)
