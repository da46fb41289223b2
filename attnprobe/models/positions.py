"""Where a token stands, told to the model: rotary, sinusoidal or learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnprobe.errors import InputError

BASE = 10_000.0


def _angles(positions: Tensor, dim: int) -> Tensor:
    """`position · BASE^(-2i/dim)` for i in 0..dim/2: (…, T) to (…, T, dim/2), float32."""
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    return positions[..., None].float() * BASE**-exponents


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): turns channel i against channel i + D/2.

    Args:
        x: queries or keys (B, T, H, D).
        positions: (1 or B, T).
    """
    angles = _angles(positions, x.shape[-1])[:, :, None]  # (1|B, T, 1, D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """The fixed code of Vaswani et al. 2017, sine and cosine interleaved: (…, T, d_model)."""
    angles = _angles(positions, d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class LearnedPositions(nn.Embedding):
    """One learned vector per position, up to a fixed length."""

    def forward(self, positions: Tensor) -> Tensor:
        """Vectors (1 or B, T, d_model) of `positions` (1 or B, T)."""
        longest = int(positions.max()) + 1
        if longest > self.num_embeddings:
            raise InputError(
                f"the text is {longest} tokens long, the model's learned positions end at "
                f"{self.num_embeddings}; use a shorter --length"
            )
        return super().forward(positions)
