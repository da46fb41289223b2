"""One piece of work in a process of its own; prints its seconds and peak memory as JSON.

    python benchmarks/work.py scan --length 2048

Run by benchmarks/compare.py, which pairs several of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

SHAPES = {  # layers, heads, key-value heads, width, feed-forward, vocabulary
    "gpt2-small": (12, 12, 12, 768, 3072, 50257),
    "llama-0.3b": (16, 16, 4, 1024, 2816, 32000),
    "tiny": (4, 4, 4, 128, 256, 512),
}


def own_model(shape: str, length: int) -> nn.Module:
    """This project's decoder in a shape; random weights cost what trained ones do."""
    from attnprobe.models import Decoder, ModelConfig

    layers, heads, kv_heads, width, d_ff, vocabulary = SHAPES[shape]
    return Decoder(
        ModelConfig(
            architecture="decoder",
            vocab_size=vocabulary,
            d_model=width,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            d_ff=d_ff,
            max_length=length,
            positions="rotary" if shape.startswith("llama") else "learned",
            activation="swiglu" if shape.startswith("llama") else "gelu",
        )
    ).eval()


def batches(tokens: Tensor) -> list[Tensor]:
    return list(tokens.split(max(1, 4096 // tokens.shape[1])))


def plain(shape: str, tokens: Tensor) -> Callable[[], object]:
    """The model's forward pass and nothing else."""
    model = own_model(shape, tokens.shape[1])

    def work() -> None:
        with torch.no_grad():
            for batch in batches(tokens):
                model(batch)

    return work


def probe(*metrics: str) -> Callable[[str, Tensor], Callable[[], object]]:
    """attnprobe with some metrics, or all."""

    def prepare(shape: str, tokens: Tensor) -> Callable[[], object]:
        from attnprobe import scan  # imports what it needs now, not in the measured time

        model = own_model(shape, tokens.shape[1])
        return lambda: scan(model, tokens, metrics=metrics or None)

    return prepare


def output_attentions(shape: str, tokens: Tensor) -> Callable[[], object]:
    """What people write today: transformers with output_attentions=True, then the statistics."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, heads, _, width, d_ff, vocabulary = SHAPES[shape]
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=tokens.shape[1],
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_inner=d_ff,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()

    def work() -> list[tuple[Tensor, ...]]:
        figures = []
        with torch.no_grad():
            for batch in batches(tokens):
                output = model(batch, output_attentions=True, use_cache=False)
                for attention in output.attentions:  # (B, H, T, T)
                    entropy = torch.special.entr(attention).sum(-1)
                    figures.append((attention[..., 0].mean(), entropy.mean(), attention.sum(-2)))
        return figures

    return work


WORKS: dict[str, Callable[[str, Tensor], Callable[[], object]]] = {
    "plain": plain,
    "sink": probe("sink"),
    "sink+entropy": probe("sink", "entropy"),
    "scan": probe(),
    "output_attentions": output_attentions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-small")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(0)
    vocabulary = SHAPES[options.shape][-1]
    tokens = torch.randint(vocabulary, (options.samples, options.length))
    work = WORKS[options.work](options.shape, tokens)
    before = time.perf_counter()
    work()
    seconds = time.perf_counter() - before
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
