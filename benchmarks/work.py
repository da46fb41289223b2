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
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = {  # layers, heads, key-value heads, width, feed-forward, vocabulary
    "gpt2-small": (12, 12, 12, 768, 3072, 50257),
    "llama-0.3b": (16, 16, 4, 1024, 2816, 32000),
    "width 4096": (2, 32, 32, 4096, 16384, 512),
    "tiny": (4, 4, 4, 128, 256, 512),
}
Work = Callable[[], object]


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


def foreign_model(shape: str, length: int, attention: str) -> Any:
    """The same shape as transformers builds it."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    layers, heads, kv_heads, width, d_ff, vocabulary = SHAPES[shape]
    if shape.startswith("llama"):
        config: Any = LlamaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=length,
            hidden_size=width,
            intermediate_size=d_ff,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        )
    else:
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_inner=d_ff,
        )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def batches(tokens: Tensor) -> list[Tensor]:
    return list(tokens.split(max(1, 4096 // tokens.shape[1])))


def plain(**options: int) -> Callable[[str, Tensor], Work]:
    """The model's forward pass and nothing else."""

    def prepare(shape: str, tokens: Tensor) -> Work:
        model = own_model(shape, tokens.shape[1])

        def work() -> None:
            with torch.no_grad():
                for batch in batches(tokens):
                    model(batch, **options)

        return work

    return prepare


def probe(*metrics: str, **options: Any) -> Callable[[str, Tensor], Work]:
    """attnprobe with some metrics, or all."""

    def prepare(shape: str, tokens: Tensor) -> Work:
        from attnprobe import scan  # imports what it needs now, not in the measured time

        model = own_model(shape, tokens.shape[1])
        return lambda: scan(model, tokens, metrics=metrics or None, **options)

    return prepare


def figures(attention: Tensor) -> tuple[Tensor, ...]:
    """(B, H, T, T) weights to F-Attr, entropy and the attention on every key, by head."""
    entropy = torch.special.entr(attention).sum(-1)
    return attention[..., 0].mean((0, 2)), entropy.mean((0, 2)), attention.sum((0, 2))


def output_attentions(shape: str, tokens: Tensor) -> Work:
    """What people write today: transformers with output_attentions=True, then the statistics."""
    model = foreign_model(shape, tokens.shape[1], "eager")

    def work() -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            return [
                figures(attention)
                for batch in batches(tokens)
                for attention in model(batch, output_attentions=True, use_cache=False).attentions
            ]

    return work


def every_figure(shape: str, tokens: Tensor) -> Work:
    """The same script with the other figures of a scan: ranks, perplexity and activations."""
    model = foreign_model(shape, tokens.shape[1], "eager")
    is_llama = shape.startswith("llama")
    heads = SHAPES[shape][1]
    joined: dict[str, list[Tensor]] = {}  # what W_O is given, by the module's name

    def keep(name: str) -> Callable[..., None]:
        return lambda module, given: joined.setdefault(name, []).append(given[0].flatten(0, 1))

    outputs = {}
    for name, module in model.named_modules():
        if name.endswith("o_proj" if is_llama else "attn.c_proj"):
            outputs[name] = module.weight.mT if is_llama else module.weight  # (H·d, d_model)
            module.register_forward_pre_hook(keep(name))

    def ranks(rows: Tensor, weight: Tensor) -> list[Tensor]:
        parts = zip(rows.chunk(heads, -1), weight.chunk(heads, 0), strict=True)
        added = [row @ part for row, part in parts]  # H of (N, d_model)
        return [erank(matrix) for matrix in (*added, rows @ weight)]

    def work() -> list[Any]:
        found: list[Any] = []
        with torch.no_grad():
            for batch in batches(tokens):
                seen = model(
                    batch,
                    labels=batch,
                    output_attentions=True,
                    output_hidden_states=True,
                    use_cache=False,
                )
                found.append(seen.loss.exp())
                found += [figures(attention) for attention in seen.attentions]
                found += [hidden.abs().amax((0, 1)) for hidden in seen.hidden_states]
            found += [ranks(torch.cat(rows), outputs[name]) for name, rows in joined.items()]
        return found

    return work


def erank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the singular values, with and without the mean row."""
    spectra = torch.stack([torch.linalg.svdvals(m) for m in (matrix, matrix - matrix.mean(0))])
    return torch.special.entr(spectra / spectra.sum(-1, keepdim=True)).sum(-1).exp()


def transformer_lens(shape: str, tokens: Tensor) -> Work:
    """TransformerLens 4: a hook on every attention pattern, reduced there and dropped."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = foreign_model(shape, tokens.shape[1], "eager")
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)

    def work() -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []
        hooks = [
            (f"blocks.{n}.attn.hook_pattern", lambda pattern, hook: found.append(figures(pattern)))
            for n in range(SHAPES[shape][0])
        ]
        with torch.no_grad():
            for batch in batches(tokens):
                bridge.run_with_hooks(batch, fwd_hooks=hooks)
        return found

    return work


def nnsight(shape: str, tokens: Tensor) -> Work:
    """nnsight: the weights that eager attention returns, reduced inside its trace."""
    from nnsight import NNsight

    model = foreign_model(shape, tokens.shape[1], "eager")
    is_llama = shape.startswith("llama")
    traced = NNsight(model)

    def work() -> list[tuple[Tensor, ...]]:
        found: list[tuple[Tensor, ...]] = []
        for batch in batches(tokens):
            with torch.no_grad(), traced.trace(batch, use_cache=False):
                blocks = traced.model.layers if is_llama else traced.transformer.h
                for block in blocks:
                    attention = block.self_attn if is_llama else block.attn
                    found.append(figures(attention.output[1]))
        return found

    return work


WORKS: dict[str, Callable[[str, Tensor], Work]] = {
    "plain": plain(),
    "plain, last logits": plain(logits_to_keep=1),
    "sink": probe("sink"),
    "sink+entropy": probe("sink", "entropy"),
    "rank": probe("rank"),
    "rank of heads": probe("rank", layer_rank=False),
    "scan": probe(),
    "scan, ranks of heads": probe(layer_rank=False),
    "scan without ranks": probe("sink", "entropy", "gate", "activation", "perplexity"),
    "output_attentions": output_attentions,
    "output_attentions, all": every_figure,
    "TransformerLens": transformer_lens,
    "nnsight": nnsight,
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
