"""The engine: one rank's model, caches and scheduler; requests come in, steps run, requests end.

Under ``torchrun`` every rank makes the same engine and calls the same methods with the same arguments. One thread at a
time uses it: the loop's thread (``loop.py``), or that of a program that measures, while the loop is idle.

The device must not wait for the host between two decode steps. So with ``async_scheduling`` a step is scheduled and
launched before the previous step's tokens are read. A placeholder takes the position of a token that is not read yet
(``request.py``). While the device computes, the host reads the token and decides whether the request ends. Only decode
steps that need nothing from the host are launched ahead. Before a prefill, and before a graph is captured, the step in
flight is read, so that its tokens do not wait.

A request that turns out to have ended was launched for one step too many, whose tokens are dropped. Its pages may go to
another request at once: the device works in order, so the new request overwrites a row before it reads that row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from dsa_engine.engine.cache.disk import DiskStores
from dsa_engine.engine.cache.steps import CacheSteps
from dsa_engine.engine.requests.draft_number import choices_up_to
from dsa_engine.engine.requests.limits import Add, Limits, new_requests
from dsa_engine.engine.requests.request import Chunk, Ending, Request
from dsa_engine.engine.requests.samples import (
    SAMPLING_ERRORS,
    Ended,
    RequestTokens,
    Samples,
    StepResult,
    StepTokens,
)
from dsa_engine.engine.requests.scheduler import Scheduler, Step
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.sampling.chain import mixed_seed, seed_key
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.engine.steps.rebalancing import CountRecorder, Rebalancing
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.model.profile_stages import has_hook, profiled_range
from dsa_engine.options import EngineOptions
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Engine:
    """Runs requests on a model; :func:`.start.start` makes one.

    Attributes:
        progress: ``progress(total, unit, title)`` makes a progress bar on rank 0.
        num_prefilled_tokens: tokens of prompts computed by steps so far.
        longest_prefill: the same of the fullest context-parallel group of each step.
        counted_tokens: tokens of prompts and outputs of the steps so far that have been read.
        steps_by_tokens: numbers of these steps, by how many such tokens they had: at most 1, 2, 4, 8, …
        after_launch: each is called with a step's chunks when it has been launched.
        ids: numbers the requests of :meth:`add`; a request without a seed gets one made from its number.
    """

    options: EngineOptions
    model: Model
    cache: KVCache
    scheduler: Scheduler
    runner: ModelRunner
    cache_steps: CacheSteps | None  # moves pages to other ranks, host memory and the disk; None: they stay
    max_model_len: int  # maximum number of tokens of a request, prompt and output
    progress: Callable[..., Any]
    bytes_read: int
    load_seconds: float
    step_bytes: int | None  # set aside on the device for steps and graphs; None if an option set the size of the caches
    rebalancing: Rebalancing | None = None  # moves experts between steps; None: they stay
    recorder: CountRecorder | None = None  # writes the loads of experts to a file; None: there is none

    def __post_init__(self) -> None:
        runtime = self.model.runtime
        self.config, self.graphs = self.model.config, self.runner.graphs
        self.mesh, self.dtype, self.workspace = runtime.mesh, runtime.dtype, runtime.workspace
        self.launched_ahead = self.num_prefilled_tokens = self.longest_prefill = self._num_taken = 0
        self.counted_tokens, self.steps_by_tokens = 0, [0] * 32
        self.ids = count()
        turns = [one.turn for one in (self.rebalancing, self.recorder) if one is not None]
        stored = [] if self._stores is None else [self._stores.launched]
        self.after_launch: Sequence[Callable[[Sequence[Chunk]], None]] = (*turns, *stored)
        self._in_flight: StepResult | None = None  # a step that has been launched and not read
        self.set_num_drafts(None)

    def set_num_drafts(self, num_drafts: int | None) -> None:
        """Sets how many tokens are drafted for every request in a step: 0 to ``num_speculative_tokens``; None: as many
        of them as bring most (``draft_number.py``)."""
        allowed = self.options.num_drafts
        adapts, num_drafts = num_drafts is None and self._may_adapt, allowed if num_drafts is None else num_drafts
        choices = choices_up_to(num_drafts) if adapts else (num_drafts,)
        if not 0 <= num_drafts <= allowed:
            raise ValueError(
                f"{num_drafts} drafts a step are not possible: num_speculative_tokens allows 0 to {allowed}"
            )
        self.check_idle()
        if self.options.cache_folder is not None and num_drafts != allowed:
            raise RuntimeError(f"a cache_folder holds the rows of {allowed} drafts a step; leave it out")
        self.scheduler.set_num_drafts(choices)
        if self.mesh.device.type == "cpu":  # which others use meanwhile
            self.scheduler.decoding.draft_number.clock = time.thread_time
        self.runner.num_drafts = num_drafts
        modules, prefix_cache = min(num_drafts, len(self.model.mtp)), self.scheduler.prefix_cache
        if modules != prefix_cache.lookahead:
            prefix_cache.reset()  # the rows of modules that have not run are missing
        prefix_cache.lookahead, prefix_cache.least_computed = modules, max(1, modules)
        ahead = self.mesh.device.type == "cuda" and self.options.async_scheduling and self.mesh.static_decode
        # With drafts, the host does not know which tokens the next step computes: only a padded step can follow.
        self.async_scheduling = ahead and (self.graphs is not None or not num_drafts)

    @property
    def _may_adapt(self) -> bool:
        """Whether steps may differ in their number of drafts: relaxed acceptance would give other tokens, several
        modules need each other's rows, and the two parts of a run agree on a number."""
        return self.runner.relaxed is None and len(self.model.mtp) == 1 and not self.mesh.has_counterpart

    @property
    def num_generated_tokens(self) -> int:
        return self._num_taken + self.scheduler.decoding.num_taken

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.in_flight

    @property
    def limits(self) -> Limits:
        why = None
        if not self.config.has_indexer:
            why = f"{self.config.model_type} has no indexer: each token attends to all tokens before it; leave it out"
        elif self.mesh.has_counterpart:
            why = "with prefill_ranks a request passes through two parts of the run; leave one of them out"
        lookahead = self.scheduler.prefix_cache.lookahead if self.options.enable_prefix_caching else None
        return Limits(self.max_model_len, self.config.vocab_size, self.scheduler.capacity, why, lookahead)

    @property
    def _stores(self) -> DiskStores | None:
        return None if self.cache_steps is None else self.cache_steps.stores

    def queue(self, add: Add) -> Request:
        """It runs in the next steps."""
        request = self.make_request(add)
        self.scheduler.add(request)
        return request

    def make_request(self, add: Add) -> Request:
        seed = mixed_seed(self.options.seed, add.id) if add.params.seed is None else add.params.seed
        params, words = add.params, (add.bad_words, add.think_tokens)
        request = Request(add.id, add.prompt_ids, params, *words, draw_key=seed_key(seed), priority=add.priority)
        request.cache_salt, request.page_digests = add.cache_salt, add.page_digests
        if params.structured_outputs is not None and (grammars := self.runner.grammars) is not None:
            grammars.begun[request] = add.compiled or grammars.compiled(params.structured_outputs.grammar)
        return request

    def add(self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None = None) -> Request:
        """Queues a request with one output."""
        (add,) = new_requests(prompt, params, tokenizer, self.limits)
        add.id = next(self.ids)
        return self.queue(add)

    def step(self) -> list[StepTokens]:
        """Runs one step and returns the tokens that it has read, for each request up to the token that ends it.

        With ``async_scheduling`` the tokens are those of an earlier step, and sometimes there are none. If it raises, a
        whole step failed, and its requests have ended with this ``exception``; an error in the sampling of one request
        ends only that request.
        """
        if self._in_flight is None and (number := self.scheduler.decoding.draft_number).due:
            number.exchange(self.mesh.world.all_gather, self.mesh.device)
        if self.cache_steps is not None:
            self.cache_steps.begin_step()
        # While stages are timed, each step is read at once: its time must not contain another step.
        ahead = self.async_scheduling and not has_hook()
        read = [] if ahead else self._read_in_flight()
        with profiled_range("schedule"):
            step = self.scheduler.schedule()
            plan = self.runner.plan(step)
        before = self._in_flight
        if before is not None and not self.runner.runs_ahead(plan, before):
            return self._read_in_flight()  # the next call schedules anew
        if not step:
            return read
        with profiled_range("launch"), self._failing(step), self.moving(step.chunks, not plan.for_graph):
            launched = self.runner.launch(plan, before)
        self._launched(step, plan, launched)
        self._in_flight = launched if ahead and launched.can_be_followed else None
        return read + self._read(before) + ([] if self._in_flight else self._read(launched))

    def moving(self, chunks: Sequence[Chunk], overlapped: bool = False) -> AbstractContextManager[None]:
        """Runs a forward pass over ``chunks``, see :meth:`.CacheSteps.moving`."""
        return nullcontext() if self.cache_steps is None else self.cache_steps.moving(chunks, overlapped)

    def _launched(self, step: Step, plan: StepPlan, launched: StepResult) -> None:
        with self._failing(step):
            for hook in self.after_launch:
                hook(step.chunks)
        self.scheduler.launched(step, launched.samples, plan.rows_by_form(self.config))
        for request, rows in launched.last_rows.items():
            request.last_rows = rows
        for request, logprobs in launched.prompt_logprobs.items():
            request.add_prompt_logprobs(logprobs)
        for request in self.scheduler.requests_of(step) if launched.selections else ():
            request.selection.update(launched.selections.get(request.id, {}))
        if step.decode is None:
            of_groups: Counter[range] = Counter()
            for chunk in step.chunks:
                of_groups[chunk.ranks] += chunk.length
            self.num_prefilled_tokens += of_groups.total()
            self.longest_prefill += max(of_groups.values(), default=0)
        self.launched_ahead += self._in_flight is not None and launched.samples.max_rows > 0

    def _read_in_flight(self) -> list[StepTokens]:
        step, self._in_flight = self._in_flight, None
        return self._read(step)

    def _read(self, step: StepResult | None) -> list[StepTokens]:
        if step is None:
            return []
        with profiled_range("read tokens"), self._failing(step.samples):
            read = step.read()
        taken, streams = self.scheduler.decoding.take(read)
        ended = [one for one in map(self._take, taken) if one is not None]
        before, self.counted_tokens = self.counted_tokens, self.num_prefilled_tokens + self.num_generated_tokens
        self.steps_by_tokens[max(0, self.counted_tokens - before - 1).bit_length()] += 1
        if ended:
            gone = [one.id for one in ended]
            streams = [one.of((~np.isin(one.ids, gone)).nonzero()[0].tolist(), []) for one in streams]
        if ended or not streams:
            streams.append(StepTokens.only(ended))
        return streams if len(read.samples.keys) else []

    def _take(self, sampled: RequestTokens) -> Ended | None:
        """Gives a request its new tokens, up to the one that ends it, if one does."""
        request, result, new = sampled.request, sampled.draft_result, sampled.tokens
        if result is not None and result.offered:
            request.draft_stats.append(result)
        if (stores := self._stores) is not None and new[0] >= 0:
            stores.succeeded(request)
        for number, token in enumerate(new):
            sound = token >= 0
            self._num_taken += sound
            failed = None if sound else Ending("error", SAMPLING_ERRORS[token])
            ending = failed or request.append(token, self.config.eos_token_ids)
            if ending is not None:
                self.finish(request, *ending)
                last = number + sound
                of_delivery = {"tokens": new[:last], "end": request.output, "nothing": []}
                logprobs = None if sampled.logprobs is None else sampled.logprobs[:last]
                return Ended(request.id, of_delivery[request.delivery], ending, request.record, logprobs)
        return None

    def finish(
        self, request: Request, reason: str, error: str | None = None, stop_reason: int | str | None = None
    ) -> None:
        """Ends a request in any state and frees its pages; does nothing if it has ended."""
        if request.finish_reason is None:
            request.finish_reason, request.error, request.stop_reason = reason, error, stop_reason
            if self._stores is not None:
                self._stores.ended(request)
            self.scheduler.finish(request)

    @contextmanager
    def _failing(self, step: Step | Samples) -> Iterator[None]:
        """Runs a part of a step; an error in it ends its requests."""
        try:
            yield
        except BaseException as error:
            for request in self.scheduler.requests_of(step):
                if request.finish_reason is None:
                    request.exception = error
                    self.finish(request, "error", f"{type(error).__name__}: {error}")
            raise

    def check_idle(self) -> None:
        """Raises ``RuntimeError`` if requests are running."""
        if self.scheduler.has_work:
            raise RuntimeError("the engine is busy with other requests; finish them first")
