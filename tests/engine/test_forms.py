"""Which form of attention computed a request, in its metrics; and the warning of a model that selects nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.demo import demo_config
from dsa_engine.kernels.runtime import cpu
from dsa_engine.outputs import RequestMetrics

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"hf_overrides": {"index_topk": 100}, "page_size": 4}  # MHA from 64 queries on


def forms(metrics: RequestMetrics) -> tuple[int, int, int]:
    return metrics.num_mha_tokens, metrics.num_dense_tokens, metrics.num_sparse_tokens


def test_tokens_of_each_form(tiny_llm: Callable[..., LLM], random_ids: Callable[..., list[int]]) -> None:
    with tiny_llm(400, max_num_batched_tokens=80, enforce_eager=True, **OPTIONS) as llm:  # else all decode as sparse
        prompts = [random_ids(120), random_ids(30, seed=1), random_ids(98, seed=2)]
        of_each = [forms(llm.generate(prompt, GREEDY)[0].metrics) for prompt in prompts]  # together they share steps
        # chunks of 80 tokens: 80 in MHA form; 20 alone are too few for it; 4 tokens are decoded
        assert of_each[0] == (80, 20, 24) and of_each[1] == (0, 34, 0)
        assert sum(of_each[2]) == 102 and of_each[2][2] == 2, "tokens 100 and 101 see more than index_topk"
        (again,) = llm.generate(prompts[0], GREEDY)
        assert again.num_cached_tokens == 116 and forms(again.metrics) == (0, 0, 8)
        *_, last = llm.stream(prompts[1], GREEDY)
        assert last.metrics is not None and sum(forms(last.metrics)) == 34 - last.metrics.num_cached_tokens


@pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler, or DSA_ENGINE_NATIVE=0")
def test_one_form_with_batch_invariant(tiny_llm: Callable[..., LLM], random_ids: Callable[..., list[int]]) -> None:
    """Each row selects, also where it sees fewer than index_topk tokens."""
    with tiny_llm(400, max_num_batched_tokens=80, batch_invariant=True, **OPTIONS) as llm:
        outputs = llm.generate([random_ids(120), random_ids(30, seed=1)], GREEDY)
        assert [forms(output.metrics) for output in outputs] == [(0, 0, 124), (0, 0, 34)]


def test_drafts_count(tiny_llm: Callable[..., LLM], random_ids: Callable[..., list[int]]) -> None:
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    with tiny_llm(400, speculative_config=speculation, page_size=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        metrics = llm.generate(random_ids(30), params)[0].metrics
        assert metrics.speculation is not None
        rejected = metrics.speculation.num_draft_tokens - metrics.speculation.num_accepted_tokens
        assert sum(forms(metrics)) == 30 + 11 + rejected and metrics.num_sparse_tokens == 25 + rejected


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {"max_model_len": 256}, "no request of at most 256 tokens sees more than index_topk 256"),
        ({"model_type": "deepseek_v3"}, {}, "model.layers.0.self_attn.indexer"),
        ({}, {}, None),
    ],
)
def test_a_model_that_selects_nothing(
    changes: dict[str, Any],
    options: dict[str, Any],
    expected: str | None,
    demo_cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from dsa_engine.demo import demo_folder

    for path in demo_folder().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(demo_config() | changes))
    with caplog.at_level(logging.WARNING, "dsa_engine"):
        LLM(tmp_path, cache_memory="8MiB", progress=False, **{"max_model_len": 1024} | options).close()
    lines = [record.getMessage() for record in caplog.records if "attention is dense" in record.getMessage()]
    assert len(lines) == (expected is not None) and all(expected in line for line in lines if expected), lines
