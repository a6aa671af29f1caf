"""A process joins a run and leaves it, with a clear error if the other ranks do not come."""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist

from dsa_engine.parallel.failure.reporter import leave_run, report_failures
from dsa_engine.parallel.launch_environment import launched_rank, store_address


def join_run(device: torch.device, timeout_s: float, bound: torch.device | None) -> None:
    """Makes the process group of the whole run.

    Args:
        bound: the device to which all groups are bound, if all ranks take part in making each.

    Raises:
        TimeoutError: the other ranks do not come.
    """
    backend, (host, port) = "nccl" if device.type == "cuda" else "gloo", store_address()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=bound)
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"the other ranks have not all come to {host}:{port} (MASTER_ADDR, MASTER_PORT) within {timeout_s:g} "
            f"seconds: {error} Start all {launched_rank()[1]} of WORLD_SIZE, with the same address"
        ) from error
    report_failures(connect_s=timeout_s)
    atexit.register(_leave)  # runs while failures are still watched for, as it may wait for a peer


def _leave() -> None:
    leave_run()
    if dist.is_initialized():
        dist.destroy_process_group()
