"""Available memory, and how much of it the caches get."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.errors import CapacityError
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.launch_environment import local_world_size
from dsa_engine.system.sizes import format_bytes, parse_bytes

_CPU_DEFAULT_CACHE = 4 << 30  # limit of the caches on a CPU, whose memory other programs use too


def default_cache_memory(device: torch.device, utilization: float, for_steps: int) -> int:
    """Bytes for the caches, from the memory that is free after the weights are loaded and the largest steps have run.

    Args:
        utilization: fraction of a GPU's memory that may be used in total, other programs included.
        for_steps: bytes that steps and graphs take on a GPU (``warm_up.py``).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has reserved and not allocated counts as free: for_steps contains it, or caches get it.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, int(free - (1 - utilization) * total - for_steps))
    return min(_CPU_DEFAULT_CACHE, available_bytes() // 2 // local_world_size())


def affordable_pages(options: EngineOptions, mesh: Mesh, max_model_len: int, token_bytes: int, for_steps: int) -> int:
    """Number of pages of the cache: the minimum over the ranks of what fits, but no more than can be used.

    Args:
        token_bytes: bytes of one token in the caches of all layers.

    Raises:
        CapacityError: not even one page fits.
    """
    page_size = options.page_size
    one = page_size * token_bytes
    if options.cache_memory is None:
        memory = default_cache_memory(mesh.device, options.gpu_memory_utilization, for_steps)
    else:
        memory = parse_bytes(options.cache_memory, "cache_memory")
    useful = options.max_num_seqs * pages_for(max_model_len, page_size)
    pages = min(mesh.all_gather_int(min(memory // one, useful)))
    if pages == 0:
        replicas = options.parallel.redundant_experts
        raise CapacityError(
            f"the cache is too small: a page of {page_size} tokens takes {format_bytes(one)}, "
            f"{format_bytes(memory)} are there for it beside {format_bytes(for_steps)} for steps; raise cache_memory, "
            "or use a smaller page_size, a smaller max_num_batched_tokens"
            + (f", or fewer redundant_experts than {replicas}" if replicas else "")
        )
    return pages


@contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """Runs a block that only allocates, and names ``what`` did not fit.

    Raises:
        CapacityError: replaces PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        reason = str(error).splitlines()[0]
        raise CapacityError(f"{what} could not be allocated ({reason}); {advice}") from error


def available_bytes() -> int:
    """Host memory available to new allocations."""
    info = Path("/proc/meminfo")
    if info.exists():
        return int(re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())[1]) * 1024  # type: ignore[index]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
