"""Decode on a CPU as recordings: same tokens as run eagerly, and what cannot be recorded runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.kernels.runtime.recording import Recording

pytestmark = pytest.mark.skipif(INTERPRETED or cpu.library() is None, reason="recordings are of the CPU's kernels")

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "page_size": 16, "progress": False}
# They end one after the other, so that a step has each number of requests; two begin to select while they decode.
LENGTHS = ((3, 30), (58, 24), (120, 18), (60, 12), (70, 6))
FORMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "seed": 5, "top_p": 0.95, "top_k": 50},
    "penalised": {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.2},
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    replays: list[Recording] = []
    replay = Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda self: (replays.append(self), replay(self))[1])
    return replays


def tokens(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    each = [SamplingParams(max_tokens=n, ignore_eos=True, **params) for _, n in LENGTHS]
    return [out.token_ids for out in llm.generate(prompts, each)]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_tokens_as_eagerly(
    dtype: str,
    drafts: int,
    oracle: Callable[..., Any],
    drafting_oracle: Callable[..., Any],
    random_ids: Callable[..., list[int]],
    replays: list[Recording],
) -> None:
    folder = (drafting_oracle("deepseek_v32", modules=1) if drafts else oracle("deepseek_v32")).folder
    options = OPTIONS | {"dtype": dtype}
    if drafts:
        options |= {"speculative_config": {"num_speculative_tokens": drafts}}
    eager, recorded = LLM(folder, enforce_eager=True, **options), LLM(folder, **options)
    recorded.engine.set_num_drafts(drafts)
    prompts = [random_ids(n, seed=n) for n, _ in LENGTHS]
    for form in FORMS.values():
        before = len(replays)
        wanted = tokens(eager, prompts, **form)
        assert len(replays) == before, "run eagerly"
        assert tokens(recorded, prompts, **form) == wanted
        assert len(replays) - before > (5 if drafts else 20)
    graphs = recorded.engine.graphs
    assert eager.engine.graphs is None and graphs is not None
    assert {rows for rows, _ in graphs.captured} == {n * (1 + drafts) for n in range(1, 1 + len(LENGTHS))}
    assert 0 < graphs.memory_bytes < 64 << 20


@pytest.mark.parametrize("case", ["fp8 caches", "no indexer"])
def test_what_runs_eagerly(case: str, oracle: Callable[..., Any]) -> None:
    """References that read numbers, and rows that see few tokens but would select."""
    model_type = "deepseek_v3" if case == "no indexer" else "deepseek_v32"
    model = oracle(model_type, num_hidden_layers=1, kv_lora_rank=128, index_head_dim=64)
    cache = {"kv_cache_dtype": "fp8"} if case == "fp8 caches" else {}
    with LLM(model.folder, **OPTIONS, **cache) as llm:
        assert llm.engine.graphs is None


def test_steps_that_cannot_be_repeated_are_no_longer_padded(
    oracle: Callable[..., Any], random_ids: Callable[..., list[int]], replays: list[Recording]
) -> None:
    """In steps of 9 rows each expert gets more than 8, which take PyTorch's products, whose sizes the host reads."""
    model = oracle(
        "deepseek_v32", num_hidden_layers=2, n_routed_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1
    )
    options = OPTIONS | {"dtype": "float32"}
    prompts = [random_ids(60 + n, seed=n) for n in range(10)]
    params = [SamplingParams(temperature=0.0, max_tokens=8 if n < 2 else 16, ignore_eos=True) for n in range(10)]
    with LLM(model.folder, **options) as recorded, LLM(model.folder, enforce_eager=True, **options) as eager:
        both = [[out.token_ids for out in llm.generate(prompts, params)] for llm in (recorded, eager)]
        assert both[0] == both[1]
        graphs = recorded.engine.graphs
        assert graphs is not None and graphs.contexts.exact_rows == 9 and graphs.captured == [(8, 256)] and replays
