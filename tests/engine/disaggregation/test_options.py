"""Options that are refused with prefill_ranks, in words that name them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine import ParallelConfig
from dsa_engine.demo import demo_folder
from dsa_engine.engine.disaggregation.side import Side, own_options
from dsa_engine.engine.startup.start import prepare
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.disaggregation import create_mesh


def test_modules() -> None:
    options = EngineOptions("demo", parallel=ParallelConfig(prefill_ranks=1))
    mesh: Any = SimpleNamespace(has_counterpart=True)
    with pytest.raises(ValueError, match="prefill_ranks 1 .* not with 2"):
        Side.of(options, mesh, modules=2)


def test_options_of_the_ranks_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace those of both parts on the ranks that decode; the tiers are those of the ranks that prefill."""
    given: dict[str, Any] = {"tp_size": 2, "cache_memory": "3MiB", "enable_dbo": True, "decode_dispatch": "all_to_all"}
    parallel = ParallelConfig(prefill_ranks=3, cp_size=3, record_expert_loads="loads.json")
    options = EngineOptions("demo", cache_memory="8MiB", max_num_seqs=5, parallel=parallel, decode_options=given)
    monkeypatch.setenv("WORLD_SIZE", "5")
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        own = own_options(options)
        decodes = rank > 2
        assert (own.cache_memory, own.enable_dbo) == (("3MiB", True) if decodes else ("8MiB", None))
        assert (own.parallel.tp_size, own.parallel.record_expert_loads) == ((2, None) if decodes else (1, "loads.json"))
        assert own.parallel.decode_dispatch == ("all_to_all" if decodes else "all_gather")
        assert own.max_num_seqs == 5 and own.parallel.prefill_ranks == 3
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="decode_options: tp_size 2 does not divide the 3 rank.* that decode"):
        own_options(options)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="prefill_ranks 3 leaves no rank to decode: the run has 3"):
        own_options(options)


def test_a_part_has_one_mode_of_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two modes cannot share ranks of several nodes, and each takes memory: a part has that of its steps only."""
    parallel = ParallelConfig(prefill_ranks=1, moe_dispatch="deep_ep", decode_dispatch="deep_ep")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, wanted in enumerate((("deep_ep", "all_gather"), ("all_to_all", "deep_ep"))):
        monkeypatch.setenv("RANK", str(rank))
        own = own_options(EngineOptions("demo", parallel=parallel)).parallel
        assert (own.moe_dispatch, own.decode_dispatch) == wanted


@pytest.mark.parametrize(
    "given, error",
    [
        ({"kv_cache_dtype": "fp8"}, "decode_options: 'kv_cache_dtype' cannot differ .* options that can are cache_mem"),
        ({"tp_size": 0}, "decode_options: tp_size"),
        ({"cache_memory": "many"}, "decode_options: cache_memory"),
    ],
)
def test_decode_options_that_are_not_possible(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        EngineOptions("demo", parallel=ParallelConfig(prefill_ranks=1), decode_options=given)
    with pytest.raises(ValueError, match="prefill_ranks|cannot differ"):
        EngineOptions("demo", decode_options=given)


def test_runs() -> None:
    with pytest.raises(ValueError, match="leaves no rank to decode: the run has 1"):
        create_mesh(ParallelConfig(prefill_ranks=1), "cpu")
    assert not Mesh(ParallelConfig(), 0, 1, torch.device("cpu")).has_counterpart


def test_no_launch_order_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links launch in threads of their own, which NCCL refuses with it: nothing sets it before the mesh is made."""
    names = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"
    for name in names:
        monkeypatch.setenv(name, "")  # restores what the test changes
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="prefill_ranks 1 leaves no rank to decode"):
        prepare(demo_folder(), EngineOptions("demo", parallel=ParallelConfig(prefill_ranks=1)))
    assert [name in os.environ for name in names] == [True, False]
