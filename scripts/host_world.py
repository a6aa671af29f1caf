"""One rank's host work in a world of any size: a real engine and scheduler, with a model that computes nothing.

The engine is started as rank 0 of an emulated world (``emulation/``) with a tiny configuration. Hidden states and
logits are constant, and a padded decode step is "replayed" as a CUDA graph is: the first step of a bucket runs, later
ones return its result. So all of the host's work is there: scheduling, planning, batches, block tables, the sampler's
calls, reading tokens. Pinning memory and launching on a CUDA device are not.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.demo import demo_folder
from dsa_engine.engine.calls.async_calls import PreparedPrompt
from dsa_engine.engine.requests.limits import Add, new_requests
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.llm import LLM
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, cache_format
from dsa_engine.model.model import Model
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.messages import NewRequest
from dsa_engine.server.process import Relay

WARM_UP = 8  # steps before any is measured
PAGE_SIZE = 64
TOKEN = 40  # the token of every step: one that has a text

_TINY = {"n_routed_experts": 1024, "index_topk": 2048, "vocab_size": 64, "max_position_embeddings": 1 << 20}
_TINY |= dict.fromkeys(("num_hidden_layers", "first_k_dense_replace", "num_attention_heads"), 1)
_TINY |= dict.fromkeys(("num_key_value_heads", "index_n_heads"), 1)
_TINY |= dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
_TINY |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16)


class _NullModel(Model):
    """Computes nothing."""

    begun = 0.0  # thread time at which the last forward pass of a step began

    def forward(self, batch: ForwardBatch | MicroBatchPair, cache: KVCache, layers: Any = None) -> torch.Tensor:
        self.begun = time.thread_time()
        parts = [batch] if isinstance(batch, ForwardBatch) else [make() for make in batch.batches]
        return torch.zeros(sum(part.rows for part in parts), self.config.hidden_size)

    def draft(
        self, module: int, hidden: torch.Tensor, batch: ForwardBatch, cache: KVCache
    ) -> tuple[torch.Tensor, None]:
        return hidden, None

    def logits(self, hidden: torch.Tensor, padded_rows: int | None = None, head: Any = None) -> torch.Tensor:
        logits = torch.zeros(hidden.shape[0], self.config.vocab_size)
        logits[:, TOKEN] = 1.0
        return logits


class _NullGraphs(DecodeGraphs):
    """Replays that compute nothing."""

    def __init__(self, model: Model, cache: KVCache, contexts: ContextBuckets):
        super().__init__(model, cache, capture=False, contexts=contexts)
        # Thread time of each step's launch, before and after it; the time between is the device's.
        self.marks: list[tuple[float, float]] = []
        self.count_calls = False  # whether the launching thread counts the Python functions that it calls, from now on
        self.calls: list[int] = []  # the number of them so far, at each launch
        self._results: dict[Hashable, torch.Tensor] = {}

    def run(self, name: Hashable, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        begun = time.thread_time()
        sys.setprofile(None)
        if name not in self._results:
            self._results[name] = function()
        if self.count_calls:
            self.calls.append(self.calls[-1] if self.calls else 0)
            sys.setprofile(self._called)
        self.marks.append((begun, time.thread_time()))
        return self._results[name]

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        self.calls[-1] += event == "call"


class HostWorld(AbstractContextManager["HostWorld"]):
    """An engine that is rank 0 of a world, with requests that decode on every rank.

    Args:
        requests: requests that each rank owns.
        steps: maximum number of decode steps to come.
        cp_size: ranks that prefill together; default: the world, at most 64.
        pages: of the cache; default: enough for all requests.
        options: of the engine.
    """

    def __init__(
        self,
        world: int,
        requests: int,
        steps: int,
        *,
        drafts: int = 0,
        cp_size: int | None = None,
        pages: int | None = None,
        **options: Any,
    ):
        self.world, self.requests, self.rng = world, requests, np.random.default_rng(0)
        self.cp_size = cp_size or min(world, 64)
        parallel = EmulatedConfig(emulate_world=world, cp_size=self.cp_size, decode_dispatch="all_gather")
        self.max_tokens = (1 + drafts) * (steps + requests + 4)  # a step may come between two waves of :meth:`fill`
        longest = 16 + 2 * PAGE_SIZE + self.max_tokens
        pages = pages or (requests + 2 * self.cp_size + 4) * cdiv(longest, PAGE_SIZE) + 8
        keys = _TINY | options.pop("hf_overrides", {})
        if drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        config = ModelConfig.from_pretrained(demo_folder(), keys)
        config = config.with_mtp(SpeculativeConfig(**options["speculative_config"]).modules(1) if drafts else 0)
        token_bytes = cache_bytes_per_token(config, cache_format(config, torch.float32))
        fixed: dict[str, Any] = {
            "device": "cpu",
            "load_format": "dummy",
            "hf_overrides": keys,
            "max_num_seqs": world * requests + 64,
            "max_prefill_share": 1.0,
            "page_size": PAGE_SIZE,
            "cache_memory": pages * PAGE_SIZE * token_bytes,
            "enable_prefix_caching": False,
            "progress": False,
        }
        self.llm = LLM(demo_folder(), parallel=parallel, **fixed | options)
        self.engine = self.llm.engine
        self.model: Any = self.engine.model
        self.model.__class__ = _NullModel
        self.graphs = _NullGraphs(self.model, self.engine.cache, ContextBuckets(self.engine.max_model_len, PAGE_SIZE))
        self.engine.runner.graphs = self.graphs
        self.engine.async_scheduling = True
        self.launch_seconds = 0.0  # the last launch: time of the device, not of the host
        self.running: list[Request] = []  # in order of arrival

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def prompt(self, length: int) -> list[int]:
        return self.rng.integers(4, self.model.config.vocab_size, length).tolist()

    def fill(self) -> None:
        """Adds requests, in waves of one or two for each rank, until each rank owns its share and all decode. The
        borders of their pages fall on different steps."""
        params = greedy(self.max_tokens)
        groups, spread = self.world // self.cp_size, range(self.cp_size)
        for wave in range(0, self.requests, 2):
            more = sorted((wave * 5 + rank * PAGE_SIZE // self.cp_size) % PAGE_SIZE for rank in spread)
            lengths = [16 + one for one in more for _ in range(groups)]
            lengths += [16 + 2 * PAGE_SIZE - one for one in more for _ in range(groups)]
            if wave + 1 == self.requests:
                lengths = [80] * self.world
            wanted = self.engine.num_prefilled_tokens + sum(lengths)
            for length in lengths:
                self.running.append(self.engine.add(self.prompt(length), params))
                self.running[-1].delivery = "nothing"  # no caller waits on this rank
            while self.engine.num_prefilled_tokens < wanted:
                self.engine.step()

    def step(self) -> float:
        """Seconds of processor time of this thread in ``Engine.step``, without the launch."""
        self.graphs.marks.clear()
        begun = time.thread_time()
        self.engine.step()
        seconds = time.thread_time() - begun
        self.launch_seconds = sum(after - before for before, after in self.graphs.marks)
        return seconds - self.launch_seconds

    def arrive(self) -> float:
        """The oldest request ends, and another one comes; returns the seconds of processor time of both here."""
        (add,) = new_requests(self.prompt(80), greedy(self.max_tokens), None, self.engine.limits)
        add.id = next(self.engine.ids)
        begun = time.thread_time()
        self.engine.finish(self.running.pop(0), "abort")
        self.running.append(self.engine.queue(add))
        self.running[-1].delivery = "nothing"
        return time.thread_time() - begun

    def calls(self, steps: int, before: Callable[[], object] = float) -> float:
        """Python functions called in a step, on average."""
        count = 0

        def called(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call"

        for _ in range(steps):
            before()
            sys.setprofile(called)
            try:
                self.engine.step()
            finally:
                sys.setprofile(None)
        return count / steps

    def turns(self, steps: int) -> list[float]:
        """Seconds of processor time of the loop's thread between two launches, with a caller here for as many requests
        as a rank owns: messages, ``Engine.step``, tokens handed over. Ends the world."""
        called = [self.running.pop() for _ in range(self.requests)]
        for request in called:
            self.engine.finish(request, "abort")
        drafts = self.engine.runner.num_drafts
        params = greedy((1 + drafts) * (steps + 2))
        self.graphs.marks.clear()
        self.llm.generate([{"prompt_token_ids": self.prompt(80)} for _ in called], params, use_tqdm=False)
        marks = self.graphs.marks[-steps:]
        return [begun - before for (_, before), (begun, _) in zip(marks, marks[1:], strict=False)]

    def streamed(self, steps: int, relayed: bool) -> tuple[float, float]:
        """Seconds of processor time of the loop's thread, a median, and Python functions that it calls, a mean, between
        two launches, with a caller for every request of the world in place of :meth:`fill`: tasks of an event loop
        here or, if ``relayed``, another process, which only listens. Ends the world."""
        count, params = self.world * self.requests, greedy(self.max_tokens)
        adds = [new_requests(self.prompt(80), params, None, self.engine.limits)[0] for _ in range(count)]
        graphs, relay = self.graphs, Relay(self.llm) if relayed else None

        async def stream(add: Add) -> None:
            with suppress(RuntimeError):  # the world ends
                async for _ in self.llm.pieces_of([PreparedPrompt(None, [add], self.llm.tokenizer)]):
                    pass

        async def stream_all() -> None:
            await asyncio.gather(*map(stream, adds))

        callers = threading.Thread(target=lambda: asyncio.run(stream_all()))
        if relay is None:
            callers.start()
        else:
            relay._take([NewRequest.of(replace(add, id=number)) for number, add in enumerate(adds)])
        while len(self.engine.scheduler.decoding) < count and self.llm.loop.error is None:
            time.sleep(0.01)
        for counts in (False, True):
            graphs.count_calls = counts
            graphs.marks.clear()
            while len(graphs.marks) <= steps + WARM_UP:
                time.sleep(0.01)
                if len(self.engine.scheduler.decoding) < count:
                    raise ValueError("streams have ended before all was measured; give more steps")
            if not counts:
                marks = graphs.marks[WARM_UP : steps + WARM_UP + 1]
        self.llm.close()
        if relay is None:
            callers.join()
        else:
            relay.close()
        seconds = [begun - before for (_, before), (begun, _) in pairwise(marks)]
        return statistics.median(seconds), (graphs.calls[steps] - graphs.calls[0]) / steps

    def before_launch(self, length: int) -> float:
        """Seconds of processor time from the beginning of a step that prefills a whole prompt to the model's first
        launch. The request ends with its first token."""
        request = self.engine.add(self.prompt(length), greedy(1))
        before, begun = self.engine.num_prefilled_tokens, time.thread_time()
        self.engine.step()
        seconds = self.model.begun - begun
        if self.engine.num_prefilled_tokens - before < length:
            raise ValueError(f"a prompt of {length} tokens is not computed in one step; raise max_num_batched_tokens")
        while request.finish_reason is None:
            self.engine.step()
        return seconds


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
