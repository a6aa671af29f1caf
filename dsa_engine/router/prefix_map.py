"""What a replica has probably cached: digests of the blocks that were sent to it, the latest of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class PrefixMap:
    """Digests of blocks sent to one replica; the least recently sent go first when there are too many.

    A block's digest covers all blocks before it. Every use of a block is a later use of the blocks before it, so a
    block is never dropped before the blocks that follow it: those that are there begin at the prompt's beginning.

    Args:
        capacity: maximum number of blocks, at least 1; a block takes about 200 bytes.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # least recently sent first

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, blocks: Sequence[bytes]) -> int:
        """Number of a prompt's first blocks that are there."""
        return bisect_left(range(len(blocks)), True, key=lambda i: blocks[i] not in self._blocks)

    def add(self, blocks: Sequence[bytes]) -> None:
        """Records a prompt's blocks, in order, as sent now; of a prompt beyond the capacity the first ones."""
        for block in reversed(blocks[: self._capacity]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def remove(self, blocks: Sequence[bytes]) -> None:
        """Forgets the last blocks of a prompt, which never reached the replica."""
        for block in blocks:
            self._blocks.pop(block, None)

    def clear(self) -> None:
        """Forgets everything: the replica has lost its cache."""
        self._blocks.clear()
