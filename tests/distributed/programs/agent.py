"""torchrun with ranks that are forks: agent.py RANKS SCRIPT ARGUMENTS…

PyTorch's agent starts, watches and ends the ranks. But what it starts is no new Python, which takes seconds to import
PyTorch, but a fork of this process, which has it (rank_server.py). The agent has threads, so another process forks.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


def fork_on_demand(asked: TextIO) -> tuple[list[str], dict[str, str]] | None:
    """For each line a fork, or the exit code of one, until the agent ends; in a fork its arguments and environment."""
    for line in asked:
        answer, what = None, json.loads(line)
        if isinstance(what, int):
            ended, status = os.waitpid(what, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif (answer := os.fork()) == 0:
            return what
        print(json.dumps(answer), file=asked, flush=True)
    return None


class Rank:
    """What the agent uses of ``subprocess.Popen``."""

    server: TextIO  # to :func:`fork_on_demand`

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **_: Any):
        self.pid, self._code = self._ask((args[args.index("-u") + 1 :], env)), None

    def _ask(self, what: Any) -> Any:
        print(json.dumps(what), file=self.server, flush=True)
        return json.loads(self.server.readline())

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._ask(self.pid)
        return self._code

    def wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)


def main() -> None:
    of_agent, of_server = (one.makefile("rw") for one in socket.socketpair())
    if os.fork():
        of_server.close()
        Rank.server, subprocess_handler.Popen = of_agent, Rank
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        try:
            return run.main(["--standalone", "--nproc-per-node", *sys.argv[1:]])
        except ChildFailedError as report:
            sys.exit(str(report))
    of_agent.close()
    if (rank := fork_on_demand(of_server)) is not None:
        os.setsid()
        sys.argv, environment = rank
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


main()
