from typing import NamedTuple
from dataclasses import dataclass
import torch

class PageCopy(NamedTuple):
    to_host: bool
    page: int
    slot: int

@dataclass
class PageMoves:
    copies: list[PageCopy]
    sends: list[list[int]]
    receives: list[list[int]]
    exchanges: bool

class PageTransfer:
    def __init__(self, cache, group, host, max_exchanged):
        self.cache, self.group, self.host = cache, group, host
        self.moves = None
    def pools(self):
        c = self.cache
        return [p for l in range(len(c.latent)) for p in (c.latent[l], c.index_keys[l]) if p is not None]
    def begin(self, moves):
        assert self.moves is None
        self.moves = moves
        for to_host, page, slot in moves.copies:
            for (pool, host) in self.host.pools:
                flat = pool.view(torch.uint8).view(pool.shape[0], -1)
                if to_host: host[slot] = flat[page]
                else: flat[page] = host[slot]
        if moves.exchanges:
            for pool in self.pools():
                flat = pool.view(torch.uint8).view(pool.shape[0], -1)
                rows = flat[torch.tensor([p for ps in moves.sends for p in ps], dtype=torch.long)]
                got = self.group.all_to_all(rows, [len(p) for p in moves.sends], [len(p) for p in moves.receives])
                flat[torch.tensor([p for ps in moves.receives for p in ps], dtype=torch.long)] = got
    def arrive(self, layer): pass
    def finish(self): self.moves = None
    def copy_out(self, copies):
        self.begin(PageMoves([PageCopy(True, *c) for c in copies], [], [], False)); self.finish()
        return lambda: None
