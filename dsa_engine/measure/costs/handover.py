"""The way of a prompt's cache rows from the ranks that prefill to the rank that decodes, as modelled.

Whole pages travel, as the caches store them, layer by layer under the layers that are computed after them. The first
step of a prefill asks for room, so they begin to leave under the second one, and only the rows of the last layer remain
when the first token is sampled, unless the link is slower than the prefill. A prompt of one step leaves after it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.kernels.runtime.integers import cdiv


@dataclass(frozen=True)
class Handover:
    """The handover of one request.

    Attributes:
        pages: number of pages of the prompt.
        nbytes: bytes of these pages in all layers.
        seconds: their time on the link of the rank that receives them.
        exposed: seconds of it after the prefill has ended.
    """

    pages: int
    nbytes: int
    seconds: float
    exposed: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def handover_of(
    tokens: int, page_size: int, token_bytes: int, layers: int, step: int, rate: float, ttft: float
) -> Handover:
    """The handover of a prompt.

    Args:
        token_bytes: bytes of a token in the caches of all ``layers``.
        step: maximum number of a prompt's tokens that a step prefills.
        rate: of the link, in bytes/s.
        ttft: seconds of the prefill.
    """
    pages = pages_for(tokens, page_size)
    nbytes = pages * page_size * token_bytes
    seconds, steps = nbytes / rate, cdiv(tokens, step)
    *_, last = seconds_of_steps(tokens, step, seconds)
    exposed = seconds if steps == 1 else max(last / layers, seconds - ttft * (steps - 1) / steps)
    return Handover(pages, nbytes, seconds, exposed)


def seconds_of_steps(tokens: int, step: int, seconds: float) -> list[float]:
    """What leaves with each step from the second on, or after the only one, in ``seconds`` of the link for all."""
    firsts = [0, *range(2 * step, tokens, step)]
    return [seconds * (end - first) / tokens for first, end in zip(firsts, [*firsts[1:], tokens], strict=True)]
