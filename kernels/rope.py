"""Rotary position embedding of ready cosines and sines (Su et al., 2021, arXiv 2104.09864).

    (a, b) -> (a·cos − b·sin, b·cos + a·sin)

where (a, b) are the dimensions (2i, 2i+1) when interleaved, as in MLA, and (i, i + dim/2) when not, as in
DeepSeek-V3.2's indexer. The two are different models, not two layouts of one: a wrong choice passes short tests and
fails long contexts.
"""

from __future__ import annotations

import torch


def apply_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = (t.view(x.shape[0], *(1,) * (x.dim() - 2), half) for t in (cos, sin))
    full = x.float()  # rotated in float32, rounded once
    if interleaved:
        a, b = full[..., 0::2], full[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    a, b = full[..., :half], full[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotates ``x [T, ..., dim]`` by float32 ``cos, sin [T, dim / 2]``; the result has the shape and dtype of ``x``."""
    if x.shape[-1] != 2 * cos.shape[-1] or x.shape[0] != cos.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} does not fit cos {tuple(cos.shape)}")
    return apply_rope_reference(x, cos, sin, interleaved)
