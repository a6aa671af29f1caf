"""Crowds of requests on ranks whose caches are too small for them, and a disk tier in memory."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.scheduler import Scheduler


@dataclass
class World:
    world: int
    cp: int
    dcp: int
    pages: int
    page_size: int
    seqs: int
    tokens: int
    fraction: float
    caching: bool
    lookahead: int
    slots: int
    fetched: int
    disk: bool
    spilled: int = 0  # further pages of a rank

    @property
    def all_pages(self) -> int:
        return self.pages + self.spilled

    def schedulers(self) -> list[Scheduler]:
        made = [
            Scheduler(
                Capacity(
                    self.world,
                    self.cp,
                    self.pages,
                    self.page_size,
                    self.dcp,
                    spilled=self.spilled,
                    sets=-(-self.seqs * self.dcp // self.world) if self.spilled else 0,
                ),
                rank=rank,
                max_num_seqs=self.seqs,
                max_num_batched_tokens=self.tokens,
                max_prefill_share=self.fraction,
                enable_prefix_caching=self.caching,
                host_pages=self.slots,
                max_fetched_pages=self.fetched,
            )
            for rank in range(self.world)
        ]
        for scheduler in made:
            scheduler.prefix_cache.lookahead = self.lookahead
        return made


@dataclass
class Wish:
    """A request made by hypothesis."""

    document: int  # requests of one document begin alike; an output continues document 0
    own: int  # last tokens of the prompt that no other request has
    prompt: int
    output: int
    arrives: int  # its step of arrival
    ends_after: int  # tokens after which it ends, as by an end token
    priority: int
    leaves: int | None  # steps after which it ends, as by a closed stream


def crowd(rng: random.Random, tiers: int, large: bool = False, spills: bool = False) -> tuple[World, list[Wish]]:
    """Requests that need more than the cache together, so that runs preempt as a rule.

    Args:
        large: on 16 to 64 ranks, instead of 1 to 9.
        spills: with hot rows, on 1 to 4 ranks.
    """
    page_size, pages = rng.randint(1, 4), rng.randint(3, 12)
    cp = rng.choice([1, 4, 16, 64]) if large else rng.choice([1, 2, 3, 4])
    dcp = rng.choice([size for size in (1, 1, 2, 3, 4, 8) if cp % size == 0])
    spilled = 0
    if spills:
        pages, spilled, cp = rng.randint(4, 8), rng.randint(1, 12), rng.choice([1, 1, 2, 2, 4])
        dcp = rng.choice([size for size in (1, 2, 2) if cp % size == 0])
    world = World(
        world=max(cp, rng.choice([16, 32, 64])) if large else cp * rng.randint(1, 4 // cp if spills else 3),
        cp=cp,
        dcp=dcp,
        pages=pages,
        page_size=page_size,
        seqs=rng.randint(20, 100) if large else rng.randint(1, 8),
        tokens=rng.randint(1, 12),
        fraction=rng.choice([1.0, 0.9, 0.5, 0.3, 0.05]),
        caching=tiers > 0,
        lookahead=rng.randint(0, 1),
        slots=0 if tiers < 2 else rng.choice([1, 3, 20]),
        fetched=rng.choice([1, 2, 100]),
        disk=tiers == 3,
        spilled=spilled,
    )
    room = world.all_pages * page_size * dcp
    wishes = [
        Wish(
            document=rng.choice([0, 0, 1]),
            own=rng.choice([0, 0, 1, 3]),
            prompt=rng.randint(1, max(1, room // 2)),
            output=rng.randint(1, room * 3 // 4),
            arrives=rng.randint(0, 12),
            ends_after=rng.choice([room, room, rng.randint(1, room)]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            leaves=rng.choice([None, None, None, rng.randint(0, 40)]),
        )
        for _ in range(rng.randint(20, 100) if large else rng.randint(1, 4 + 4 * world.world))
    ]
    return world, wishes


class SlowReader:
    """Reads pages of a folder in memory, a few at a time; sometimes a page is damaged."""

    def __init__(self, folder: FolderInMemory):
        self.folder, self.loads = folder, list[Any]()

    def submit(self, read: Any, pages: list[Any], copied: Any) -> Future[int]:
        copied()
        load: Future[int] = Future()
        self.loads.append((load, pages, []))
        return load

    def read_some(self, rng: random.Random, host: dict[int, list[int]]) -> None:
        for load, pages, done in [one for one in self.loads if not one[0].done()]:
            for digest, slot in pages[len(done) : len(done) + rng.randint(0, 3)]:
                host[slot] = [-1]
                if digest not in self.folder.pages or rng.random() < 0.1:
                    load.set_result(len(done))
                    break
                host[slot] = self.folder.pages[digest]
                done.append(slot)
            if len(done) == len(pages):
                load.set_result(len(done))


@dataclass
class FolderInMemory:
    pages: dict[bytes, list[int]] = field(default_factory=dict)

    def has(self, digest: bytes) -> bool:
        return digest in self.pages


@dataclass
class AgreedAtOnce:
    """Stands for the group of all ranks, which all run in this thread."""

    index: int
    ranks: tuple[int, ...]
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        assert torch.equal(mine[0], self.values[self.index])
        return self.values


class Slots:
    def parts(self, slot: int) -> int:
        return slot
