"""The engine: one rank's model, caches and scheduler, and the step that drives them.

Under ``torchrun`` every rank makes the same engine and calls the same methods with the same arguments.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from dsa_engine.checkpoint import CheckpointReader, DummyReader
from dsa_engine.engine.batch import StepPlan
from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.interrupts import uninterrupted
from dsa_engine.engine.memory import default_cache_memory, default_workspace, enough_memory
from dsa_engine.engine.pages import pages_for
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.sampler import Sampled
from dsa_engine.engine.scheduler import Scheduler
from dsa_engine.engine.steps import Steps
from dsa_engine.errors import CapacityError
from dsa_engine.model.config import DTYPES, ModelConfig, read_config_json
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, cache_format
from dsa_engine.model.layers import Runtime
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.quantization import Unquantized
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.sizes import format_bytes, parse_bytes


class Engine:
    """Loads a model and runs requests on it.

    Args:
        folder: a Hugging Face model folder; with ``load_format="dummy"`` its ``config.json`` is enough.
        options: see :class:`dsa_engine.LLM`.
    """

    def __init__(self, folder: Path, options: EngineOptions):
        self.options = options
        self.config = config = ModelConfig.from_pretrained(folder, options.hf_overrides)
        self._refuse_extra_layers(folder)
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        if self.max_model_len > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the model's {config.max_position_embeddings} positions; "
                "lower it, or raise max_position_embeddings with hf_overrides"
            )
        self.mesh = Mesh.create(options.parallel, options.device)
        self.mesh.limit_routing(config.n_group, config.topk_group)
        device = self.mesh.device
        self.dtype = DTYPES.get(options.dtype, config.dtype if device.type == "cuda" else torch.float32)
        workspace = options.workspace
        self.workspace = default_workspace(device) if workspace is None else parse_bytes(workspace, "workspace")

        started = time.perf_counter()
        with torch.inference_mode():
            runtime = Runtime(
                self.mesh,
                self.dtype,
                Unquantized(self.dtype, device),
                self.workspace,
                options.overlap_shared_expert,
                options.overlap_indexer,
            )
            with enough_memory("the weights of this rank", "use more ranks, another dtype, or fewer layers"):
                self.model = Model(config, runtime)
            self.bytes_read = self._load(folder)
        self.load_seconds = time.perf_counter() - started
        stored = cache_format(config, self.dtype)
        pages = self._cache_pages(cache_bytes_per_token(config, stored))
        with enough_memory("the caches", "lower cache_memory"):
            self.cache = KVCache(config, stored, pages, options.page_size, device)
        self.scheduler = Scheduler(
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            cp_size=self.mesh.cp_size,
            pages=self.cache.pages,
            page_size=options.page_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_prefill_share=options.max_prefill_share,
        )
        self.graphs = None
        if device.type == "cuda" and not options.enforce_eager:
            self.graphs = DecodeGraphs(self.model, self.cache, config, self.mesh)
        self.runner = ModelRunner(self.model, self.cache, config, self.mesh, options.seed, self.graphs)
        ahead = device.type == "cuda" and options.async_scheduling and self.mesh.static_decode
        self.steps = Steps(self.scheduler, self.runner, config.eos_token_ids, ahead)
        self._next_id = 0

    def progress(self, total: int, unit: str, title: str, shown: bool = True) -> tqdm:
        """A progress bar on stderr; only on rank 0, on a terminal, and where it was not turned off."""
        off = not (shown and self.options.progress and self.mesh.rank == 0)
        return tqdm(total=total, unit=unit, desc=title, disable=True if off else None, leave=False, dynamic_ncols=True)

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        """Queues a request.

        Raises:
            ValueError: an empty prompt, token ids that the model does not have, or no room below ``max_model_len``.
            CapacityError: it does not fit in the cache even alone.
        """
        self._check_prompt(prompt, room=1)
        room = self.max_model_len - len(prompt)
        if params.max_tokens > room:
            # As in vLLM: the model's length ends a request that asks for more.
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        with uninterrupted():
            request = Request(self._next_id, prompt, params, arrival=time.perf_counter())
            self.scheduler.add(request)
            self._next_id += 1
        return request

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
        """Runs one step; returns what was sampled. Sequences with a ``finish_reason`` are done.

        With ``async_scheduling`` a decode step is launched before the tokens of the one before are read; returned is
        what has been read, sometimes nothing.

        An error of the whole step is raised, an interrupt too; nothing is lost then: what has been read is in the
        requests, and the next call goes on from there. What goes wrong in the sampling of one request ends that one
        only, with ``finish_reason`` "error".
        """
        return self.steps.step()

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request and frees its pages."""
        self.steps.finish(request, reason, error)

    def prefill(self, prompt: list[int]) -> torch.Tensor:
        """Prefills one prompt, alone, and forgets it.

        Returns:
            float32 CPU logits ``[vocab]`` after its last token, the same on every rank.
        """
        logits = None
        with closing(self._prefill_alone(prompt)) as chunks:
            for chunk in chunks:
                logits = self.runner.last_logits([chunk])
        assert logits is not None
        return logits.cpu()

    def prompt_logits(self, prompt: list[int]) -> torch.Tensor:
        """float32 CPU logits ``[len, vocab]`` at every position of a prompt, the same on every rank."""
        self.check(prompt)
        into = torch.empty(len(prompt), self.config.vocab_size, dtype=torch.float32)
        block = max(1, self.workspace // (8 * self.config.vocab_size))
        with closing(self._prefill_alone(prompt)) as chunks:
            for chunk in chunks:
                self.runner.all_logits(chunk, into, block)
        return into

    def prefill_plans(self, length: int) -> list[StepPlan]:
        """How the steps of a prefill of ``length`` tokens, alone, are divided over the ranks; computes nothing."""
        request = Request(-1, [0] * length, SamplingParams())
        ranks = self.mesh.cp_ranks(0)
        most = self.options.max_num_batched_tokens * self.mesh.cp_size
        chunks = [Chunk(request, first, min(most, length - first), ranks) for first in range(0, length, most)]
        return [self.runner.plan([chunk]) for chunk in chunks]

    def _prefill_alone(self, prompt: list[int]) -> Generator[Chunk, None, None]:
        """The chunks of a prompt's prefill, each to be run before the next is asked for. Close it at the end."""
        if self.scheduler.has_work:
            raise RuntimeError("the engine is busy with other requests; finish them first")
        self._check_prompt(prompt, room=0)
        request = Request(-1, prompt, SamplingParams(max_tokens=1))
        try:
            with uninterrupted():
                self.scheduler.add(request)
            with self.progress(len(prompt), "tok", "prefill") as bar:
                while not request.prefilled:
                    with uninterrupted():
                        chunks = self.scheduler.schedule()
                    yield chunks[0]
                    with uninterrupted():
                        self.scheduler.computed(chunks)
                        if chunks[0].end == len(prompt):
                            self.scheduler.finish(request)
                    bar.update(chunks[0].length)
        finally:
            with uninterrupted():
                self.scheduler.finish(request)

    def _check_prompt(self, prompt: list[int], room: int) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token")
        if len(prompt) + room > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, max_model_len is {self.max_model_len}"
                + (f", of which at least {room} must be left for the output" if room else "")
                + "; shorten the prompt or raise max_model_len"
            )
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= self.config.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"token id {wrong} is out of range; the vocabulary has ids 0 … {self.config.vocab_size - 1}"
            )

    def _refuse_extra_layers(self, folder: Path) -> None:
        # The layer behind the last one in a checkpoint is its MTP module: it would load, and be wrong.
        layers = read_config_json(folder).get("num_hidden_layers")
        if self.options.load_format == "auto" and isinstance(layers, int) and self.config.num_hidden_layers > layers:
            raise ValueError(
                f"hf_overrides ask for {self.config.num_hidden_layers} layers, the checkpoint has {layers}; "
                "ask for fewer, or use load_format='dummy'"
            )

    def _load(self, folder: Path) -> int:
        """Loads this rank's weights; returns the bytes that it read."""
        sources = list(self.model.weight_sources())
        dummy = self.options.load_format == "dummy"
        reader = DummyReader(self.options.seed) if dummy else CheckpointReader(folder, self.config.weight_block_size)
        with self.progress(len(sources), "tensor", "loading") as bar:
            for source in sources:
                reader.load(source)
                bar.update()
        if isinstance(reader, CheckpointReader):
            reader.close()
        self.model.weights_loaded()
        return reader.bytes_read

    def _cache_pages(self, token_bytes: int) -> int:
        """Pages of the cache: the same on all ranks, so what the poorest of them affords."""
        options, config, page_size = self.options, self.config, self.options.page_size
        one = page_size * token_bytes
        if options.cache_memory is None:
            tokens, device = options.max_num_batched_tokens, self.mesh.device
            # all_gather brings every rank's tokens; all_to_all as many as this rank has, twice that where it is skewed.
            ranks = self.mesh.world_size
            meeting = tokens * (ranks if options.parallel.moe_dispatch == "all_gather" else min(ranks, 2))
            memory = default_cache_memory(config, tokens, meeting, self.dtype, device, self.workspace)
        else:
            memory = parse_bytes(options.cache_memory, "cache_memory")
        useful = options.max_num_seqs * pages_for(self.max_model_len, page_size)
        mine = torch.tensor([min(memory // one, useful)], dtype=torch.int64, device=self.mesh.device)
        pages = int(self.mesh.ep.all_gather(mine).min())
        if pages == 0:
            raise CapacityError(
                f"the cache is too small: a page of {page_size} tokens takes {format_bytes(one)}, "
                f"{format_bytes(memory)} are there for it; raise cache_memory or use a smaller page_size"
            )
        return pages
