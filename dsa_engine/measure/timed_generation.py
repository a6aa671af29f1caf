"""A batch of requests generated step by step, with the time of every step."""

from __future__ import annotations

import math
import statistics
import time
from functools import cached_property

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.measure.across_ranks import agree_on_prompts
from dsa_engine.measure.requests import add_filled, random_prompt
from dsa_engine.measure.stage_timer import StageTimer
from dsa_engine.sampling_params import SamplingParams


class TimedGeneration:
    """A batch of requests and the times of its steps, counted from when the requests arrive."""

    def __init__(self, engine: Engine, watch: bool):
        self.engine = engine
        self.requests: list[Request] = []  # in the order of their prompts
        self.step_end_times: list[float] = []  # seconds, for the steps that gave tokens; for every step, if watched
        self.timers: list[StageTimer] = []  # stages of every step, if steps are watched
        self.first_token_steps: list[int] = []  # of every request; empty if caches are filled
        self.decode_steps = range(0)  # in which the whole batch decodes; may be empty
        self.decoded_tokens = 0.0  # that a request got in these steps, on average
        self.num_tokens = 0  # of all requests, whichever rank owns them
        self._watch = watch
        self._arrival = time.perf_counter()

    def step(self) -> None:
        if self._watch:
            with StageTimer(self.engine.mesh.device) as timer:
                read = self.engine.step()
            self.timers.append(timer)
        elif not (read := self.engine.step()):
            return  # no token: a part of a prompt, or a step that the next call reads
        self.num_tokens += sum(int(one.counts.sum()) + sum(len(end.tokens) for end in one.ended) for one in read)
        self.step_end_times.append(time.perf_counter() - self._arrival)

    @cached_property
    def ttft(self) -> list[float]:
        """Seconds to the first token of every request."""
        return [self.step_end_times[step] for step in self.first_token_steps]

    @cached_property
    def itl(self) -> list[float]:
        """Seconds of each step in which the whole batch decodes."""
        return [self.step_end_times[i] - self.step_end_times[i - 1] for i in self.decode_steps]

    @property
    def tpot(self) -> float:
        """Seconds of a token, of which a median step gives as many as the mean step."""
        return statistics.median(self.itl) * len(self.itl) / self.decoded_tokens

    @property
    def beyond_median(self) -> float:
        """Seconds that these steps took beyond the median each: mostly the last one, when all requests end at once."""
        return sum(self.itl) - statistics.median(self.itl) * len(self.itl)


def _prefill(generation: TimedGeneration, prompts: list[list[int]], params: SamplingParams) -> None:
    for prompt in prompts:
        generation.requests.append(generation.engine.add(prompt, params))
    first: dict[int, int] = {}
    with generation.engine.progress(sum(map(len, prompts)), "tokens", "prefill") as bar:
        while len(first) < len(prompts):
            generation.step()
            for i, request in enumerate(generation.requests):
                if request.first_token_at is not None:  # its tokens may be another rank's
                    first.setdefault(i, len(generation.step_end_times) - 1)
                elif request.finish_reason is not None:
                    raise RuntimeError(f"a request ended without a token: {request.error or request.finish_reason}")
            done = sum(min(one.num_computed_tokens, len(one.prompt)) for one in generation.requests)
            bar.update(done - bar.n)
    generation.first_token_steps = [first[i] for i in range(len(prompts))]


def _fill(generation: TimedGeneration, prompts: list[list[int]], params: SamplingParams) -> None:
    """Runs also one step, in which graphs are captured; no first token is timed."""
    generation.requests += add_filled(generation.engine, len(prompts), len(prompts[0]), params)
    while not generation.step_end_times:
        generation.step()


def measured_prompts(engine: Engine, length: int, count: int, seed: int, fill_cache: bool) -> list[list[int]]:
    """Random prompts; zeros if caches are filled, as no prompt is read then and random numbers take long."""
    if fill_cache:
        return [[0] * length] * count
    return [random_prompt(engine, length, seed + i) for i in range(count)]


def generate_batch(
    engine: Engine,
    prompts: list[list[int]],
    output_len: int,
    *,
    watch: bool = False,
    fill_cache: bool = False,
) -> TimedGeneration:
    """Generates ``output_len`` tokens with the whole batch; a request whose prompt is computed first may get more. No
    request remains in the engine afterwards, also after an error. ``watch``: time the stages of each step;
    ``fill_cache``: with random rows, instead of computing the prompts."""
    max_tokens = max_output_tokens(engine, len(prompts[0]), output_len, len(prompts), fill_cache)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    agree_on_prompts(engine, prompts)
    generation = TimedGeneration(engine, watch)
    try:
        (_fill if fill_cache else _prefill)(generation, prompts, params)
        requests = generation.requests
        before, begin = generation.num_tokens, len(generation.step_end_times)
        while generation.decoded_tokens < output_len - 1 and all(r.finish_reason is None for r in requests):
            generation.step()
            generation.decoded_tokens = (generation.num_tokens - before) / len(requests)
        if generation.decoded_tokens:
            generation.decode_steps = range(begin, len(generation.step_end_times))
    finally:
        for request in generation.requests:
            if request.finish_reason is None:
                engine.finish(request, "abort")
    return generation


def max_output_tokens(engine: Engine, input_len: int, output_len: int, batch_size: int, fill_cache: bool) -> int:
    """Maximum number of tokens that a request may get while the whole batch decodes ``output_len`` tokens: while the
    last request is prefilled the others decode, at most ``1 / max_prefill_share`` steps for one of prefill; with filled
    caches there is one step that is not counted."""
    if fill_cache:
        return output_len + 1
    if batch_size == 1 or output_len == 1:
        return output_len
    options = engine.options
    prefill_steps = batch_size * math.ceil(input_len / (options.max_num_batched_tokens * engine.mesh.cp_size))
    return output_len + math.ceil(prefill_steps / options.max_prefill_share)
