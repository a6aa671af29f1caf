"""Modelled time of a collective: bytes over bandwidth, plus latency.

Nothing here is measured. The model adds communication to the measured computation of an emulated rank, and every
report says so. The mesh knows the machine of each rank. For a group of n ranks in m machines, at
least k of them in each, and parts of b bytes (one rank's contribution):

* all_gather, reduce_scatter: a ring, n − 1 steps. A part passes m − 1 links between machines and n − m inside, so
  ``start + (n−m)·latency_in + (m−1)·latency_out + (n−1)·b / bandwidth``. The bandwidth is the slowest link's; between
  machines the adapters of k ranks carry a step together (as many rings, each over another adapter), so that link counts
  ``k · bandwidth_out``.
* all_reduce: a reduce_scatter and an all_gather of parts of b / n, started once.
* send, recv: ``start + latency + b / bandwidth`` of the link between the two.
* all_to_all: every rank sends to each peer directly. Both kinds of link work at the same time, the messages on each of
  them follow one another, and sending overlaps with receiving, so the time is ``start`` plus the longer of the two
  kinds' ``latency + messages·message + max(bytes sent, bytes received) / bandwidth``.

The links carry nothing else, all ranks begin at once, and a machine has one adapter per rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from dsa_engine.config.checks import integer, is_number
from dsa_engine.parallel.collective_log import Collective


class Transfer(NamedTuple):
    """A collective on each kind of link: seconds before its first byte, and seconds of its bytes."""

    inside: tuple[float, float] = (0.0, 0.0)
    between: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Seconds if nothing else travels."""
        return max(map(sum, self))

    def plus(self, other: Transfer) -> Transfer:
        """The same with the latency and the bytes of another one in addition: as long as both, one after the other, if
        the same kind of link bounds them, and else less."""
        return Transfer(*((a + c, b + d) for (a, b), (c, d) in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> Transfer:
        return Transfer(*((latency * factor, load * factor) for latency, load in self))


NO_TRANSFER = Transfer()


@dataclass(frozen=True)
class Link:
    """Link from one rank to others, in each direction."""

    name: str
    bandwidth_gb_s: float  # 10^9 bytes of payload per second and rank
    latency_us: float  # latency of a hop
    message_us: float  # cost of each message of an all_to_all, besides its bytes


@dataclass(frozen=True)
class Links:
    """The links of a cluster. The default figures are assumptions, all of them here.

    * inside a machine of 8: NVLink 4 (H100, H200), 450 GB/s nominal, of which 80% are assumed to be usable;
    * between machines: 400 Gb/s InfiniBand for each rank, 50 GB/s nominal, of which 90% are assumed to be usable;
    * latencies of the order that NCCL's own tuning assumes for short messages: 7 µs to start a collective, 1 µs a hop
      over NVLink, 3 µs a hop over InfiniBand; and for each message to a peer 0.2 µs and 1 µs.
    """

    machine_size: int = 8
    start_us: float = 7.0
    inside: Link = Link("NVLink", bandwidth_gb_s=360.0, latency_us=1.0, message_us=0.2)
    between: Link = Link("InfiniBand", bandwidth_gb_s=45.0, latency_us=3.0, message_us=1.0)

    @classmethod
    def read(cls, path: str | Path) -> Links:
        """Reads ``{"machine_size": 8, "start_us": 7, "inside": {…}, "between": {…}}``; missing keys have their
        defaults.

        Raises:
            OSError: no such file.
            ValueError: not JSON, an unknown key, or an invalid figure; the text names the file and the key.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            example = json.dumps(Links().to_json())
            raise ValueError(f"{path} is not valid JSON ({error}); give such as {example}") from error
        try:
            return cls.from_json(given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, given: object) -> Links:
        """The links that a JSON object describes; see :meth:`read`."""
        values = _object(given, cls(), "links")
        for name in ("inside", "between"):
            if name in values:
                default = getattr(cls(), name)
                link = _object(values[name], default, name)
                values[name] = Link(**{**asdict(default), **{k: _figure(f"{name}.{k}", v) for k, v in link.items()}})
        if "start_us" in values:
            values["start_us"] = _figure("start_us", values["start_us"])
        size = values.get("machine_size", 1)
        integer(minimum=1)("machine_size", size)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        links = (
            f"{link.name} {link.bandwidth_gb_s:g} GB/s, {link.latency_us:g} µs a hop, {link.message_us:g} µs a message"
            for link in (self.inside, self.between)
        )
        inside, between = links
        return (
            f"{inside} inside machines of {self.machine_size}; {between} between them; "
            f"{self.start_us:g} µs to start a collective"
        )

    def seconds(self, collective: Collective, machines: Sequence[int]) -> float:
        """Seconds of a collective under the assumptions of this module; 0 in a group of one rank.

        ``machines`` are those of all ranks of the mesh (:attr:`dsa_engine.parallel.Mesh.machines`).
        """
        return self.transfer(collective, machines).seconds

    def transfer(self, collective: Collective, machines: Sequence[int]) -> Transfer:
        """The same by kind of link."""
        where, kind = [machines[rank] for rank in collective.ranks], collective.kind
        if len(where) == 1:
            return Transfer()
        if kind == "all_to_all":
            return self._direct(collective, where)
        if kind in ("send", "recv"):
            return self._message(collective, where)
        part = max(collective.sent)
        if kind == "all_reduce":
            return self._ring(where, part / len(where), 2)
        return self._ring(where, part, 1)

    def _ring(self, where: list[int], part: float, times: int) -> Transfer:
        ranks_in = Counter(where)
        n, m, fewest = len(where), len(ranks_in), min(ranks_in.values())
        bandwidths = [self.inside.bandwidth_gb_s] if n > m else []
        if m > 1:
            bandwidths.append(fewest * self.between.bandwidth_gb_s)
        hops = (n - m) * self.inside.latency_us + (m - 1) * self.between.latency_us
        latency = (self.start_us + times * hops) * 1e-6
        both = latency, times * (n - 1) * part / (min(bandwidths) * 1e9)
        return Transfer(both if n > m else (0.0, 0.0), both if m > 1 else (0.0, 0.0))

    def _message(self, collective: Collective, where: list[int]) -> Transfer:
        nbytes = [max(both) for both in zip(collective.sent, collective.received, strict=True)]
        peer = nbytes.index(max(nbytes))
        at_home = where[peer] == where[collective.index]
        link = self.inside if at_home else self.between
        times = (self.start_us + link.latency_us) * 1e-6, nbytes[peer] / (link.bandwidth_gb_s * 1e9)
        return Transfer(inside=times) if at_home else Transfer(between=times)

    def _direct(self, collective: Collective, where: list[int]) -> Transfer:
        home = where[collective.index]
        each = []
        for link, at_home in ((self.inside, True), (self.between, False)):
            peers = [i for i, machine in enumerate(where) if i != collective.index and (machine == home) == at_home]
            load = max(sum(counts[i] for i in peers) for counts in (collective.sent, collective.received))
            latency = self.start_us + link.latency_us + len(peers) * link.message_us if peers else 0.0
            each.append((latency * 1e-6, load / (link.bandwidth_gb_s * 1e9)))
        return Transfer(*each)


def _object(given: object, like: Any, what: str) -> dict[str, Any]:
    allowed = [f.name for f in fields(like)]
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be a JSON object with some of the keys {', '.join(allowed)}, not {given!r:.80}")
    for key in given:
        if key not in allowed:
            raise ValueError(f"{what} has no key {key!r}; keys are {', '.join(allowed)}")
    return dict(given)


def _figure(name: str, value: object) -> object:
    """A figure of a link: bandwidths above 0, times from 0 on, names that are text."""
    if name.endswith(".name"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a text, not {value!r}")
        return value
    positive = name.endswith("bandwidth_gb_s")
    if not is_number(value) or value < 0 or (positive and value == 0):  # type: ignore[operator]
        raise ValueError(f"{name} must be a number {'above 0' if positive else 'of at least 0'}, not {value!r}")
    return value
