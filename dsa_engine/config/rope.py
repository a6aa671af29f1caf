"""Rotary position embedding: frequencies and scales, plain and YaRN (Peng et al., 2023, arXiv 2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dsa_engine.config.checks import shown
from dsa_engine.config.keys import Keys

_YARN_KEYS = frozenset(
    ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    + ("attention_factor", "truncate")
)
# Keys that nothing reads, and their values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"partial_rotary_factor": (1,), "finetuned": ()}


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotation angles. ``factor == 1`` is plain RoPE, a larger one is YaRN."""

    dim: int  # rotated dimensions
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    cos_sin_scale: float = 1.0  # multiplies cos and sin
    softmax_mscale: float = 1.0  # its square multiplies the softmax scale
    truncate: bool = True  # round the first and last pair of YaRN's ramp to whole dimensions

    @classmethod
    def from_keys(cls, keys: Keys, dim: int, max_positions: int) -> RopeConfig:
        """Reads ``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``, of a ``config.json``."""
        old, new = keys.part("rope_scaling").raw, keys.part("rope_parameters").raw
        rope = Keys(old | new, "rope_parameters" if new else "rope_scaling")
        # With a base of 1 or less, all pairs would turn at one speed or in reverse order of speed.
        theta_of = rope if rope.get("rope_theta") is not None else keys
        theta = theta_of.number("rope_theta", 10000.0, above=1.0)
        kinds = rope.get("rope_type"), rope.get("type")  # the older name counts where there is no other
        kind = kinds[1] if kinds[0] is None else kinds[0]
        if kind not in (None, "default", "yarn"):
            raise ValueError(f"RoPE type {shown(kind)} is not supported; supported are 'default' and 'yarn'")
        if kind is None and any(rope.raw.get(key) is not None for key in _YARN_KEYS):
            raise ValueError(f"{', '.join(rope.raw)} of RoPE need a type: add 'rope_type': 'yarn', or 'default'")
        if kind != "yarn":
            if kind == "default":
                rope.asked |= _YARN_KEYS  # the type says that they do not count
            rope.refuse_unread(_NEUTRAL)
            return cls(dim=dim, theta=theta)
        if rope.get("original_max_position_embeddings") is None:
            raise ValueError("YaRN needs original_max_position_embeddings in rope_parameters (or rope_scaling)")
        original = rope.size("original_max_position_embeddings")
        factor = rope.number("factor", max_positions / original)
        mscale, all_dim = (rope.number(name, 0.0, above=None) for name in ("mscale", "mscale_all_dim"))
        scales = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
        config = cls(
            dim=dim,
            theta=theta,
            factor=factor,
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            cos_sin_scale=rope.number("attention_factor", scales),
            softmax_mscale=_mscale(factor, all_dim) if all_dim else 1.0,
            truncate=rope.flag("truncate", True),
        )
        rope.refuse_unread(_NEUTRAL)
        return config

    @cached_property
    def inverse_frequencies(self) -> torch.Tensor:
        """Radians per position of each rotated pair, float32 ``[dim / 2]``.

        YaRN leaves fast pairs unscaled, slows slow pairs by ``factor``, and blends both along a linear ramp between the
        pairs that turn ``beta_fast`` and ``beta_slow`` times over the original length.
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
        unscaled = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        # Rounded as in `transformers`: one bit of a frequency is 0.01 radians at position 100,000.
        return 1.0 / (self.factor * powers) * (1 - unscaled) + plain * unscaled

    def _pair_turning(self, turns: float) -> float:
        """The index of the pair, as a fraction, that turns ``turns`` times over the original length."""
        period = self.original_max_positions / (turns * 2 * math.pi)
        return self.dim * math.log(period) / (2 * math.log(self.theta))

    def cos_sin(
        self, positions: torch.Tensor, frequencies: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the angles at ``positions [T]``: two float32 tensors ``[T, dim / 2]``.

        ``frequencies``: :attr:`inverse_frequencies` on the device of ``positions``, which saves a synchronising copy.
        """
        if frequencies is None:
            frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.float()[:, None] * frequencies
        return angles.cos() * self.cos_sin_scale, angles.sin() * self.cos_sin_scale


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
