"""Hundreds of short random requests through a small cache: each ends as defined, no page is lost, memory stays flat."""

from __future__ import annotations

import dataclasses
import gc
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from caches import resident_bytes
from dsa_engine import LLM, CapacityError, SamplingParams, StreamPiece
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs

ROOM = 64  # tokens in the cache
HALF = 250  # requests with steps launched ahead, where the host knows least


@pytest.fixture(scope="module")
def llm(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(ROOM)


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams, str]:
    """A prompt, parameters, and the expected end."""
    prompt = [rng.randrange(4, 320) for _ in range(rng.choice([1, 3, 8, 15, 24, 30]))]
    keys: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 12, 25]),
        "ignore_eos": rng.random() < 0.8,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 20]),
        "min_p": rng.choice([0.0, 0.05]),
        "logprobs": rng.choice([None, None, 0, 3]),
        "seed": rng.choice([None, rng.randrange(1000)]),
        "stop": rng.choice([None, None, ["e"], ["ab", "qu"]]),
        "stop_token_ids": rng.choice([None, [5, 6, 7]]),
    }
    kind = rng.random()
    if kind < 0.05:  # the cache can never hold it
        return [9] * (ROOM - 10), SamplingParams(**keys | {"max_tokens": 40}), "too large"
    if kind < 0.10:
        return [*prompt, 320], SamplingParams(**keys), "bad token"
    if kind < 0.15:  # it fails at its first token
        return prompt, SamplingParams(**keys | {"min_tokens": 1, "stop_token_ids": list(range(320))}), "error"
    if kind < 0.35:
        return prompt, SamplingParams(**keys), "left"
    return prompt, SamplingParams(**keys), "runs"


def run(llm: LLM, rng: random.Random, count: int) -> Counter[str]:
    """Runs ``count`` requests, up to twelve at a time, advanced in random order; returns how they ended."""
    ended: Counter[str] = Counter()
    live: list[tuple[Iterator[StreamPiece], SamplingParams, str, list[int]]] = []
    started = 0
    while live or started < count:
        if started < count and len(live) < 12:
            started += 1
            prompt, params, how = random_request(rng)
            stream = llm.stream(prompt, params)
            if how in ("too large", "bad token"):
                with pytest.raises(CapacityError if how == "too large" else ValueError):
                    next(stream)
                ended[how] += 1
            else:
                live.append((stream, params, how, []))
            continue
        item = rng.choice(live)
        stream, params, how, tokens = item
        piece = next(stream)
        tokens += piece.token_ids
        assert (piece.logprobs is None) == (params.logprobs is None)
        if piece.finish_reason is not None:
            assert next(stream, None) is None
            assert (piece.error is not None) == (piece.finish_reason == "error") == (how == "error")
            assert piece.finish_reason != "length" or len(tokens) == params.max_tokens
            ended[piece.finish_reason] += 1
            live.remove(item)
        elif how == "left" and rng.random() < 0.3:
            stream.close()  # type: ignore[attr-defined]
            ended["left"] += 1
            live.remove(item)
    return ended


@pytest.mark.parametrize("ahead", [False, True])
def test_soak(llm: LLM, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """``ahead``: decode steps are launched before the previous tokens are read, as on CUDA."""
    rng, engine = random.Random(0), llm.engine
    monkeypatch.setattr(engine, "async_scheduling", ahead)
    assert engine.cache.pages == ROOM // 2
    ended: Counter[str] = Counter()
    before, launched_ahead = engine.scheduler.preemptions, engine.launched_ahead
    objects, memory = [], []
    run(llm, rng, 20)  # makes tensors that are made once
    half = HALF if ahead else HALF // 3
    for _ in range(2):
        ended += run(llm, rng, half)
        llm.wait_idle()
        assert not engine.scheduler.has_work
        assert engine.scheduler.free_pages == [engine.cache.pages]
        gc.collect()
        objects.append(len(gc.get_objects()))
        memory.append(resident_bytes())
    preempted, ahead_of_tokens = engine.scheduler.preemptions - before, engine.launched_ahead - launched_ahead
    print(ended, f"{preempted} preemptions, {ahead_of_tokens} launched ahead, objects {objects}, bytes {memory}")
    assert ended.total() == 2 * half and {"stop", "length", "error", "left", "too large", "bad token"} == set(ended)
    assert preempted > 0, "how many depends on the callers' pace: 16 to 27, and 70 to 84 ahead"
    assert (ahead_of_tokens > 500) == ahead
    assert objects[1] - objects[0] < 100, "objects are left over"
    assert memory[1] - memory[0] < 8 * 2**20


@pytest.mark.parametrize("requests", [150, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [False, True])
def test_no_token_is_wrong(llm: LLM, monkeypatch: pytest.MonkeyPatch, requests: int, ahead: bool) -> None:
    """Requests are interrupted, closed, dropped and preempted at random; each gets the same tokens as alone."""
    rng, engine = random.Random(requests), llm.engine
    monkeypatch.setattr(engine, "async_scheduling", ahead)
    kinds = []
    while len(kinds) < 60:
        prompt, params, how = random_request(rng)
        if how in ("left", "runs"):
            params = dataclasses.replace(params, seed=len(kinds), logprobs=None)
            output = llm.generate([prompt], params)[0]
            if len(kinds) % 4 == 0 and len(output.text) > 4:  # few others reach a stop
                params = dataclasses.replace(params, stop=output.text[2:4])
                output = llm.generate([prompt], params)[0]
            kinds.append((prompt, params, output.token_ids, output.text))
    launch, before = engine.runner.launch, engine.scheduler.preemptions
    calm = False

    def disturbed(*args: Any) -> Any:
        if not calm and rng.random() < 0.01:
            signal.raise_signal(signal.SIGINT)
        return launch(*args)

    monkeypatch.setattr(engine.runner, "launch", disturbed)
    ended: Counter[str] = Counter()
    live: list[tuple[Iterator[StreamPiece], list[int], list[str], list[int], str]] = []
    for number in range(requests + 12):
        if number < requests:
            prompt, params, wanted, text = rng.choice(kinds)
            live.append((llm.stream(prompt, params), wanted, [], [], text))
        calm = number >= requests
        while len(live) >= 12 or (calm and live):
            stream, wanted, texts, tokens, text = item = rng.choice(live)
            how = rng.random()
            if how < 0.03:
                live.remove(item)
                if how < 0.015:
                    stream.close()  # type: ignore[attr-defined]
                ended["closed" if how < 0.015 else "forgotten"] += 1
                del stream, item
                continue
            try:
                piece = next(stream)
            except KeyboardInterrupt:
                live.remove(item)
                ended["interrupted"] += 1
                continue
            texts.append(piece.text)
            tokens += piece.token_ids
            assert tokens == wanted[: len(tokens)]
            if piece.finish_reason is not None:
                live.remove(item)
                assert tokens == wanted and "".join(texts) == text
                ended[piece.finish_reason] += 1
    print(ended, f"{engine.scheduler.preemptions - before} preemptions")
    assert ended.total() == requests and set(ended) == {"stop", "length", "closed", "forgotten", "interrupted"}
    assert engine.scheduler.preemptions > before
    gc.collect()
    llm.wait_idle()
    assert not engine.scheduler.has_work
    assert engine.scheduler.free_pages == [engine.cache.pages]


@pytest.mark.slow
@pytest.mark.parametrize("modules, ahead", [(1, False), (1, True), (3, False)])
def test_soak_with_drafts(tiny_llm: Callable[..., LLM], modules: int, ahead: bool) -> None:
    """Steps sample one to four tokens, a number that the test decides in place of the modules. ``ahead``: padded steps
    follow others that have not been read, as on CUDA."""
    llm = tiny_llm(
        ROOM,
        speculative_config={"num_speculative_tokens": 3},
        hf_overrides={"num_nextn_predict_layers": modules},
    )
    assert len(llm.engine.model.mtp) == modules
    engine, rng = llm.engine, random.Random(1)
    accepted: Counter[int] = Counter()

    def decide(tokens: torch.Tensor, drafts: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        counts = (positions * 7 + keys) % (drafts.shape[1] + 1)
        accepted.update(counts.tolist())
        return counts

    if ahead:
        engine.runner.graphs = DecodeGraphs(
            engine.model, engine.cache, capture=False, contexts=ContextBuckets(fewest=ROOM)
        )
        engine.async_scheduling = True
    assert engine.runner.drafter is not None
    engine.runner.drafter.rule = decide
    ended = run(llm, rng, 2 * HALF)
    print(ended, accepted, f"{engine.scheduler.preemptions} preemptions")
    assert ended.total() == 2 * HALF and {"stop", "length", "error", "left", "too large", "bad token"} == set(ended)
    assert engine.scheduler.preemptions > 20 and set(accepted) == {0, 1, 2, 3}
    assert (engine.launched_ahead > 100) == ahead
    llm.wait_idle()
    assert not engine.scheduler.has_work
    assert engine.scheduler.free_pages == [engine.cache.pages]
