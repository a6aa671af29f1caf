"""The forms on a large number of ranks: bytes and work by formulas that a real run confirms, and modelled times.

Nothing here is measured. :mod:`~dsa_engine.parallel.links` gives the time of a collective from its bytes; work
is that of the busiest rank at one assumed rate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from context_parallel.division import Division, imbalance
from context_parallel.form import CPForm, to_next
from context_parallel.layer import DSASize
from dsa_engine.parallel.collective_log import Collective
from dsa_engine.parallel.links import Links


@dataclass(frozen=True)
class Counted:
    """One layer in one form, at one length, on many ranks."""

    form: str
    length: int
    ranks: int
    sent_bytes: int  # sent by a rank
    messages: int  # collectives, or steps of a ring
    imbalance: float
    flops: float  # operations of the busiest rank
    held_bytes: int
    work_ms: float  # modelled
    communication_ms: float  # modelled
    exposed_ms: float  # modelled: communication that no work overlaps

    @property
    def total_ms(self) -> float:
        """Modelled time of work and of the communication that it does not overlap."""
        return self.work_ms + self.exposed_ms

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_ms": self.total_ms}


def count(form: type[CPForm], size: DSASize, length: int, ranks: int, links: Links, tflops: float) -> Counted:
    """Bytes, work and modelled times of a form in bfloat16.

    Args:
        tflops: assumed rate of all work, 10^12 operations per second.

    Raises:
        ValueError: the form cannot run on so many ranks.
    """
    refusal = form.refusal(size, ranks)
    if refusal:
        raise ValueError(refusal)
    division = Division(length, ranks, form.layout)
    work = [form.work_of(size, division, rank) for rank in range(ranks)]
    busiest = max(work, key=lambda of_rank: of_rank.flops(size))
    collectives = form.collectives(size, division, 2)
    machines = [rank // links.machine_size for rank in range(ranks)]
    communication = [1e3 * _seconds(collective, links, machines) for collective in collectives]
    index, attention, before = (
        flops / tflops / 1e9
        for flops in (busiest.index_flops(size), busiest.attention_flops(size), division.rows * _covering_flops(size))
    )
    return Counted(
        form=form.name,
        length=length,
        ranks=ranks,
        sent_bytes=sum(collective.bytes_sent for collective in collectives),
        messages=len(collectives),
        imbalance=imbalance([of_rank.flops(size) for of_rank in work]),
        flops=busiest.flops(size),
        held_bytes=form.held_bytes(size, division, 2),
        work_ms=index + attention,
        communication_ms=sum(communication),
        exposed_ms=form.exposed(communication, index, attention, before),
    )


def _covering_flops(size: DSASize) -> int:
    """Operations of a token between its cache row and the first use of others': q_b, W_UK and the indexer's wq_b."""
    mla = size.mla
    query = mla.q_rank * mla.heads * (mla.nope + mla.rope)
    return 2 * (query + mla.heads * mla.nope * mla.kv_rank + mla.q_rank * size.index_heads * size.index_dim)


def _seconds(collective: Collective, links: Links, machines: list[int]) -> float:
    if collective.kind != "send":
        return links.seconds(collective, machines)
    # Every rank sends at the same time, and the ring is as fast as its slowest link: the one between two machines,
    # which one rank of each machine uses.
    ranks = len(machines)
    return max(links.seconds(to_next(ranks, collective.bytes_sent, rank), machines) for rank in range(ranks))
