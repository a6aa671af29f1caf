"""Assumed acceptance of drafts, for runs whose tokens mean nothing: random caches, an emulated rank.

The work of a step is real; only the number of tokens that a request gains by it follows from given rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsa_engine.engine.sampling.chain import exponential_noise

DEFAULT_RATE = 0.85


@dataclass(frozen=True)
class AssumedAcceptance:
    """Fractions of steps in which at least the first, the first two, … drafts are accepted.

    They are in [0, 1] and do not rise; the last one holds for all further positions.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = sorted(self.rates)[::-1] == [*self.rates]
        if not self.rates or not falling or not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(
                "acceptance rates must lie in [0, 1] and not rise from position to position, such as 0.9,0.8, not "
                f"{','.join(map(str, self.rates)) or 'nothing'}"
            )

    @classmethod
    def default(cls, num_drafts: int) -> AssumedAcceptance:
        """0.85 at the first position, 0.85² at the second, and so on."""
        return cls(tuple(DEFAULT_RATE ** (i + 1) for i in range(num_drafts)))

    def __call__(
        self, tokens: torch.Tensor, drafts: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Number of accepted drafts (:data:`~dsa_engine.engine.speculation.acceptance.AcceptanceRule`), drawn by keys
        and positions: the same on every rank, and on the device."""
        # Negative positions: their random numbers are not those of the tokens.
        drawn = exponential_noise(keys, -1 - positions, 1)[:, 0].neg().exp()
        rates = [self.rates[min(i, len(self.rates) - 1)] for i in range(drafts.shape[1])]
        return torch.stack([drawn < rate for rate in rates] or [drawn < 0]).long().sum(dim=0)
