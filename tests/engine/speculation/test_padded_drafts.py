"""Speculative decoding in padded steps of static shape, as CUDA graphs replay them: accepted counts stay on the device.

On a GPU the graphs are captured. Under ``TRITON_INTERPRET=1`` the same padded steps run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.samples import Ended, RequestTokens
from dsa_engine.engine.speculation.acceptance import count_equal
from dsa_engine.engine.speculation.drafter import GraphKey
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.kernels.runtime.launch import INTERPRETED

CUDA = torch.cuda.is_available() and not INTERPRETED
DRAFTS, COUNT = 2, 7


@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs kernels: a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "model_type, modules",
    [("deepseek_v32", 1)]
    # Minutes in the interpreter; test_speculative_step.py runs the same steps on references.
    + [
        pytest.param(*rest, marks=pytest.mark.slow)
        for rest in (("deepseek_v32", 2), ("deepseek_v3", 1), ("deepseek_v3", 2))
    ],
)
def test_padded_steps_with_drafts(
    model_type: str, modules: int, drafting_oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """Three requests in a bucket of four: one selects, one begins to select while it decodes, one sees few tokens. New
    drafts are those of the equations; some of the verified drafts are right."""
    oracle = drafting_oracle(
        model_type, layers=1, modules=modules, **({"index_topk": 16} if model_type == "deepseek_v32" else {})
    )
    prompts = [random_ids(19), random_ids(14, seed=1), random_ids(3, seed=2)]
    llm = LLM(
        oracle.folder,
        kernels="triton",  # comparing them with their references takes long in the interpreter
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        max_model_len=64,
        page_size=16,
        cache_memory="2MiB",
        enforce_eager=True,
        progress=False,
        speculative_config={"num_speculative_tokens": DRAFTS},
    )
    engine = llm.engine
    ran: list[GraphKey] = []
    expected = {tuple(prompt): greedy(oracle, prompt) for prompt in prompts}

    class Counted(DecodeGraphs):
        def run(self, name: Hashable, function: Callable[[], torch.Tensor]) -> torch.Tensor:
            ran.append(name)  # type: ignore[arg-type]
            return super().run(name, function)

    engine.runner.graphs = Counted(engine.model, engine.cache, capture=CUDA, contexts=ContextBuckets(fewest=32))
    take, accepted = engine._take, list[int]()

    def taken(sampled: RequestTokens) -> Ended | None:
        result, request = take(sampled), sampled.request
        if request.finish_reason is None and sampled.draft_result is not None:
            accepted.append(sampled.draft_result.accepted)
            wanted = oracle.drafts([*request.prompt, *request.output], DRAFTS).argmax(dim=-1).tolist()
            done = len(request) - len(request.prompt)
            assert request.drafts == wanted[: COUNT - done - 1]
            right = expected[tuple(request.prompt)][done : done + len(request.drafts)]
            num_right = (done + len(request.prompt)) % (DRAFTS + 1)
            request.drafts = [token if i < num_right else (token + 1) % 200 for i, token in enumerate(right)]
        return result

    engine._take = taken  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    assert [o.token_ids for o in llm.generate(prompts, params)] == list(expected.values())
    assert set(accepted) == set(range(DRAFTS + 1))
    assert len(ran) >= 3 and {key[1:] for key in ran} == {(0, 0, count_equal)}, "a step is one graph"
    assert ran[0].bucket.requests == 4 and {key.bucket.rows_per_request for key in ran} == {1 + DRAFTS}


@torch.no_grad()
def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(oracle.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
