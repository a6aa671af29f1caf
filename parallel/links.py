"""Modelled time of a collective: bytes over bandwidth, plus latency. Nothing here is measured.

``moe_dispatch="auto"``, the ways of a gather and ``dsa-engine plan`` follow this one model. For a group of n ranks,
evenly on m nodes, and parts of b bytes (one rank's contribution):

* all-gather, reduce-scatter: a ring, n − 1 steps. A part passes m − 1 links between nodes and n − m inside, so
  ``start + (n − m) · latency_in + (m − 1) · latency_out + (n − 1) · b / bandwidth``. The bandwidth is the slowest
  link's; between nodes the adapters of all n / m ranks of a node carry a step together.
* all-to-all: every rank sends b bytes to each peer directly. Both kinds of link work at the same time, and messages on
  each follow one another: ``start`` plus the longer of the two ``latency + peers · (message + b / bandwidth)``.

The links carry nothing else, all ranks begin at once, and a node has one adapter per rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Link from one rank to others, in each direction."""

    bandwidth_gb_s: float  # 10^9 bytes of payload per second and rank
    latency_us: float  # latency of a hop
    message_us: float  # cost of each message of an all-to-all, besides its bytes


@dataclass(frozen=True)
class Links:
    """The links of a cluster. The default figures are assumptions, all of them here.

    * inside a node: NVLink 4 (H100, H200), 450 GB/s nominal, of which 80% are assumed to be usable;
    * between nodes: 400 Gb/s InfiniBand for each rank, 50 GB/s nominal, of which 90% are assumed to be usable;
    * latencies of the order that NCCL's own tuning assumes for short messages: 7 µs to start a collective, 1 µs a hop
      over NVLink, 3 µs a hop over InfiniBand; and for each message to a peer 0.2 µs and 1 µs.
    """

    start_us: float = 7.0
    inside: Link = Link(bandwidth_gb_s=360.0, latency_us=1.0, message_us=0.2)
    between: Link = Link(bandwidth_gb_s=45.0, latency_us=3.0, message_us=1.0)

    def ring(self, ranks: int, nodes: int, part: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``part`` bytes of each rank; 0 in a group of one rank."""
        if ranks == 1:
            return 0.0
        bandwidths = [self.inside.bandwidth_gb_s] if ranks > nodes else []
        if nodes > 1:
            bandwidths.append(ranks / nodes * self.between.bandwidth_gb_s)
        hops = (ranks - nodes) * self.inside.latency_us + (nodes - 1) * self.between.latency_us
        return (self.start_us + hops) * 1e-6 + (ranks - 1) * part / (min(bandwidths) * 1e9)

    def all_to_all(self, ranks: int, nodes: int, part: float) -> float:
        """Seconds of an all-to-all of ``part`` bytes from a rank to each other one; 0 in a group of one rank."""
        on_node = ranks / nodes

        def of(link: Link, peers: float) -> float:
            each = link.message_us * 1e-6 + part / (link.bandwidth_gb_s * 1e9)
            return (self.start_us + link.latency_us) * 1e-6 + peers * each if peers else 0.0

        return max(of(self.inside, on_node - 1), of(self.between, ranks - on_node))
