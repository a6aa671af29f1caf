"""The way of a prompt's cache rows from the ranks that prefill to the rank that decodes.

Whole pages travel, as the caches store them, layer by layer under the prefill of the layers behind. Only the rows of
the last chunk's last layer are left when the first token is sampled, unless the link is slower than the prefill.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsa_engine.commands.planner.deployment import Placed
from dsa_engine.commands.planner.predict import Prefill
from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.options import EngineOptions


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


def predict_handover(
    placed: Placed, prefill: Prefill, tokens: int, page_size: int = EngineOptions.page_size
) -> Handover:
    """The handover of a prompt of ``tokens`` tokens to a rank on another machine.

    Args:
        placed: the deployment that decodes; its cache rows are those that travel.
        prefill: the prompt's prefill, with caches of the same format.
    """
    pages = pages_for(tokens, page_size)
    nbytes = pages * page_size * placed.token_bytes
    rate = placed.links.between.bandwidth_gb_s * 1e9
    last_chunk = min(tokens, prefill.how.chunk * prefill.how.cp_size)
    last = last_chunk / tokens * nbytes / (placed.config.num_hidden_layers + bool(placed.how.drafts))
    exposed = max(last / rate, nbytes / rate - prefill.ttft)
    return Handover(pages, nbytes, nbytes / rate, exposed)
