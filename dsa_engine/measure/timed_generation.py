"""A batch of requests generated step by step, with the time of every step."""

from __future__ import annotations

import math
import statistics
import time
from functools import cached_property

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.request import Request
from dsa_engine.measure.emulation.overlap_model import Pass, watched
from dsa_engine.sampling_params import SamplingParams


class Generation:
    """One run, from the moment at which its requests arrive; what :func:`generate_batch` has found out."""

    def __init__(self, engine: Engine, watch: bool):
        self.engine = engine
        self.sequences: list[Request] = []
        self.ends: list[float] = []  # of steps that brought tokens, in seconds from the arrival; of all, if watched
        self.passes: list[Pass] = []  # of every step, where they are watched
        self.first: list[int] = []  # of every request, the step of its first token
        self.decode: tuple[int, int] | None = None  # steps in which the whole batch decodes: from, up to
        self.decoded = 0.0  # tokens that a request got in these
        self._watch = watch
        self._begin = time.perf_counter()

    def step(self) -> None:
        if self._watch:
            with watched(self.engine) as one:
                self.engine.step()
            self.passes.append(one)
        elif not self.engine.step():
            return  # no token: a part of a prompt, or a step that is read by the next call
        self.ends.append(time.perf_counter() - self._begin)

    @cached_property
    def ttft(self) -> list[float]:
        """Seconds to the first token, of every request."""
        return [self.ends[step] for step in self.first]

    @cached_property
    def itl(self) -> list[float]:
        """Seconds of every step in which the whole batch decodes."""
        return [] if self.decode is None else [self.ends[i] - self.ends[i - 1] for i in range(*self.decode)]


def _prefill(run: Generation, prompts: list[list[int]], params: SamplingParams) -> None:
    """Brings requests to the state in which they decode, by computing their prompts: each has its first token."""
    for prompt in prompts:
        run.sequences.append(run.engine.add(prompt, params))
    first: dict[int, int] = {}
    while len(first) < len(prompts):
        run.step()
        for i, request in enumerate(run.sequences):
            if request.output:
                first.setdefault(i, len(run.ends) - 1)
            elif request.finish_reason is not None:
                raise RuntimeError(f"a request ended without a token: {request.error or request.finish_reason}")
    run.first = [first[i] for i in range(len(prompts))]


def _fill(run: Generation, prompts: list[list[int]], params: SamplingParams) -> None:
    """Brings requests to the state in which they decode without computing their prompts: their caches are random. One
    step is run, in which graphs are captured; there is no first token whose time could be taken."""
    for prompt in prompts:
        run.sequences.append(run.engine.add_filled(len(prompt), params))
    while not run.ends:
        run.step()


def generate_batch(
    engine: Engine,
    prompts: list[list[int]],
    output_len: int,
    *,
    watch: bool = False,
    fill_cache: bool = False,
) -> Generation:
    """Generates ``output_len`` tokens with the whole batch; a request that is ready first may get more meanwhile.

    With ``fill_cache`` the prompts are not computed: caches are filled with random rows. ``watch`` keeps what each step
    shows (:func:`dsa_engine.measure.emulation.overlap_model.watched`).

    Nothing is left in the engine afterwards, whatever happens.
    """
    most = most_tokens(engine, len(prompts[0]), output_len, len(prompts), fill_cache)
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    run = Generation(engine, watch)
    try:
        (_fill if fill_cache else _prefill)(run, prompts, params)
        before, begin = [len(s.output) for s in run.sequences], len(run.ends)
        while run.decoded < output_len - 1 and all(s.finish_reason is None for s in run.sequences):
            run.step()
            run.decoded = statistics.fmean(len(s.output) - n for s, n in zip(run.sequences, before, strict=True))
        if run.decoded:
            run.decode = (begin, len(run.ends))
    finally:
        for request in run.sequences:
            if request.finish_reason is None:
                engine.finish(request, "abort")
    return run


def most_tokens(engine: Engine, input_len: int, output_len: int, batch_size: int, fill_cache: bool) -> int:
    """Tokens that a request of a batch may get, while all together decode ``output_len`` of them.

    While the last one is prefilled the others decode, at most ``1 / max_prefill_share`` steps for one of prefill.
    With filled caches there is one step that is not counted.
    """
    if fill_cache:
        return output_len + 1
    if batch_size == 1 or output_len == 1:
        return output_len
    options = engine.options
    prefill_steps = batch_size * math.ceil(input_len / (options.max_num_batched_tokens * engine.mesh.cp_size))
    return output_len + math.ceil(prefill_steps / options.max_prefill_share)
