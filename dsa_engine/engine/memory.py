"""How much memory there is, and how much of it the caches get."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dsa_engine.engine.pages import pages_for
from dsa_engine.errors import CapacityError
from dsa_engine.model.config import ModelConfig
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.launch_environment import local_world_size
from dsa_engine.sizes import format_bytes, parse_bytes

# A CPU has no memory of its own to fill: caches take at most this much unless asked for more.
_CPU_DEFAULT_CACHE = 4 << 30


def default_workspace(device: torch.device) -> int:
    """Bytes for score tiles and the like."""
    return (1 << 30) if device.type == "cuda" else (256 << 20)


def default_cache_memory(
    config: ModelConfig,
    tokens: int,
    gathered: int,
    dtype: torch.dtype,
    device: torch.device,
    workspace: int,
    utilization: float,
) -> int:
    """Bytes for the caches from what is free now, the weights being loaded.

    Args:
        config: the model.
        tokens: most tokens of a forward pass on this rank.
        gathered: most tokens that meet on this rank for its experts.
        dtype: of activations and caches.
        device: of this rank.
        workspace: bytes set apart for score tiles.
        utilization: fraction of a GPU's memory that may be in use by everything together, other programs included.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held_back = (1 - utilization) * total
        return max(0, int(free - held_back - workspace - activation_bytes(config, tokens, gathered, dtype)))
    return min(_CPU_DEFAULT_CACHE, available_bytes() // 2 // local_world_size())


def activation_bytes(config: ModelConfig, tokens: int, gathered: int, dtype: torch.dtype) -> int:
    """About the largest set of activations that a forward pass over ``tokens`` tokens holds at once.

    ``gathered`` tokens meet for this rank's experts: their rows arrive, and their sums are float32. What the experts
    make of them is counted for ``tokens``: so many fall to a rank when routing is balanced.
    """
    attention = config.num_attention_heads * (config.qk_head_dim + 2 * config.latent_dim + 2 * config.kv_lora_rank)
    experts = config.num_experts_per_tok * (3 * config.moe_intermediate_size + 3 * config.hidden_size)
    meeting = gathered * config.hidden_size * (2 * dtype.itemsize + 4)
    return tokens * dtype.itemsize * (8 * config.hidden_size + max(attention, experts)) + meeting


def affordable_pages(
    config: ModelConfig,
    options: EngineOptions,
    mesh: Mesh,
    max_model_len: int,
    token_bytes: int,
    dtype: torch.dtype,
    workspace: int,
) -> int:
    """Pages of the cache: what fits on every rank (the minimum over the ranks), and no more than can be used.

    Args:
        config, options, mesh: of the engine.
        max_model_len: most tokens of a request.
        token_bytes: of one token in the caches of all layers.
        dtype: of activations.
        workspace: bytes set apart for score tiles.

    Raises:
        CapacityError: not even one.
    """
    page_size = options.page_size
    one = page_size * token_bytes
    if options.cache_memory is None:
        tokens, device = options.max_num_batched_tokens, mesh.device
        # all_gather brings every rank's tokens; all_to_all as many as this rank has, twice that where it is skewed.
        ranks = mesh.world_size
        meeting = tokens * (ranks if options.parallel.moe_dispatch == "all_gather" else min(ranks, 2))
        utilization = options.gpu_memory_utilization
        memory = default_cache_memory(config, tokens, meeting, dtype, device, workspace, utilization)
    else:
        memory = parse_bytes(options.cache_memory, "cache_memory")
    useful = options.max_num_seqs * pages_for(max_model_len, page_size)
    pages = min(mesh.exchange(min(memory // one, useful)))
    if pages == 0:
        raise CapacityError(
            f"the cache is too small: a page of {page_size} tokens takes {format_bytes(one)}, "
            f"{format_bytes(memory)} are there for it; raise cache_memory or use a smaller page_size"
        )
    return pages


@contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """Says which allocation did not fit; the block does nothing but allocate.

    Raises:
        CapacityError: in place of PyTorch's error.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        reason = str(error).splitlines()[0]
        raise CapacityError(f"{what} could not be allocated ({reason}); {advice}") from error


def available_bytes() -> int:
    """Host memory that new allocations can have."""
    info = Path("/proc/meminfo")
    if info.exists():
        return int(re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())[1]) * 1024  # type: ignore[index]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
