"""Memory that several streams share: whether each use comes after the one before it that it must not overtake.

PyTorch gives the memory of a freed tensor to the next one of the same stream, whatever other streams still do with it.

Only the first use of a storage is taken to write it: later writes in place are not followed, nor what a replayed graph
uses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple


class _Use(NamedTuple):
    stream: int
    number: int  # the launch is the n-th of its stream


class Lifetimes:
    """The uses of each storage, by its key.

    Args:
        reached: for each stream, how many launches of every stream come before its next one.
    """

    def __init__(self, reached: defaultdict[int, Counter[int]]):
        self._reached = reached
        self._completed: Counter[int] = Counter()  # launches of every stream that the host has waited for
        self._pool: dict[int, tuple[bool, int]] = {}  # by storage: whether of a captured graph, and the stream
        self._uses: dict[int, dict[int, int]] = {}  # by storage: the last launch of each stream
        self._first: dict[int, _Use] = {}  # by storage: it is taken to have written it
        self._taken: dict[int, _Use] = {}  # by storage: the last launch of its stream before it was taken
        self._freed: defaultdict[tuple[bool, int], list[dict[int, int]]] = defaultdict(list)

    def complete(self, reached: Counter[int]) -> None:
        """The host has waited for these launches."""
        self._completed |= reached

    def allocate(self, key: int, captured: bool, stream: int) -> None:
        """A storage is taken from the memory of a stream.

        Raises:
            RuntimeError: it may be memory that another stream still uses.
        """
        self._pool[key], self._uses[key] = (captured, stream), {}
        self._taken[key] = _Use(stream, self._reached[stream][stream])
        for uses in self._freed.pop((captured, stream), ()):
            for user, number in uses.items():
                if not self._is_before(_Use(user, number), stream):
                    raise RuntimeError(
                        f"stream {stream} takes memory that was freed while stream {user} may still use it"
                    )

    def use(self, key: int, stream: int, number: int) -> None:
        """A launch of a stream uses a storage.

        Raises:
            RuntimeError: the stream has not waited for the storage's first use, or for what its memory was used for
                before.
        """
        if key not in self._uses:
            return
        first = self._first.setdefault(key, _Use(stream, number))
        if not self._is_before(first, stream):
            raise RuntimeError(f"stream {stream} has not waited for what stream {first.stream} writes")
        if not self._is_before(self._taken[key], stream):
            raise RuntimeError(f"stream {stream} uses memory that stream {self._taken[key].stream} may still use")
        self._uses[key][stream] = number

    def free(self, key: int) -> None:
        pool, uses = self._pool.pop(key), self._uses.pop(key)
        self._first.pop(key, None)
        del self._taken[key]
        if others := {stream: number for stream, number in uses.items() if stream != pool[1]}:
            self._freed[pool].append(others)

    def _is_before(self, use: _Use, stream: int) -> bool:
        """Whether a use comes before the next launch of a stream."""
        return use.stream == stream or use.number <= max(self._reached[stream][use.stream], self._completed[use.stream])
