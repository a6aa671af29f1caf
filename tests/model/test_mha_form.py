"""The MHA form over a paged cache: within its workspace, however many rows it expands, and the same in any."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.kernels.rows.segment import Segment
from dsa_engine.kernels.runtime import cpu
from dsa_engine.model.forward_batch import MHASegments

CPU = torch.device("cpu")


@pytest.mark.parametrize("caches", ["auto", "fp8"])
def test_memory_stays_within_the_workspace(
    caches: str, oracle: Callable[..., Any], peak_memory: Callable[..., int]
) -> None:
    """Twenty requests that see 400 tokens each: their gathered rows alone are four times the workspace."""
    folder = oracle("deepseek_v3", kv_lora_rank=128).folder
    requests, sees, rows, page_size = 20, 400, 4, 16
    results, peaks = [], []
    for workspace in (1 << 20, 1 << 28):
        options: dict[str, Any] = {"device": "cpu", "progress": False, "max_num_seqs": 1000, "page_size": page_size}
        llm = LLM(folder, kv_cache_dtype=caches, cache_memory="32MiB", workspace=workspace, **options)
        engine = llm.engine
        pages = -(-sees // page_size)
        engine.cache.fill_random(list(range(requests * pages)), seed=1)
        tables = torch.arange(requests * pages, dtype=torch.int32).view(requests, pages)
        segments = [Segment(i * rows, rows, i, sees - rows) for i in range(requests)]
        batch: Any = SimpleNamespace(mha=MHASegments.of(segments, tables, page_size), mha_rows=requests * rows)
        attention = engine.model.layers[0].attention
        g = torch.Generator().manual_seed(0)
        q = torch.randn(requests * rows, engine.config.num_attention_heads, engine.config.qk_head_dim, generator=g)
        out = torch.empty(*q.shape[:2], engine.config.v_head_dim)
        with torch.inference_mode():
            peaks.append(peak_memory(partial(attention._mha, q, batch, engine.cache, out)))
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    print(f"{peaks[0]:,} and {peaks[1]:,} bytes")
    assert peaks[0] < (1 << 20) + results[0].nbytes + (1 << 18)
    assert peaks[1] > 4 << 20, "without a bound it would take more"


@pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler, or DSA_ENGINE_NATIVE=0")
def test_batch_invariant_products_copy_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernel reads W_UK and W_UV of absorbed products where they lie, which takes no further memory."""

    def attention() -> Any:
        with LLM("demo-random", dtype="float32", batch_invariant=True, kernels="triton", progress=False) as llm:
            return llm.engine.model.layers[1].attention

    before = attention()
    monkeypatch.setattr("dsa_engine.kernels.linear.per_head_matmul.runs_triton", lambda x: True)
    after = attention()
    read = [product.transpose(1, 2) for product in (after.w_uk, after.w_uv.transpose(1, 2))]  # as in `_by_head`
    assert all(weight.is_contiguous() for weight in read) and not before.w_uv.is_contiguous()
    assert torch.equal(after.w_uk, before.w_uk) and torch.equal(after.w_uv, before.w_uv)
    (storage,) = {weight.untyped_storage().data_ptr() for weight in read}
    assert storage in {parameter.data_ptr() for parameter in after.parameters()}
