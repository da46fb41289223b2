"""Probe a GPT that knows nothing of attnprobe: sixty lines of ordinary torch, one call.

python examples/own_gpt.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnprobe


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> attnprobe.Result:
    torch.manual_seed(0)
    text = b"Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 8
    data = torch.tensor(list(text))
    model = GPT(vocabulary=256, width=64, heads=4, layers=3, length=128)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = attnprobe.Monitor(model, data[:64][None], every=20)  # watches while it trains
    for step in range(61):
        starts = torch.randint(len(data) - 65, (16,))
        rows = torch.stack([data[s : s + 65] for s in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if row := monitor(step, loss=loss.item()):
            print(f"step {step:3d}  loss {row['loss']:.2f}  F-Attr {row['f_attr']:.3f}")

    result = attnprobe.scan(model, data[:512].view(4, 128), token_text=chr)
    print(result.layers[["layer", "f_attr", "f_attr_uniform", "entropy_norm", "erank"]])
    print(result.not_measured[["metric", "reason"]].drop_duplicates().to_string(index=False))
    return result


if __name__ == "__main__":
    main()
