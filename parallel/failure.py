"""How a run of several processes ends when one of them fails: with that one's own error, shown first.

When a rank dies, its peers soon fail too, with an error of the transport that says nothing about the cause. The first rank
to fail leaves its error in the store of the process group; a rank that fails later looks there, and says in one line whose
error ended the run.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType

import torch.distributed as dist

_KEY = "dsa_engine/first_failure"
_GRACE_S = 1.0  # a peer's transport error can arrive before the cause has been written to the store


def report_failures(rank: int) -> None:
    """Makes an uncaught exception of this process end it at once, the run's first one with its full traceback."""
    store = dist.distributed_c10d._get_default_store()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            _end(f"[rank {rank}] interrupted", 130)
        transport = isinstance(error, dist.DistError) or _is_transport_error(error)
        if transport:
            time.sleep(_GRACE_S)
        try:
            first = store.compare_set(_KEY, "", f"rank {rank}: {kind.__name__}: {error}").decode()
        except Exception:  # the store went down with its host: then this rank speaks for itself
            first = f"rank {rank}: {kind.__name__}: {error}"
        if first.startswith(f"rank {rank}: "):
            text = "".join(traceback.format_exception(kind, error, trace))
            _end(f"[rank {rank}] failed and ends the run:\n{text}", 1)
        _end(f"[rank {rank}] ends, because {first.splitlines()[0]}", 1)

    sys.excepthook = hook


def _is_transport_error(error: BaseException) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _end(text: str, code: int) -> None:
    # os._exit: an orderly exit would wait for collectives that the other ranks no longer answer.
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
