"""The device of a process."""

from __future__ import annotations

import ctypes
import os
import warnings

import torch

from dsa_engine.parallel.launch_environment import launched_rank, local_world_size

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues, by default 8; streams that share one wait for each other
_IN_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # communicators launch in the order of the host, which is one in all ranks
# NCCL 2.28 may hang (issues 2389, 2390) where nodes exchange small and registered large messages in one graph.
_REGISTERED = "NCCL_GRAPH_REGISTER"
_DRIVER = 12090  # CUDA 12.9, driver 575: before it, collectives of several communicators in a graph run one by one


def choose_device(device: str, one_part: bool = True) -> torch.device:
    """Makes the device of this process the current one, and returns it. What CUDA and NCCL read when they start is set
    before, unless the environment has it.

    Args:
        one_part: whether all ranks of the run launch their collectives in one order. With two parts, threads launch
            messages beside steps: in an order of the host, NCCL refuses them, and ranks could wait in a circle.
    """
    wanted = {_QUEUES: 32} | ({_IN_ORDER: 1} if one_part else {})
    if device != "cpu":
        for name, number in wanted.items():
            os.environ.setdefault(name, str(number))
        if launched_rank()[1] > local_world_size():
            os.environ.setdefault(_REGISTERED, "0")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = "give 'auto', 'cpu', 'cuda' or 'cuda:N'"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not known; {known}") from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise ValueError(f"device {device!r} is not supported; {known}")
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but PyTorch sees no CUDA device; give 'cpu' or 'auto'")
    neighbours = local_world_size()
    if chosen.index is not None and neighbours > 1:
        raise ValueError(f"device {device!r} is one device, for {neighbours} ranks on this machine; give 'cuda'")
    index = int(os.environ.get("LOCAL_RANK", "0")) if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device cuda:{index} was asked for, but there are {torch.cuda.device_count()} CUDA devices; "
            "start as many ranks on a node as it has devices, or give 'cpu'"
        )
    if not one_part and os.environ.get(_IN_ORDER, "0") != "0":
        raise ValueError(
            f"{_IN_ORDER} is {os.environ[_IN_ORDER]!r}, with which NCCL refuses what prefill_ranks launches: leave it "
            "unset, in a process in which no engine without prefill_ranks has started on a GPU, as that sets it"
        )
    for name, number in wanted.items():
        given = os.environ[name]
        if not given.isdecimal() or int(given) < number:
            warnings.warn(f"{name} is {given!r}, so streams may wait for each other: set {number}", stacklevel=2)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def warn_of_old_driver() -> None:
    """For a run over several nodes on CUDA devices."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if version.value < _DRIVER:
        number = f"{version.value // 1000}.{version.value % 1000 // 10}"
        warnings.warn(
            f"the NVIDIA driver is of CUDA {number}: before 12.9 (driver 575) exchanges in a "
            "CUDA graph run one after another, so decode steps over several nodes take longer; install a newer driver",
            stacklevel=2,
        )
