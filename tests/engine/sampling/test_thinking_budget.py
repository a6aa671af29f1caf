"""``thinking_token_budget``: a thought ends at its position exactly, wherever it began and however its steps run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import NEVER, Request
from dsa_engine.engine.sampling.thinking import put_ends, thoughts_of
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.kernels.runtime import cpu
from oracles import SMALL

BEGIN, END = 8, 9
TOKENIZER: Any = SimpleNamespace(tags={"<think>": BEGIN, "</think>": END})
OPTIONS = SMALL | {"max_model_len": 128, "cache_memory": "4MiB"}
DRAWN = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)


def must_end(tokens: list[int], budget: int) -> bool:
    """Whether the token after these ends a thought, which is open and has as many tokens as it may have."""
    marks = [i for i, token in enumerate(tokens) if token in (BEGIN, END)]
    return bool(marks) and tokens[marks[-1]] == BEGIN and len(tokens) - 1 - marks[-1] >= budget


@given(st.lists(st.tuples(st.lists(st.sampled_from([5, 6, BEGIN, END]), min_size=1, max_size=9), st.integers(0, 4))))
def test_what_the_host_knows_and_what_follows(cases: list[tuple[list[int], int]]) -> None:
    for known in range(1, 10):
        rows, following, expected = [], [], []
        for tokens, budget in cases:
            params = SamplingParams(thinking_token_budget=budget)
            request = Request(0, tokens[:known], params, think_tokens=(BEGIN, END))
            rows.append(request)
            # Those after its row are of later rows.
            following.append([*tokens[known:], BEGIN, END, *[-1] * 9][:9])
            expected.append(END if must_end(tokens, budget) else 3)
        of_each = torch.tensor([len(tokens) for tokens, _ in cases], dtype=torch.int64)
        at = torch.tensor([len(row.prompt) for row in rows], dtype=torch.int64)[:, None] + torch.arange(9)
        after = torch.tensor(following, dtype=torch.int64).view(-1, 9)
        chosen = put_ends(torch.full_like(of_each, 3), of_each, thoughts_of(rows), after, at)
        assert chosen.tolist() == expected
    assert thoughts_of([Request(0, [BEGIN], SamplingParams())]).T.tolist() == [[NEVER, 0, -2, -2]]


@pytest.mark.parametrize("modules", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_thought_ends_where_it_must(
    modules: int, drafting_oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """With few tokens to choose from, thoughts begin and end in prompts, in accepted drafts, in the step in flight."""
    folder = drafting_oracle("deepseek_v32", index_topk=16, vocab_size=12, modules=modules).folder
    prompts = [random_ids(n, 8, seed=n) for n in (3, 14, 17, 40, 22)]
    prompts[0].append(BEGIN)
    prompts[2] = [BEGIN, *prompts[2]]  # the budget is spent
    budgets = [3, 0, 2, None, 1]
    params = [replace(DRAWN, seed=i, thinking_token_budget=budget) for i, budget in enumerate(budgets)]
    params[4] = replace(params[4], logprobs=1, temperature=0.0)  # for the host
    outputs: dict[str, list[list[int]]] = {}
    for how in ("plain", "ahead", "drafts", "padded", "padded ahead", *["recorded"] * (cpu.library() is not None)):
        drafts = {"speculative_config": {"num_speculative_tokens": 3}} if how not in ("plain", "ahead") else {}
        llm = LLM(folder, **OPTIONS, **drafts, enforce_eager=how != "recorded")
        engine = llm.engine
        engine.async_scheduling = how.endswith("ahead")
        if how.startswith("padded"):
            contexts = ContextBuckets(fewest=32)
            engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False, contexts=contexts)
        requests = [engine.add(*one, TOKENIZER) for one in zip(prompts[:4], params[:4], strict=True)]
        while not all(request.finish_reason for request in requests):
            engine.step()
        requests.append(engine.add(prompts[4], params[4], TOKENIZER))
        while not requests[-1].finish_reason:
            engine.step()
        outputs[how] = [request.output for request in requests]
    plain = outputs.pop("plain")
    assert all(other == plain for other in outputs.values())
    forced = 0
    for prompt, output, budget in zip(prompts, plain, budgets, strict=True):
        for count, token in enumerate(output):
            if budget is not None and must_end([*prompt, *output[:count]], budget):
                forced += 1
                assert token == END
    assert forced > 5 and plain[2][0] == END


def test_what_has_no_thoughts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer with the tokens <think> and </think>"):
        llm.generate("x", SamplingParams(thinking_token_budget=5))
    assert llm.generate("x", SamplingParams(thinking_token_budget=-1))
