"""Ranks that others wait for and that never come, as their process has ended or is stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsa_engine.parallel.failure.peers import State, launched, state_of, wake
from dsa_engine.parallel.failure.watch import end_key

if TYPE_CHECKING:
    import torch.distributed as dist

_ENDED = "ended without an error of its own (killed, perhaps for want of memory, or crashed)"
FATES: dict[State, str] = {  # possible fate of a rank without an error, by the state of its process
    "ended": f"its process has {_ENDED}",
    "left": "its program has come to its end (by sys.exit, or as it does less than the others)",
    "stopped": "its process was stopped (SIGSTOP, or Ctrl-Z); it has been woken, to end like the others",
    "running": "it hangs, though its process is alive",
    "unknown": f"it hangs, or its process has {_ENDED}",
}
_BEFORE = "its process has ended before it came to the start of the run"
# In so many looks in a row: a rank may fail and say so a little later, and Ctrl-Z stops and continues all ranks.
_LOOKS: dict[State, int] = {"ended": 2, "left": 2, "stopped": 3}


class Absence:
    """Looks at the processes of some ranks.

    Args:
        store: of the run; ranks that have connected to it have registered their processes there.
        ranks: those to look at.
    """

    def __init__(self, store: dist.Store, ranks: Iterable[int]):
        self._store = store
        self._processes: dict[int, str | None] = dict.fromkeys(ranks)  # None: has not registered
        self._seen: Counter[tuple[int, State]] = Counter()

    def check(self) -> None:
        """Called once a second or so by a rank that waits.

        Raises:
            RuntimeError: a rank will not come. An error of its own is not told: it ends the run by itself.
        """
        for rank, known in self._processes.items():
            process = known or self._registered(rank)
            state = self._state(rank, process)
            for other in [key for key in self._seen if key[0] == rank and key[1] != state]:
                del self._seen[other]
            self._seen[rank, state] += 1
            if self._seen[rank, state] < _LOOKS.get(state, 1) or state not in _LOOKS or self._store.check([str(rank)]):
                continue
            if state == "stopped" and (process := process or launched(rank)):
                wake(process)
            raise RuntimeError(f"rank {rank} does not come: {FATES[state] if known or state != 'ended' else _BEFORE}")

    def _registered(self, rank: int) -> str | None:
        key = f"process {rank}"
        if self._store.check([key]):
            self._processes[rank] = self._store.get(key).decode()
        return self._processes[rank]

    def _state(self, rank: int, process: str | None) -> State:
        process = process or launched(rank)
        state = state_of(process) if process else "unknown"
        return "left" if state == "ended" and self._store.check([end_key(rank)]) else state
