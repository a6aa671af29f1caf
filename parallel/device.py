"""The device of a process."""

from __future__ import annotations

import os
import warnings

import torch

from dsa_engine.parallel.launch_environment import local_world_size

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues, by default 8; streams that share one wait for each other
_IN_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # communicators launch in the order of the host, which is one in all ranks


def choose_device(device: str, one_part: bool = True) -> torch.device:
    """Makes the device of this process the current one, and returns it. What CUDA and NCCL read when they start is set
    before, unless the environment has it. ``one_part``: all ranks of the run launch their collectives in one order."""
    wanted = {_QUEUES: 32} | ({_IN_ORDER: 1} if one_part else {})
    if device != "cpu":
        for name, number in wanted.items():
            os.environ.setdefault(name, str(number))
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
    for name, number in wanted.items():
        given = os.environ[name]
        if not given.isdecimal() or int(given) < number:
            warnings.warn(f"{name} is {given!r}, so streams may wait for each other: set {number}", stacklevel=2)
    if not one_part and os.environ.get(_IN_ORDER, "0") != "0":
        warnings.warn(f"{_IN_ORDER} is {os.environ[_IN_ORDER]!r}, and prefill_ranks may hang: unset it", stacklevel=2)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
