from typing import NamedTuple
from dataclasses import dataclass

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
    pass
