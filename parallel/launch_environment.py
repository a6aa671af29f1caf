"""The environment of a process, set by its launcher (``torchrun``, ``deepspeed``): its rank, the number of processes,
and whether the launcher keeps the run's store."""

from __future__ import annotations

import os


def launched_rank() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without a launcher."""
    size = _number("WORLD_SIZE", "1", 1, "a positive integer")
    return _number("RANK", "0", 0, f"an integer from 0 to {size - 1}, as WORLD_SIZE is {size}", size), size


def several_processes() -> bool:
    """Whether this is one process of several; False if the environment is invalid (:func:`launched_rank`)."""
    try:
        return launched_rank()[1] > 1
    except ValueError:
        return False


def local_world_size() -> int:
    """Number of processes of the run on this machine: torchrun sets LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE."""
    name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
    return _number(name, "1", 1, "a positive integer")


def store_address() -> tuple[str, int]:
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            "MASTER_ADDR and MASTER_PORT must be in the environment of several processes; torchrun sets them"
        )
    return os.environ["MASTER_ADDR"], _number("MASTER_PORT", "", 0, "a port number, from 0 to 65535", 65536)


def launched_store() -> bool:
    """Whether the launcher keeps the store of the run, which then exists before any rank has begun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(name: str, default: str, least: int, allowed: str, end: int | None = None) -> int:
    text = os.environ.get(name, default)
    value = int(text) if text.isascii() and text.isdigit() else least - 1
    if value < least or (end is not None and value >= end):
        raise ValueError(
            f"{name} in the environment must be {allowed}, not {text!r}; start several processes with torchrun, which "
            "sets it, or unset it to run one"
        )
    return value
