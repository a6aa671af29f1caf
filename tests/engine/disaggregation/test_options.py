"""Options that are refused with prefill_ranks, in words that name them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_engine import ParallelConfig
from dsa_engine.engine.disaggregation.side import _refuse
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh


@pytest.mark.parametrize(
    "name, value", [("cache_folder", "/tmp/x"), ("host_cache_memory", "1GiB"), ("enable_dbo", True)]
)
def test_engine_options(name: str, value: Any) -> None:
    options = EngineOptions("demo", parallel=ParallelConfig(prefill_ranks=1), **{name: value})
    with pytest.raises(ValueError, match=f"{name}=.* is not possible with prefill_ranks 1"):
        _refuse(options, modules=1)


def test_modules_and_rebalancing() -> None:
    options = EngineOptions("demo", parallel=ParallelConfig(prefill_ranks=1))
    _refuse(options, modules=1)
    with pytest.raises(ValueError, match="one MTP module, not with 2"):
        _refuse(options, modules=2)


def test_runs() -> None:
    with pytest.raises(ValueError, match="leaves no rank to decode: the run has 1"):
        ParallelConfig(prefill_ranks=1).create_mesh("cpu")
    with pytest.raises(ValueError, match="leave out prefill_ranks"):
        EmulatedConfig(emulate_world=2, prefill_ranks=1)
    assert not Mesh(ParallelConfig(), 0, 1, torch.device("cpu")).has_counterpart
