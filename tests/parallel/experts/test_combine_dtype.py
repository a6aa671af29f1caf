"""``moe_combine_dtype``: what it refuses, and the bytes of an engine's sums, on one emulated rank of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives import record
from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.parallel.experts.traffic import quantized_bytes


def test_sums_that_are_added_on_their_way_are_refused() -> None:
    for prefill, decode in (("all_gather", "all_gather"), ("deep_ep", "all_gather"), ("deep_ep", "deep_ep")):
        error = f"moe_combine_dtype 'fp8': moe_dispatch '{prefill}' and decode_dispatch '{decode}' add sums"
        with pytest.raises(ValueError, match=error):
            ParallelConfig(moe_combine_dtype="fp8", moe_dispatch=prefill, decode_dispatch=decode)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="moe_combine_dtype must be one of auto, fp8, not 'e4m3'"):
        ParallelConfig(moe_combine_dtype="e4m3")  # type: ignore[arg-type]
    assert ParallelConfig(moe_combine_dtype="fp8").decode_dispatch == "all_gather"


def test_rows_that_are_no_words_are_refused(tiny_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="'fp8' needs a hidden_size that is a multiple of 4; this model has 66"):
        tiny_llm(64, parallel=ParallelConfig(moe_combine_dtype="fp8"), hf_overrides={"hidden_size": 66})


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_bytes_of_an_engine(dtype: Any, tiny_llm: Callable[..., LLM]) -> None:
    """In prefill sums of float32 or codes come back; in decode a reduce-scatter adds float32."""
    llm = tiny_llm(128, parallel=EmulatedConfig(emulate_world=2, moe_combine_dtype=dtype), max_num_batched_tokens=64)
    group, hidden = llm.engine.mesh.ep, llm.engine.config.hidden_size
    log = record(group)
    llm.generate([list(range(5, 45))], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    back = [one for one in log if one.kind == "all_to_all" and one.asynchronous][1::2]
    row = quantized_bytes(hidden) if dtype == "fp8" else 4 * hidden
    assert back and all(sum(one.sent) and sum(one.sent) % row == sum(one.received) % row == 0 for one in back)
    rows = [sum(one.received) // row for one in back]
    assert all(10 <= count <= 20 for count in rows), "of 20 tokens those that choose the other rank's experts"
    added = {one.sent for one in log if one.kind == "reduce_scatter"}
    assert added == {(0, 4 * hidden)}
