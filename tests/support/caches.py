"""Caches with scattered pages, what turns and transforms their rows, and memory: of a call, a GPU, this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config

KINDS = ["full", "shared", "full"]  # the second layer has no indexer
LAYERS = len(KINDS) + 2  # and two MTP modules


def cache_config(rank: int = 128, rope: int = 16, index: int = 16) -> ModelConfig:
    """A model with caches for KINDS and two MTP modules."""
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "index_head_dim": index, "num_nextn_predict_layers": 2}
    layers = {"num_hidden_layers": len(KINDS), "indexer_types": KINDS}
    return ModelConfig.from_dict(released_config("deepseek_v32") | sizes | layers).with_mtp(2)


def scatter(
    sequences: list[torch.Tensor], page_size: int, spare: int = 3, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores the rows of sequences ``[tokens, width]`` in a pool, in pages of random order.

    Returns:
        the pool ``[pages, page_size, width]``, NaN in rows without a token, so that a read of them is noticed; block
        tables ``[sequences, max_pages]`` int32, page 0 after the last page of a sequence.
    """
    counts = [-(-len(rows) // page_size) for rows in sequences]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((len(order), page_size, sequences[0].shape[-1]), float("nan"), dtype=sequences[0].dtype)
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    for number, rows in enumerate(sequences):
        for i in range(counts[number]):
            page, part = order.pop(), rows[i * page_size : (i + 1) * page_size]
            pool[page, : len(part)] = part
            tables[number, i] = page
    return pool, tables


def hadamard_matrix(size: int) -> torch.Tensor:
    """float64, built by doubling."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def turned(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x [T, …, 2n]`` in float64, whose pairs are complex numbers, each turned by its ``angle [T, n]``."""
    x, half = x.cpu().double(), angle.shape[1]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turn = torch.polar(torch.ones_like(angle), angle).view(len(x), *(1,) * (x.dim() - 2), half)
    result = torch.complex(a, b) * turn
    parts = (result.real, result.imag)
    return torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)


def need_memory(device: str, nbytes: float) -> None:
    """Skips the test on a GPU with less free memory; a CPU's memory that is not touched takes none."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < nbytes:
        pytest.skip(f"needs {nbytes / 2**30:.1f} GiB of free GPU memory")


def measure_peak(run: Callable[[], Any]) -> int:
    """Peak bytes of PyTorch's CPU allocator during ``run()``, above those allocated before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0, "the profiler saw no allocation"
    return peak
