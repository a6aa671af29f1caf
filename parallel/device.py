"""The device of a process."""

from __future__ import annotations

import os

import torch

from dsa_engine.parallel.launch_environment import local_world_size


def choose_device(device: str) -> torch.device:
    """Makes the device of this process the current one, and returns it.

    Raises:
        ValueError: there is no such device, or not for this rank.
    """
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
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
