"""The prefix cache: what is found, and that tokens and logits with it are those without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.scheduler import Scheduler
from scheduling import run_step

PAGE = 4


def make_scheduler(world: int = 1, cp: int = 1, pages: int = 40, tokens: int = 64, dcp: int = 1) -> Scheduler:
    capacity = Capacity(world, cp, pages, PAGE, dcp)
    return Scheduler(capacity, rank=0, max_num_seqs=8, max_num_batched_tokens=tokens, max_prefill_share=1.0)


def make_request(number: int, prompt: Sequence[int], output: int = 2, **params: Any) -> Request:
    return Request(number, list(prompt), SamplingParams(max_tokens=output, **params))


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Runs a step that samples token 7; returns ``(request, start, length)`` of its chunks."""
    return run_step(scheduler, lambda _: 7)


def run(scheduler: Scheduler, *requests: Request) -> list[tuple[int, int, int]]:
    for request in requests:
        scheduler.add(request)
    chunks = []
    while scheduler.has_work:
        chunks += step(scheduler)
    return chunks


DOCUMENT = list(range(100, 120))  # 5 pages


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        (DOCUMENT, 16),  # the last token is always computed, and with it its page
        ([*DOCUMENT, 1], 20),
        ([*DOCUMENT, 7, 7], 20),
        ([*DOCUMENT[:12], 1, 2, 3], 12),
        ([*DOCUMENT[:11], 1, 2, 3], 8),
        ([*DOCUMENT[:13], 1, 2, 3], 12),
        (DOCUMENT[1:], 0),
        ([1, *DOCUMENT[1:]], 0),
        (DOCUMENT[:3], 0),
    ],
)
def test_equal_pages_are_found(prompt: list[int], start: int) -> None:
    scheduler, request = make_scheduler(), make_request(1, prompt)
    run(scheduler, make_request(0, DOCUMENT))
    assert run(scheduler, request)[0] == (1, start, len(prompt) - start)
    assert request.num_cached_tokens == start and scheduler.prefix_cache.hits == start
    assert scheduler.free_pages == [40]


def test_outputs_are_found_too() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_request(0, DOCUMENT[:10], output=9))
    turn = [*DOCUMENT[:10], *[7] * 9, 1, 2]
    assert run(scheduler, make_request(1, turn))[0] == (1, 16, 5), "the last sampled token was never computed"


def test_what_equals_what_an_older_request_computes_is_not_computed_twice() -> None:
    """The samples of one prompt wait for the first; a request that has little in common with it does not."""
    scheduler = make_scheduler(tokens=8)
    for number in range(3):
        scheduler.add(make_request(number, DOCUMENT))
    scheduler.add(make_request(3, [*DOCUMENT[:4], 1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert step(scheduler) == [(0, 0, 5), (3, 0, 3)] and scheduler.num_deferred == 2, "the last one is shorter"
    assert [step(scheduler) for _ in range(2)] == [[(0, 5, 7), (3, 3, 1)], [(0, 12, 8)]]
    assert [chunk for _ in range(3) for chunk in step(scheduler)] == [(1, 16, 4), (2, 16, 4), (3, 4, 8), (3, 12, 1)]


def test_pages_of_a_failed_request_are_forgotten() -> None:
    scheduler, failed = make_scheduler(tokens=8), make_request(1, DOCUMENT)
    run(scheduler, make_request(0, DOCUMENT[:9]))
    scheduler.add(failed)
    assert step(scheduler) == [(1, 8, 8)]
    failed.finish_reason = "error"
    scheduler.finish(failed)
    assert run(scheduler, make_request(2, DOCUMENT))[0] == (2, 8, 8)


def test_a_preempted_request_finds_its_pages() -> None:
    scheduler, request = make_scheduler(), make_request(0, DOCUMENT, output=8)
    scheduler.add(request)
    for _ in range(4):
        step(scheduler)
    scheduler.preempt(request)
    assert step(scheduler) == [(0, 20, 4)] and request.num_cached_tokens == 0


def test_prompt_logprobs_are_computed() -> None:
    scheduler, wants = make_scheduler(tokens=128), make_request(1, DOCUMENT, prompt_logprobs=0)
    run(scheduler, make_request(0, DOCUMENT))
    scheduler.add(wants)
    assert step(scheduler) == [(1, 0, 20)]
    scheduler.preempt(wants)
    assert wants.prompt_logprobs == [None]
    wants.prompt_logprobs += [{}] * 9  # type: ignore[list-item]  # as if half of its prompt had been computed
    assert step(scheduler) == [(1, 8, 13)]


def test_the_memory_is_taken_from_cached_pages() -> None:
    scheduler = make_scheduler(pages=8)
    run(scheduler, make_request(0, DOCUMENT))
    assert len(scheduler.ledger.pools[0].unused[0]) == 3 and scheduler.free_pages == [8]
    assert run(scheduler, make_request(1, range(24)))[0] == (1, 0, 24)
    assert run(scheduler, make_request(2, DOCUMENT))[0] == (2, 4, 16), "the last pages were evicted first"


@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
def test_ranks_that_hold_contexts_together_find_the_sum_of_their_pages(dcp: int) -> None:
    """After many times as many prompts the newest are found, and at most a part of the oldest one is missing, where
    the rest of the last took a page. Each rank has its part of a prompt, within a page."""
    scheduler, pages = make_scheduler(world=8, cp=8, pages=32, tokens=4, dcp=dcp), 8
    prompts = [[number] * (pages * PAGE + 1) for number in range(20 * dcp)]
    for number, prompt in enumerate(prompts):
        scheduler.add(request := make_request(number, prompt, output=1))
        step(scheduler)
        on_ranks = [sum(page % dcp == rank for page in request.pages) for rank in range(dcp)]
        assert sum(on_ranks) == pages + 1 and max(on_ranks) - min(on_ranks) <= 1
        run(scheduler)
    again = [make_request(len(prompts) + number, prompt) for number, prompt in enumerate(prompts)]
    for request in again:
        scheduler.add(request)
    counts = [request.num_tokens_found // PAGE for request in again]
    assert counts[1 - 4 * dcp :] == [pages] * (4 * dcp - 1) and 32 * dcp - pages <= sum(counts) < 32 * dcp


def test_a_request_goes_to_the_group_that_has_its_prefix() -> None:
    scheduler = make_scheduler(world=4, cp=2)
    first, other = make_request(0, DOCUMENT, output=9), make_request(1, range(30), output=9)
    scheduler.add(first)
    scheduler.add(other)
    step(scheduler)
    assert (first.cp_group, other.cp_group) == (0, 1)
    again = make_request(2, [*range(30), 1, 2, 3])
    scheduler.add(again)
    step(scheduler)
    assert again.cp_group == 1 and again.num_cached_tokens == 28, "both ranks of its group have the pages"


OPTIONS: dict[str, Any] = {"max_model_len": 512, "cache_memory": "8MiB", "progress": False, "device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"page_size": 8},
    "chunked, smaller pages": {"page_size": 4, "max_num_batched_tokens": 16},
    "one module": {"page_size": 8, "speculative_config": {"num_speculative_tokens": 2}},
    "two modules": {"page_size": 8, "speculative_config": {"num_speculative_tokens": 2}},
    "fp8": {"page_size": 8, "kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module")
def folder_of(oracle: Callable[..., Any], drafting_oracle: Callable[..., Any]) -> Callable[[str], Path]:
    def folder(case: str) -> Path:
        if "module" in case:
            made = drafting_oracle("deepseek_v32", modules=1 + case.startswith("two"))
        elif case == "fp8":
            made = oracle("deepseek_v32", kv_lora_rank=128, index_head_dim=64)
        else:
            made = oracle("deepseek_v32")
        return Path(made.folder)

    return folder


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_the_cache(
    case: str, folder_of: Callable[[str], Path], random_ids: Callable[..., list[int]]
) -> None:
    """Shared documents longer than the selection, conversations, whole prompts, samples; greedy and drawn with
    penalties."""
    document = random_ids(90, seed=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=3, logprobs=2, repetition_penalty=1.2
    )
    runs: list[list[Any]] = []
    for caching in (False, True):
        with LLM(folder_of(case), enable_prefix_caching=caching, **OPTIONS | CASES[case]) as llm:
            llm.engine.set_num_drafts(llm.engine.options.num_drafts)
            outputs = llm.generate([document, document[:41], [*document[:64], 9, 8]], [greedy, drawn, greedy])
            said = outputs[0].outputs[0].token_ids
            outputs += llm.generate([*document, *said, 5, 6, 7], greedy)
            outputs += llm.generate([document[:80], document, document], [drawn, greedy, drawn])
            runs.append(outputs)
            llm.wait_idle()
            assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]
    hits = [output.metrics.num_cached_tokens for one in runs[1] for output in one.outputs]
    assert not any(output.metrics.num_cached_tokens for one in runs[0] for output in one.outputs)
    assert sum(count > 0 for count in hits) >= len(hits) - 4 and hits[5] > 90
    for one, other in zip(*runs, strict=True):
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs]
        for output, same in zip(one.outputs, other.outputs, strict=True):
            assert output.metrics.speculation == same.metrics.speculation, "as many drafts are accepted after a hit"
            if output.logprobs is not None:
                logprobs = [torch.tensor(list(of.values())) for of in (*output.logprobs, *same.logprobs)]
                half = len(logprobs) // 2
                torch.testing.assert_close(logprobs[:half], logprobs[half:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["plain", "one module", "two modules"])
def test_rows_after_a_hit_are_those_without(case: str, folder_of: Callable[[str], Path], random_ids: Any) -> None:
    """The prompts differ after a border of pages, whose last rows in a module's cache depend on the next tokens."""
    first, second = ([*random_ids(64, seed=3), other, *range(5, 20)] for other in (3, 4))
    rows = []
    for before in ([], [first]):
        with LLM(folder_of(case), **OPTIONS | CASES[case]) as llm:
            llm.generate(before, SamplingParams(temperature=0.0, max_tokens=8))
            llm.wait_idle()
            engine = llm.engine
            request = engine.add(second, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
            while not request.output:
                engine.step()
            assert request.num_cached_tokens == (64 - 8 * ("module" in case) if before else 0)
            pages = torch.tensor(request.pages[:8])
            pools = [*engine.cache.latent, *(keys for keys in engine.cache.index_keys if keys is not None)]
            rows.append([pool[pages] for pool in pools])
            engine.finish(request, "abort")
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)


def test_what_makes_no_hit(folder_of: Callable[[str], Path], random_ids: Any) -> None:
    """A prompt whose log-probabilities are wanted, another salt, a cache that was reset."""
    document = random_ids(100, seed=2)
    salted, scored = {"prompt_token_ids": document, "cache_salt": "x"}, SamplingParams(prompt_logprobs=3)
    with LLM(folder_of("plain"), page_size=8, **OPTIONS) as llm:
        first, again, whole, other = (
            llm.generate(prompt, params)[0]
            for prompt, params in ((document, scored), (document, None), (document, scored), (salted, None))
        )
        assert [one.outputs[0].metrics.num_cached_tokens for one in (first, again, whole, other)] == [0, 96, 0, 0]
        assert whole.prompt_logprobs == first.prompt_logprobs and len(whole.prompt_logprobs) == 100
        assert llm.reset_prefix_cache() is True
        assert [llm.generate(document)[0].outputs[0].metrics.num_cached_tokens for _ in range(2)] == [0, 96]


@pytest.mark.parametrize("salt", ["", 5])
def test_a_cache_salt_is_a_text(salt: Any, folder_of: Callable[[str], Path]) -> None:
    with LLM(folder_of("plain"), **OPTIONS) as llm, pytest.raises(TypeError, match="^cache_salt must be a text that"):
        llm.generate({"prompt_token_ids": [5], "cache_salt": salt})
