"""The slots of one rank's host memory: which page each holds a copy of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator


class HostSlots:
    """Copies of pages, known by the digests of the pages, and replaced in the order of their last use.

    Attributes:
        dropped: called with the digest of a copy that is replaced; None: it is not needed.
    """

    dropped: Callable[[bytes], None] | None = None

    def __init__(self, slots: int):
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Digests and slots."""
        return iter(self._slot_of.items())

    @property
    def held(self) -> int:
        """Number of slots with a copy."""
        return len(self._slot_of)

    def use(self, digest: bytes) -> int:
        """The slot of a page that is here, which becomes the most recently used one."""
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]

    def put(self, digest: bytes, locked: Container[bytes] = ()) -> int | None:
        """Makes room for a copy of a page.

        Args:
            locked: digests of copies that must stay.

        Returns:
            the slot to copy to; None if the page is here already, or no slot can be replaced.
        """
        if digest in self._slot_of:
            self.use(digest)
            return None
        slots = self.reserve(1, locked)
        if not slots:
            return None
        self._slot_of[digest] = slots[0]
        return slots[0]

    def reserve(self, count: int, locked: Container[bytes] = ()) -> list[int]:
        """Takes up to ``count`` slots, which hold nothing until :meth:`name` or :meth:`give_back`."""
        slots: list[int] = []
        while len(slots) < count:
            if self._free:
                slots.append(self._free.pop())
                continue
            oldest = next((digest for digest in self._slot_of if digest not in locked), None)
            if oldest is None:
                break
            slots.append(self._slot_of.pop(oldest))
            if self.dropped is not None:
                self.dropped(oldest)
        return slots

    def name(self, slot: int, digest: bytes) -> None:
        """Records the copy that a reserved slot holds now."""
        if digest in self._slot_of:
            self._free.append(slot)
        else:
            self._slot_of[digest] = slot

    def give_back(self, slots: Iterable[int]) -> None:
        """Frees reserved slots."""
        self._free += slots

    def clear(self) -> None:
        """Forgets all copies; reserved slots stay reserved."""
        self._free += self._slot_of.values()
        self._slot_of.clear()
