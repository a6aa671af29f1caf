"""How many drafts are accepted where tokens mean nothing: random caches, an emulated rank.

The work of a step is real; only how far a request gets by it is assumed, from given rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsa_engine.engine.sampling.draw import exponential_noise

DEFAULT_RATE = 0.85


@dataclass(frozen=True)
class AssumedAcceptance:
    """Of all steps, the fraction in which at least the first, the first two, … drafts are accepted: in [0, 1], not
    rising, the last one for all further positions too.

    Raises:
        ValueError: rates that are none.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            not self.rates
            or not all(0 <= rate <= 1 for rate in self.rates)
            or sorted(self.rates)[::-1] != [*self.rates]
        ):
            raise ValueError(
                "acceptance rates must lie in [0, 1] and not rise from position to position, such as 0.9,0.8, not "
                f"{','.join(map(str, self.rates)) or 'nothing'}"
            )

    @classmethod
    def default(cls, num_drafts: int) -> AssumedAcceptance:
        """0.85 at the first position, and the same of what is left at each further one."""
        return cls(tuple(DEFAULT_RATE ** (i + 1) for i in range(num_drafts)))

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Accepted drafts of ``most``, int64 ``[n]``, drawn by the keys of requests' seeds and the positions of their
        last tokens, int64 ``[n]`` each: the same on every rank, and on the device."""
        # Of other random numbers than the tokens, whose positions are none below 0.
        drawn = exponential_noise(keys, -1 - positions, 1)[:, 0].neg().exp()
        rates = [self.rates[min(i, len(self.rates) - 1)] for i in range(num_drafts)]
        return torch.stack([drawn < rate for rate in rates] or [drawn < 0]).long().sum(dim=0)
