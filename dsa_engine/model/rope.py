"""Rotary position embedding: frequencies and scales, plain and YaRN (Peng et al., 2023, arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RopeConfig:
    """What the angles depend on. ``factor == 1`` is plain RoPE, everything above is YaRN."""

    dim: int  # rotated dimensions
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    cos_sin_scale: float = 1.0  # multiplies cos and sin
    softmax_mscale: float = 1.0  # its square multiplies the softmax scale
    truncate: bool = True  # round the ends of YaRN's ramp to whole dimensions

    @classmethod
    def from_dict(cls, raw: dict[str, Any], dim: int, max_positions: int) -> RopeConfig:
        """Reads ``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``, of a ``config.json``.

        Raises:
            ValueError: a RoPE type other than "default" and "yarn", or a YaRN without its original length.
        """
        keys = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
        theta = float(keys.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        kind = keys.get("rope_type") or keys.get("type") or "default"
        if kind == "default":
            return cls(dim=dim, theta=theta)
        if kind != "yarn":
            raise ValueError(f"RoPE type {kind!r} is not supported; supported are 'default' and 'yarn'")
        original = keys.get("original_max_position_embeddings")
        if not original:
            raise ValueError("YaRN needs original_max_position_embeddings in rope_parameters (or rope_scaling)")
        factor = float(keys.get("factor") or max_positions / original)
        mscale, all_dim = keys.get("mscale"), keys.get("mscale_all_dim")
        cos_sin_scale = keys.get("attention_factor")
        if cos_sin_scale is None:
            if mscale and all_dim:
                cos_sin_scale = _mscale(factor, mscale) / _mscale(factor, all_dim)
            else:
                cos_sin_scale = _mscale(factor, 1.0)
        return cls(
            dim=dim,
            theta=theta,
            factor=factor,
            original_max_positions=int(original),
            beta_fast=float(keys.get("beta_fast") or 32.0),
            beta_slow=float(keys.get("beta_slow") or 1.0),
            cos_sin_scale=float(cos_sin_scale),
            softmax_mscale=_mscale(factor, all_dim) if all_dim else 1.0,
            truncate=bool(keys.get("truncate", True)),
        )

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians per position of each rotated pair, float32 ``[dim / 2]``.

        YaRN keeps the fast pairs, slows the slow ones by ``factor``, and blends along a linear ramp between the pairs
        that turn ``beta_fast`` and ``beta_slow`` times over the original length.
        """
        half = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        powers = self.theta**half
        plain = 1.0 / powers
        if self.factor == 1.0 and self.original_max_positions == 0:
            return plain
        low, high = self._pair_turning(self.beta_fast), self._pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        kept = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        # Written with the roundings of `transformers`: one bit of a frequency is 0.01 radians at position 100,000.
        return 1.0 / (self.factor * powers) * (1 - kept) + plain * kept

    def _pair_turning(self, turns: float) -> float:
        """Which pair (fractional) turns ``turns`` times over the original length."""
        period = self.original_max_positions / (turns * 2 * math.pi)
        return self.dim * math.log(period) / (2 * math.log(self.theta))

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the angles at ``positions [T]``: two float32 tensors ``[T, dim / 2]``."""
        angles = positions.float()[:, None] * self.inverse_frequencies().to(positions.device)
        return angles.cos() * self.cos_sin_scale, angles.sin() * self.cos_sin_scale


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
