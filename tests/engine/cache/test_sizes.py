"""Memory for the caches, and errors when something does not fit."""

from __future__ import annotations

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.engine.cache import sizes
from dsa_engine.engine.cache.sizes import default_cache_memory
from dsa_engine.errors import CapacityError, enough_memory
from dsa_engine.measure.device import peak_bytes
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.system.sizes import available_bytes


def test_caches_take_half_of_what_is_free_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(sizes, "available_bytes", lambda: 6 << 30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_cache_memory(cpu, 0.9, 0) == 3 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert default_cache_memory(cpu, 0.9, 0) == 1 << 30
    monkeypatch.setattr(sizes, "available_bytes", lambda: 600 << 30)
    assert default_cache_memory(cpu, 0.9, 0) == 4 << 30


def test_caches_of_a_gpu_take_what_the_utilization_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 of 100 GiB are free, and 3 more are reserved by PyTorch and unused; weights and others take 37."""
    cuda, gib = torch.device("cuda"), 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 27 * gib)
    for utilization in (0.5, 0.92, 1.0):
        got = default_cache_memory(cuda, utilization, 5 * gib)
        assert got == pytest.approx(utilization * 100 * gib - 37 * gib - 5 * gib, abs=2)
    assert default_cache_memory(cuda, 0.3, 5 * gib) == 0


def test_host_memory() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
    held = peak_bytes(torch.device("cpu"))
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    assert (64 << 20) * 0.5 < peak_bytes(torch.device("cpu")) < 1 << 50 and held > 0


def test_what_does_not_fit_is_named() -> None:
    with (
        pytest.raises(CapacityError, match=r"^the caches could not be allocated \(.*\); lower cache_memory$"),
        enough_memory("the caches", "lower cache_memory"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_weights_with_replicas_that_cannot_be_allocated() -> None:
    """Experts of 2⁵⁰ bytes, more than a process can address."""
    parallel = EmulatedConfig(emulate_world=2, redundant_experts=4)
    wide = {"moe_intermediate_size": 2**24, "hidden_size": 2**20}
    with pytest.raises(CapacityError, match="weights of this rank .*; lower redundant_experts 4, or use more ranks"):
        LLM("demo-random", load_format="dummy", hf_overrides=wide, device="cpu", parallel=parallel)
