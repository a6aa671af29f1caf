"""Where the pages of a context lie: block tables of one rank of several, and buffers of a layer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from caches import cache_config
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.model.context_shards import NO_PAGE, LayerBuffers
from dsa_engine.model.forward_batch import ShardTables
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.parallel.group import Group
from gloo_ranks import on_ranks

SIZE, RANKS = 16, 3


class _Tables(ShardTables):
    """Tables whose device is not the host: what is not written to it is not there."""

    def __init__(self, index: int):
        super().__init__(SIZE, torch.device("cpu"), Group((0, 1, 2), index, None), 1 << 20)
        self._on_device = self.host.clone()

    def rows(self, requests: Sequence[list[int]]) -> list[int]:
        rows = super().rows(requests)
        if self._on_device is self.host:  # it has grown
            self._on_device = self.host.clone()
        return rows


def check(tables: _Tables, index: int, requests: list[list[int]]) -> None:
    rows, width = tables.rows(requests), max(map(len, requests), default=0)
    numbers, indices = tables.gather([row + i for i in range(2) for row in rows], width).chunk(2)
    for pages, here, at in zip(requests, numbers.tolist(), indices.tolist(), strict=True):
        own = [(page // RANKS, i) for i, page in enumerate(pages) if page % RANKS == index]
        assert [*zip(here, at, strict=True)][: len(own)] == own
        assert at[len(own) :] == [NO_PAGE] * (width - len(own))


@pytest.mark.parametrize("index", range(RANKS))
def test_a_life_of_many_steps(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come, grow, leave, are preempted, and take turns, while the table grows; and interrupts."""
    chance, tables, running = random.Random(3), _Tables(index), list[list[int]]()
    for step in range(200):
        if len(running) < 5 + step // 4:
            running.append([chance.randrange(1 << 20) for _ in range(chance.choice((1, 3, 70, 300)))])
        for i in range(len(running)):
            if chance.random() < 0.05:
                running[i] = [chance.randrange(1 << 20)]
            elif chance.random() < 0.3:
                running[i] += [chance.randrange(1 << 20)]
        if chance.random() < 0.2:
            running.pop(chance.randrange(len(running)))
        if step % 20 == 19:
            with monkeypatch.context() as patch:
                patch.setattr("dsa_engine.model.forward_batch.upload", lambda *_: exec("raise KeyboardInterrupt"))
                running[0] += [index]
                with pytest.raises(KeyboardInterrupt):
                    tables.rows(running)
        check(tables, index, [pages for pages in running if chance.random() < 0.8])
    assert tables.host.shape[0] >= 256 and tables.host.shape[1] >= 300


def test_a_buffer_has_the_pages_of_all_ranks() -> None:
    """Those of two requests with a common page and a page that one goes on to fill; and a slot for each new row."""
    config, pages, layer = cache_config(), 9, 2
    stored = CacheFormat.of(128, 16, 16, torch.float32, False)
    first, second = [4, 7, 25, 2, 11], [4, 7, 0, 14]
    chunks = [(first, 40, 70), (second, 32, 64)]  # tokens: 2½ pages and up to 4⅜; 2 pages and up to 4

    def run(group: Group) -> tuple[list[torch.Tensor], LayerBuffers]:
        cache = KVCache(config, stored, pages, SIZE, torch.device("cpu"), group)
        for pool in cache.latent:
            # Each row has its page's number in the group.
            pool.copy_((torch.arange(pages) * RANKS + group.index)[:, None, None].expand_as(pool))
        used: list[int] = []
        cache.before_use.append(used.append)
        buffers = LayerBuffers(cache, chunks, len(config.indexer_types))
        buffers.start(layer)
        buffers.start(layer)
        latent, keys = buffers.of(layer)
        assert keys is not None and len(keys) == len(latent) == buffers.pages and used == [layer]
        assert [one.kind for one in group.log] == ["all_gather"] * 2  # type: ignore[attr-defined]
        buffers.start_next(layer)
        buffers.drop(layer)
        assert [*buffers._entries] == [layer + 1]
        return [latent[buffers.pages_of(np.array(part))][:, 0, 0] for part in (first[:3], second[:2])], buffers

    for index, (read, buffers) in enumerate(on_ranks(RANKS, run)):
        assert [one.tolist() for one in read] == [[4, 7, 25], [4, 7]]
        # Two of rank 1, none of rank 0 and 2, in as many from each; and two new ones of each request.
        assert buffers.gathered == RANKS * 3 and buffers.pages == buffers.gathered + 4
        own = np.array([25 * SIZE + 8, 2 * SIZE, 14 * SIZE + 15, -1])
        there, here = buffers.slots(own)
        assert there[3] == here[3] == -1 and len({*there.tolist()}) == 4
        assert there.tolist()[:3] == (buffers.pages_of(own[:3] // SIZE) * SIZE + own[:3] % SIZE).tolist()
        expected = [
            page // RANKS * SIZE + slot if page % RANKS == index else -1 for page, slot in ((25, 8), (2, 0), (14, 15))
        ]
        assert here.tolist()[:3] == expected
