"""The engine: one rank's model, caches and scheduler; requests come in, steps run, requests end.

Under ``torchrun`` every rank makes the same engine and calls the same methods with the same arguments.

The device must not wait for the host between two decode steps. So with ``async_scheduling`` the next one is scheduled
and launched before the tokens of the one before are read: where a request's last token is not known yet, a placeholder
stands for it (``request.py``), and while the device computes, the host reads the token, makes text of it and looks
whether the request ends. Only decode steps that need nothing from the host are launched ahead; before a prefill, and
before a graph is captured, what is in flight is read, so that no token waits behind them.

A request that turns out to have ended is then part of one step too many. What that step samples for it is dropped. Its
pages may go to another one at once: the device works in order, and a row is written by its new owner before it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch.profiler import record_function

from dsa_engine.engine.capture import capture_likely
from dsa_engine.engine.new_request import new_request
from dsa_engine.engine.prefill_alone import chunks_alone
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.request_checks import check_prompt
from dsa_engine.engine.sampler import Sampled, Samples
from dsa_engine.engine.start import progress_of, start
from dsa_engine.engine.step_plan import StepPlan
from dsa_engine.interrupts import interruptible, uninterrupted
from dsa_engine.model.profile_stages import observed
from dsa_engine.options import EngineOptions
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.tokenizer import Tokenizer


class Engine:
    """Loads a model and runs requests on it.

    Args:
        folder: a Hugging Face model folder; with ``load_format="dummy"`` its ``config.json`` is enough.
        options: see :class:`dsa_engine.LLM`.

    Attributes:
        async_scheduling: launch a decode step before the tokens of the step before it are read.
        launched_ahead: how often that has happened.
        step_bytes: set aside on the device for steps and graphs; None where the caches were given their size.
        progress: ``progress(total, unit, title)``, see :func:`progress_bar`; only on rank 0.
    """

    def __init__(self, folder: Path, options: EngineOptions):
        self.options = options
        started = start(folder, options)
        self.config, self.mesh, self.dtype = started.config, started.mesh, started.dtype
        self.workspace, self.max_model_len = started.workspace, started.max_model_len
        self.model, self.cache, self.scheduler = started.model, started.cache, started.scheduler
        self.graphs, self.runner = started.graphs, started.runner
        self.bytes_read, self.load_seconds = started.bytes_read, started.load_seconds
        self.step_bytes = started.step_bytes
        self.progress = progress_of(self.mesh, options)
        self.draft(options.speculation.num_speculative_tokens if options.speculation else 0)
        self.launched_ahead = self._next_id = 0
        self._scheduled: list[Chunk] = []  # the next step, until it has been launched
        self._in_flight: list[Samples] = []  # of steps that have been launched and not read, oldest first
        if self.graphs is not None and self.mesh.static_decode:
            capture_likely(self.runner, self.mesh, options, self.max_model_len, self.progress)

    def draft(self, num_drafts: int) -> None:
        """Has so many drafts made of every request in a step, from now on: 0, or up to ``num_speculative_tokens``.

        Raises:
            ValueError: more than that.
            RuntimeError: requests are running.
        """
        most = self.options.speculation.num_speculative_tokens if self.options.speculation else 0
        if not 0 <= num_drafts <= most:
            raise ValueError(f"{num_drafts} drafts a step are not possible: num_speculative_tokens allows 0 to {most}")
        if self.scheduler.has_work:
            raise RuntimeError("the engine is busy with requests; finish them first")
        self.scheduler.num_drafts = self.runner.num_drafts = num_drafts
        self.scheduler.least_last_chunk = num_drafts if len(self.model.mtp) > 1 else 1
        ahead = self.mesh.device.type == "cuda" and self.options.async_scheduling and self.mesh.static_decode
        # With drafts, the host does not know which tokens the next step computes: only a padded one follows.
        self.async_scheduling = ahead and (self.graphs is not None or not num_drafts)

    def add(self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None = None) -> Request:
        """Queues a request; with a tokenizer text is made of its output, and it ends at a stop string.

        Raises:
            ValueError: an empty prompt, token ids that the model does not have, or no room below ``max_model_len``.
            CapacityError: it does not fit in the cache even alone.
        """
        request = self.prepare(prompt, params, tokenizer)
        self.queue(request)
        return request

    def prepare(self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None = None) -> Request:
        """A request for :meth:`queue`, which cannot fail; raises what :meth:`add` raises. Any thread may call it."""
        request = new_request(prompt, params, tokenizer, self.max_model_len, self.config.vocab_size)
        self.scheduler.check(len(prompt), request.max_tokens)
        return request

    def queue(self, request: Request) -> None:
        """Takes a request of :meth:`prepare`: it runs with the next steps, unless it has ended meanwhile."""
        if request.finish_reason is not None:
            return
        with uninterrupted():
            request.id = self._next_id
            self.scheduler.add(request)
            self._next_id += 1

    def add_filled(self, length: int, params: SamplingParams) -> Request:
        """A request whose ``length`` prompt tokens nobody computes: its caches are filled with random rows, and it
        decodes from the next step on. For measuring decode; its tokens mean nothing.

        Raises:
            ValueError, CapacityError: as :meth:`add`, and ``CapacityError`` where there is no room right now.
        """
        prompt = [0] * length
        self._check_prompt(prompt, room=1)
        with uninterrupted():
            request = Request(self._next_id, prompt, params, arrival=time.perf_counter())
            self.scheduler.adopt(request)
            self._next_id += 1
            request.output.append(0)  # the token that a prefill would have sampled
        self.cache.fill_random(request.pages, self.options.seed + request.id)
        return request

    def check(self, prompt: list[int]) -> None:
        """Raises what :meth:`prefill` would raise for this prompt, and runs nothing."""
        self._check_prompt(prompt, room=0)
        self.scheduler.check(len(prompt), max_tokens=1)

    def step(self) -> list[Sampled]:
        """Runs one step; returns what was read of requests that had not ended before.

        With ``async_scheduling`` a decode step is launched before the tokens of the one before are read; returned is
        what has been read, sometimes nothing.

        An error of the whole step is raised, an interrupt too; nothing is lost then: what has been read is in the
        requests, and the next call goes on from there. What goes wrong in the sampling or the text of one request ends
        that one only, with ``finish_reason`` "error".
        """
        # While stages are timed, each step is read at once: its time must be its own.
        keep = 1 if self.async_scheduling and not observed() else 0
        sampled = self._read(keep)  # one too many is in flight where an interrupt has come between
        chunks = self.scheduler.due(self._scheduled)
        if not chunks:
            with record_function("schedule"), uninterrupted():
                self._scheduled = chunks = self.scheduler.schedule()
        plan = self.runner.plan(chunks)
        before = self._in_flight[-1] if self._in_flight else None
        if before is not None and not self.runner.runs_ahead(plan, before):
            return sampled + self._read(0)
        if not chunks:
            return sampled
        with record_function("launch"), interruptible():
            launched = self.runner.launch(plan, before)
        with uninterrupted():
            self._scheduled = []
            self.scheduler.computed(chunks)
            for request, indices in launched.indices.items():
                request.placeholders += indices
                request.uncertain += 0 if launched.verified is None else len(indices) - 1
            for request, rows in launched.last_rows.items():
                request.last_rows = rows
            for request, found in launched.prompt_logprobs.items():
                request.add_prompt_logprobs(found)
            if launched.indices:
                self.launched_ahead += bool(self._in_flight)
                self._in_flight.append(launched)
        # A step that samples nothing (a part of a prompt) does not keep what was sampled before it waiting; and on one
        # whose drafts the host has to know no other follows.
        follows = self.runner.num_drafts == 0 or launched.outcome is not None
        return sampled + self._read(keep if launched.indices and follows else 0)

    def _read(self, keep: int) -> list[Sampled]:
        """Reads the oldest steps in flight until ``keep`` are left."""
        read = []
        while len(self._in_flight) > keep:
            with record_function("read tokens"), interruptible():
                sampled = self._in_flight[0].read()
            with uninterrupted():
                indices = self._in_flight.pop(0).indices
                now = time.perf_counter()
                for one in sampled:
                    if not one.request.placeholders:
                        continue  # it was rewound to 0, and computes these again
                    del one.request.placeholders[: len(indices[one.request])]
                    if one.verified is not None:
                        one.request.uncertain -= len(indices[one.request]) - 1
                    if one.request.finish_reason is None:
                        self._take(one, now)
                        read.append(one)
        return read

    def _take(self, sampled: Sampled, now: float) -> None:
        """Gives a request its new tokens, up to the one that ends it."""
        found = sampled.verified
        if found is not None and found.offered:
            sampled.request.verified.append((found.offered, found.accepted))
        for token in sampled.tokens:
            ending = sampled.request.append(token, now, self.config.eos_token_ids)
            if ending is not None:
                self.finish(sampled.request, *ending)
                return
        if found is not None:
            self.scheduler.verified(sampled.request, found.drafts)

    def finish(
        self, request: Request, reason: str, error: str | None = None, stop_reason: int | str | None = None
    ) -> None:
        """Ends a request, in whatever state, and frees its pages; without effect on one that has ended."""
        with uninterrupted():
            if request.finish_reason is None:
                request.finish_reason, request.error, request.stop_reason = reason, error, stop_reason
                self.scheduler.finish(request)

    def fail(self, error: Exception) -> bool:
        """After an error of :meth:`step`: ends the requests of the step that could not be computed or read.

        Returns:
            False where there are none: it was no request's step that failed.
        """
        with uninterrupted():
            if self._scheduled:
                requests = [chunk.request for chunk in self._scheduled]
                self._scheduled = []
            else:
                requests = [request for samples in self._in_flight for request in samples.indices]
                self._in_flight = []
            failed = [request for request in requests if request.finish_reason is None]
            for request in failed:
                request.exception = error
                self.finish(request, "error", f"{type(error).__name__}: {error}")
        return bool(failed)

    def prefill(self, prompt: list[int]) -> torch.Tensor:
        """Prefills one prompt, alone, and forgets it.

        Returns:
            float32 CPU logits ``[vocab]`` after its last token, the same on every rank.
        """
        logits = None
        self.check(prompt)
        with uninterrupted(), self._chunks_alone(prompt) as chunks:
            for chunk in chunks:
                with interruptible():
                    logits = self.runner.last_logits([chunk])
        assert logits is not None
        return logits.cpu()

    def prompt_logits(self, prompt: list[int]) -> torch.Tensor:
        """float32 CPU logits ``[len, vocab]`` at every position of a prompt, the same on every rank."""
        self.check(prompt)
        into = torch.empty(len(prompt), self.config.vocab_size, dtype=torch.float32)
        block = max(1, self.workspace // (8 * self.config.vocab_size))
        with uninterrupted(), self._chunks_alone(prompt) as chunks:
            for chunk in chunks:
                with interruptible():
                    self.runner.all_logits(chunk, into, block)
        return into

    def prefill_plans(self, length: int) -> list[StepPlan]:
        """How the steps of a prefill of ``length`` tokens, alone, are divided over the ranks; computes nothing."""
        request = Request(-1, [0] * length, SamplingParams())
        ranks = self.mesh.cp_ranks(0)
        most = self.options.max_num_batched_tokens * self.mesh.cp_size
        chunks = [Chunk(request, first, min(most, length - first), ranks) for first in range(0, length, most)]
        return [self.runner.plan([chunk]) for chunk in chunks]

    @contextmanager
    def _chunks_alone(self, prompt: list[int]) -> Iterator[Iterator[Chunk]]:
        with (
            self.progress(len(prompt), "tokens", "prefill") as bar,
            closing(chunks_alone(self.scheduler, prompt, bar)) as chunks,
        ):
            yield chunks

    def _check_prompt(self, prompt: list[int], room: int) -> None:
        check_prompt(prompt, room, self.max_model_len, self.config.vocab_size)
