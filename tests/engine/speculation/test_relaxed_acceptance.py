"""Relaxed acceptance: which drafts it accepts, and that nothing changes outside of a model's thinking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime import cpu
from oracles import SMALL as OPTIONS

BEGIN, END = 8, 9
LOGITS = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05, 0, 0, 0, 0, 0]]).log()  # the probabilities of tokens 0, 1, …


def chosen(relaxed: RelaxedAcceptance, prompt: list[int], drafts: list[int], token: int = 0) -> list[int]:
    """Tokens of the rows of a request; all rows have the logits ``LOGITS`` and the choice ``token``."""
    request = Request(0, prompt, SamplingParams(), drafts=drafts)
    wanted = [Wanted(request, len(prompt) + i, i) for i in range(len(drafts) + 1)]
    tokens = torch.full((len(wanted),), token)
    return relaxed(wanted, LOGITS.expand(len(wanted), -1).clone(), tokens).tolist()


@pytest.mark.parametrize(
    "topk, delta, draft, accepted",
    [
        (10, 0.1, 1, True),
        (10, 0.09, 1, False),
        (2, 1.0, 1, True),
        (1, 1.0, 1, False),
        (3, 0.5, 2, True),
        (2, 0.5, 2, False),
        (10, 1.0, 4, True),  # every token is within the ten of this vocabulary
        (10, 1.0, 7, False),  # but a forbidden one is never accepted
        (10, 0.0, 0, True),
        (10, 1.0, END, False),
    ],
)
def test_what_is_accepted_while_it_thinks(topk: int, delta: float, draft: int, accepted: bool) -> None:
    relaxed = RelaxedAcceptance(topk, delta + 1e-6, BEGIN, END)
    assert chosen(relaxed, [5, BEGIN, 6], [draft]) == [draft if accepted else 0, 0]
    assert chosen(relaxed, [5, 6], [draft]) == [0, 0], "it does not think yet"
    assert chosen(relaxed, [5, BEGIN, 6, END, 7], [draft]) == [0, 0], "nor any more"
    assert chosen(relaxed, [5, BEGIN, 6], [draft], token=-1) == [-1, -1], "an error stays"


def test_thinking_ends_among_the_drafts() -> None:
    relaxed = RelaxedAcceptance(10, 1.0, BEGIN, END)
    assert chosen(relaxed, [BEGIN], [1, END, 2]) == [1, 0, 0, 0]
    assert chosen(relaxed, [5], [1, BEGIN, 2]) == [0, 0, 2, 0]


@given(st.data())
def test_a_graph_knows_what_the_host_knows(data: st.DataObject) -> None:
    """The drafts that may replace tokens, from what the host has read and what only the device knows."""
    relaxed, count = RelaxedAcceptance(10, 1.0, BEGIN, END), data.draw(st.integers(1, 5))
    tokens = st.sampled_from([5, BEGIN, END])
    rows = []
    for _ in range(3):
        read, unread = data.draw(st.lists(tokens, min_size=1)), data.draw(st.lists(tokens, max_size=count + 1))
        rows.append((read, unread, data.draw(st.lists(tokens, max_size=count))))
    wanted = [
        [relaxed._draft(Request(0, read + unread, SamplingParams(), drafts=drafts), i) for i in range(count)]
        for read, unread, drafts in rows
    ]
    thinks = torch.tensor([relaxed.thinks(Request(0, read, SamplingParams())) for read, *_ in rows]).long()
    unread, drafts = (
        torch.tensor([row[part] + [-1] * (width - len(row[part])) for row in rows])
        for part, width in ((1, count + 1), (2, count))
    )
    assert relaxed.replacing(thinks, unread, drafts).tolist() == wanted


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PENALISED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3)


def thoughts(tokens: Sequence[int]) -> list[bool]:
    """Whether the model thinks after each token."""
    return [*accumulate(tokens, lambda thinks, t: t == BEGIN or (thinks and t != END), initial=False)][1:]


@pytest.mark.parametrize("modules", [1, 3])
def test_graphs_and_launching_ahead(
    modules: int, drafting_oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """Steps of static shape, launched before the step before is read, give the tokens of eager steps. With few tokens
    to choose from, thinking begins and ends anywhere: in prompts, in accepted drafts, in the step in flight."""
    folder = drafting_oracle("deepseek_v32", index_topk=16, vocab_size=16, modules=modules).folder
    prompts = [random_ids(n, 8, seed=n) for n in (3, 14, 17, 40, 22, 9)]
    for number in (0, 2, 3):
        prompts[number].append(BEGIN)
    prompts[3] += [END, 4]
    forbidden = [replace(GREEDY, allowed_token_ids=[*range(2, 16)]), replace(PENALISED, logit_bias={7: 1.0})]
    drawn = [replace(GREEDY, temperature=1.5, seed=seed, top_p=0.99) for seed in range(3)]
    on_device = [GREEDY, PENALISED, *drawn, replace(drawn[0], repetition_penalty=1.2, seed=9)]
    of_both = [*on_device[:4], *(replace(one, max_tokens=12) for one in forbidden)]
    outputs: dict[str, list[list[int]]] = {}
    # A CPU records nothing without its C++ kernels.
    for how in ("strict", "eager", "padded", "ahead", *(["recorded"] if cpu.library() is not None else [])):
        relaxed = {"relaxed_topk": 0 if how == "strict" else 3, "relaxed_delta": 0.2}
        thinking = {"begin_thinking_token": BEGIN, "end_thinking_token": END}
        config = {"num_speculative_tokens": 3} | relaxed | thinking
        llm = LLM(folder, **OPTIONS, speculative_config=config, enforce_eager=how != "recorded")
        engine, ran = llm.engine, list[Any]()
        engine.async_scheduling = how == "ahead"
        if how in ("padded", "ahead"):
            contexts = ContextBuckets(fewest=32)
            engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False, contexts=contexts)
        if (graphs := engine.runner.graphs) is not None:
            run = graphs.run
            graphs.run = lambda *args, ran=ran, run=run: ran.append(args) or run(*args)  # type: ignore[method-assign]
        done = llm.generate(prompts, on_device)
        steps, ahead = len(ran), engine.launched_ahead
        outputs[how] = [output.token_ids for output in (*done, *llm.generate(prompts, of_both))]
        assert (steps > 0) == (how not in ("strict", "eager")) and (ahead > 8) == (how == "ahead")
        if how in ("padded", "ahead"):
            assert len(ran) > steps > 10, "and graphs again when no request needs the host"
    strict = outputs.pop("strict")
    assert all(each == outputs["eager"] for each in outputs.values()) and strict != outputs["eager"]
    changes = [
        tuple(thoughts([*prompt, *output])[i : i + 2])
        for prompt, output in zip(prompts, outputs["eager"], strict=False)
        for i in range(len(prompt), len(prompt) + len(output) - 1)
    ]
    assert min(changes.count((False, True)), changes.count((True, False))) > 3, "it begins and ends while it decodes"


def test_tokens_that_are_not_known(drafting_oracle: Callable[..., Any]) -> None:
    folder: Path = drafting_oracle("deepseek_v32", index_topk=16).folder
    with pytest.raises(ValueError, match="relaxed_topk works between the tokens <think> and </think>"):
        LLM(folder, speculative_config={"num_speculative_tokens": 1, "relaxed_topk": 10})
    with pytest.raises(ValueError, match="relaxed_delta must be a finite number from 0 to 1, not 2"):
        LLM(folder, speculative_config={"relaxed_topk": 10, "relaxed_delta": 2})
