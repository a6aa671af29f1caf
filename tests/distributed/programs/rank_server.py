"""Starts ranks by forking a process that has imported everything: rank_server.py, one launch for each line of stdin.

Starting Python and importing PyTorch takes seconds. A line is a JSON object: ``ranks``, ``script``, ``arguments``,
``environment``, ``stdin`` (a file), and ``out`` and ``err``, the files to which all ranks write. When all ranks have
ended, a line with their exit codes goes to stdout. If a rank fails, the others are killed after ten seconds.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed
import transformers

import dsa_engine.cli

_MODULES = {command.function.partition(":")[0] for command in dsa_engine.cli.COMMANDS.values()}
_IMPORTED = (torch.distributed, transformers, *(import_module(f"dsa_engine.commands.{one}") for one in _MODULES))


def fork_ranks(launch: dict[str, Any]) -> list[int] | None:
    """Forks the ranks of a launch; returns their process ids, and None in each rank."""
    processes = []
    for rank in range(launch["ranks"]):
        if (process := os.fork()) == 0:
            become(rank, launch)
            return None
        processes.append(process)
    return processes


def become(rank: int, launch: dict[str, Any]) -> None:
    """Makes this process a rank, as a launcher would have started it."""
    os.environ |= launch["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(launch["ranks"])
    for number, (path, flags) in enumerate(
        [
            (launch["stdin"] or os.devnull, os.O_RDONLY),
            (launch["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            (launch["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ]
    ):
        os.dup2(os.open(path, flags, 0o600), number)
    sys.stdin = os.fdopen(0)  # the server's may have read ahead
    for stream in (sys.stdout, sys.stderr):  # a line is one write, also with PYTHONUNBUFFERED: all ranks share the file
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [launch["script"], *launch["arguments"]]
    sys.path[0] = str(Path(launch["script"]).parent)


def exit_codes(processes: list[int]) -> list[int]:
    """Waits for the ranks; if one fails, the others have ten seconds to end."""
    codes: dict[int, int] = {}
    until = float("inf")
    while len(codes) < len(processes):
        for process in set(processes) - codes.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                until = min(until, time.monotonic() + 10) if codes[process] else until
            elif time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[process] for process in processes]


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        launch = json.loads(line)
        processes = fork_ranks(launch)
        if processes is None:
            break
        print(json.dumps(exit_codes(processes)), flush=True)
    else:
        return
    runpy.run_path(launch["script"], run_name="__main__")


main()
