"""The demand on a deployment, and what a plan may choose; ``--help`` lists it, and torch is not imported here."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = ("fp8", "bfloat16", "int8", "int4-experts")
CACHES = ("fp8", "bfloat16")
DRAFTS = (0, 1, 2, 3)  # a request and step
ACCEPTANCE = (0.85, 0.72, 0.61)  # assumed, as MEASURED.md has it of others for the first draft


@dataclass(frozen=True)
class Demand:
    """What is asked of a deployment."""

    devices: int
    input_len: int  # tokens of a request, as output_len
    output_len: int = 1024
    ttft: float | None = None  # maximum seconds, as tpot; None: any
    tpot: float | None = None
    requests: int | None = None  # number of requests at once; None: the best number
    # By draft position, the fraction of steps in which this draft and all before it are accepted.
    acceptance: tuple[float, ...] = ACCEPTANCE

    def __post_init__(self) -> None:
        for name in ("devices", "input_len", "output_len", "ttft", "tpot", "requests"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        if not self.acceptance or not all(0 <= rate <= 1 for rate in self.acceptance):
            raise ValueError(f"--acceptance must be rates from 0 to 1, such as 0.9,0.8, not {self.acceptance}")

    def tokens_per_step(self, drafts: int) -> float:
        return 1 + sum(self.acceptance[min(i, len(self.acceptance) - 1)] for i in range(drafts))

    @property
    def context(self) -> int:
        """Tokens that a decoding request sees on average."""
        return self.input_len + self.output_len // 2

    @property
    def longest(self) -> int:
        """Tokens of a request at its end."""
        return self.input_len + self.output_len
