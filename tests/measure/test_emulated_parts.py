"""Emulated ranks of a run that prefills and decodes apart: each in its own part, and the pages between them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.measure.emulation.arguments import check_part
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.handover import EmulatedSending, modelled_handover, part_of
from dsa_engine.parallel.links import Links

PREFILL, DECODE = 3, 2
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "cache_memory": "8MiB",
    "max_model_len": 256,
    "page_size": 8,
    "enable_prefix_caching": False,
    "progress": False,
}


def emulated(rank: int, **options: Any) -> LLM:
    parallel = EmulatedConfig(emulate_world=PREFILL + DECODE, emulate_rank=rank, prefill_ranks=PREFILL)
    return LLM("demo-random", parallel=parallel, **OPTIONS | options)


@pytest.mark.parametrize("tokens", [5, 90, 201], ids=["one page", "one step", "several steps"])
def test_ranks_that_prefill(tokens: int) -> None:
    """Together they send each page of the prompt once, as a true run does."""
    sent = 0
    for rank in range(PREFILL):
        with emulated(rank, max_num_batched_tokens=32) as llm:
            assert part_of(llm.engine) == "prefill" and llm.engine.mesh.world_size == llm.engine.mesh.cp_size == PREFILL
            pages = EmulatedSending(llm.engine)
            result = measure_prefill(llm.engine, [5] * tokens, warmup=1, repeat=1)
            assert result.handover is not None and pages.bytes_sent == 3 * result.handover_bytes_sent
            sent += result.handover_bytes_sent
    assert sent == result.handover.nbytes == -(-tokens // 8) * llm.engine.cache.page_bytes
    assert 0 < result.handover.exposed <= result.handover.seconds
    assert result.to_json()["handover"]["bytes_sent"] == result.handover_bytes_sent


def test_ranks_that_decode() -> None:
    with emulated(PREFILL + 1, decode_options={"tp_size": 2, "cache_memory": "4MiB"}) as llm:
        engine = llm.engine
        assert part_of(engine) == "decode" and engine.mesh.rank == 1 and engine.mesh.world_size == DECODE
        assert (engine.mesh.cp_size, engine.mesh.tp.size) == (1, 2)
        assert engine.cache.pages * engine.cache.page_bytes <= 4 << 20
        way = modelled_handover(engine, 90, 0.0, Links())
        assert way.pages == 12 and way.nbytes == 12 * engine.cache.page_bytes
    with LLM("demo-random", parallel=EmulatedConfig(emulate_world=2), **OPTIONS) as llm:
        assert part_of(llm.engine) is None


def test_ranks_of_the_other_part() -> None:
    args = argparse.Namespace(emulate_world=5, emulate_rank=3, prefill_ranks=3)
    check_part(args, "decode", "something measures it")
    with pytest.raises(ValueError, match="rank 3 of --emulate-world 5 is one of those that decode.*something measures"):
        check_part(args, "prefill", "something measures it")
    with pytest.raises(ValueError, match="leaves no rank to decode: the run has 2"):
        EmulatedConfig(emulate_world=2, prefill_ranks=2).create_mesh("cpu")
