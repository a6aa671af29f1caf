"""Runs steps: from chunks to sampled tokens, and to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.requests.samples import StepResult
from dsa_engine.engine.requests.scheduler import Step
from dsa_engine.engine.sampling.grammar import GrammarMasks
from dsa_engine.engine.sampling.sampler import Sampler, prompt_logprobs
from dsa_engine.engine.sampling.selections import recorded, recorder_of
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.speculation.drafter import Drafter
from dsa_engine.engine.steps.batch import build_batch
from dsa_engine.engine.steps.context_buckets import bucket_of, own_bucket
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.micro_batches import MicroBatches
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.engine.steps.static_rows import eager_batch
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.sampling_params import HAS_GRAMMAR, NEEDS_HOST, RECORDS


@dataclass(eq=False)
class ModelRunner:
    """Every rank calls the same methods with the same chunks."""

    model: Model
    cache: KVCache
    graphs: DecodeGraphs | None = None  # runs decode steps of static shapes; None: all run kernel by kernel
    relaxed: RelaxedAcceptance | None = None  # replaces sampled tokens by likely drafts; None accepts drafts strictly
    micro_batches: MicroBatches | None = None  # which steps are cut in two; None: none
    grammars: GrammarMasks | None = None  # the forms of outputs; None: requests have none
    num_drafts: int = 0  # maximum number of drafts of a request in a step; 0: the MTP modules do not run
    hooks: list[Callable[[StepPlan], None]] = field(default_factory=list)  # before every forward pass, with its plan

    def __post_init__(self) -> None:
        self._config, self._mesh = self.model.config, self.model.runtime.mesh
        self._sampler = Sampler(self._config, self._mesh, self.relaxed, self.grammars)
        self.drafter = None
        if self.model.mtp:
            self.drafter = Drafter(self.model, self.cache, self.hooks, self._sampler.counts, self.relaxed)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.runtime.dtype

    def plan(self, step: Step) -> StepPlan:
        rank, world, config = self._mesh.rank, self._mesh.world_size, self._config
        if step.decode is None:
            max_rows = 1 + self.num_drafts
            cuts = None if self.micro_batches is None else self.micro_batches.cuts(step.chunks, max_rows)
            plan = StepPlan.of(step.chunks, rank, world, config, max_rows, cuts)
            # With hot rows not: a chunk in the middle of a prompt may write spilled pages.
            graphs = None if self.cache.hot is not None or self.num_drafts else self.graphs
            if graphs is not None and self._is_static(plan) and not plan.records:
                plan = plan.padded(config, graphs.contexts)
        else:
            bucket = None
            if self.graphs is not None and self._mesh.static_decode and self._fits_graph(step):
                bucket = bucket_of(step.decode, self.graphs.contexts, step.num_drafts)
            # Its rows are those of several ranks, or what they select lies in hot rows, not where tables say.
            if bucket is None and (self.cache.group is not None or self.cache.hot is not None):
                bucket = own_bucket(step.decode)
            plan = StepPlan.of_decode(step.decode, rank, world, config, bucket, self._mesh.dcp.ranks)
        if self.micro_batches is not None and not plan.records:
            plan = self.micro_batches.cut(plan, config)
        plan.num_drafts = step.num_drafts
        for hook in self.hooks:
            hook(plan)
        return plan

    def _fits_graph(self, step: Step) -> bool:
        """Whether a graph can run a step of static shapes. With drafts the graph contains the sampling too, so a step
        whose sampling needs the host runs eagerly; so does one that records selections."""
        assert step.decode is not None
        return not step.decode.asks & RECORDS and (step.num_drafts == 0 or not step.decode.asks & NEEDS_HOST)

    def runs_ahead(self, plan: StepPlan, before: StepResult) -> bool:
        """Whether this step can be launched without waiting for the device.

        A step without graphs of more than some thousand tokens waits, as it counts the tokens of each expert first.
        With drafts only a graph can follow, and only a step that has left an outcome with as many; with drafts of a
        request with a grammar none can, as the host makes masks for them. A prefill waits, even of one token: if its
        request has lost its pages under the step in flight, the token of that step is not to be taken.
        """
        if plan.decode is None or not self._is_static(plan) or plan.records or plan.num_drafts != before.drafted:
            return False
        if self.graphs is None:
            return plan.num_drafts == 0
        if plan.num_drafts == 0:
            return self.graphs.ready(plan.bucket)
        if not plan.for_graph or self.drafter is None or not before.follows or plan.decode.asks & HAS_GRAMMAR:
            return False
        return self.graphs.ready(self.drafter.key(plan))

    def _is_static(self, plan: StepPlan) -> bool:
        """Whether the host knows every shape of this step: a decode step whose dispatch does not depend on routing."""
        return plan.decodes and self._mesh.static_decode

    @torch.inference_mode()
    def launch(self, plan: StepPlan, before: StepResult | None = None) -> StepResult:
        """Computes a step and samples the next tokens of its requests, the same on every rank. ``before``: the step in
        flight, whose tokens have not been read."""
        if plan.num_drafts and plan.for_graph:
            assert self.drafter is not None and self.graphs is not None and plan.bucket is not None
            masks, wanted = None, plan.own.wanted
            if self.grammars is not None:
                masks = self.grammars.masks(wanted, [one.row for one in wanted], plan.bucket.rows)
            return self.drafter.run(plan, None if before is None else before.outcome, self.graphs, masks)
        sampled = None if before is None else before.tokens
        batch, hidden = self.forward(plan, sampled)
        samples = self._sampler.sample(plan, self.sampled_logits(plan, hidden), before)
        if of_prompts := prompt_logprobs(self.model, plan, hidden):
            samples = replace(samples, prompt_logprobs=of_prompts)
        if isinstance(batch, ForwardBatch) and batch.recorder is not None:
            layers, size = self._config.num_hidden_layers, self.cache.page_size
            selections = recorded(batch.recorder, plan, layers, size, self._mesh)
            samples, batch.recorder = replace(samples, selections=selections), None  # MTP modules record nothing
        if plan.num_drafts == 0 and (plan.decode is not None or self.num_drafts == 0):
            return samples
        assert self.drafter is not None
        if not isinstance(batch, ForwardBatch):  # MTP modules run the step whole
            batch = self._batch(replace(plan, micro_batches=None), sampled)
            assert isinstance(batch, ForwardBatch)
        return self.drafter.draft(plan, batch, hidden, samples, plan.num_drafts)

    @torch.inference_mode()
    def last_logits(self, chunk: Chunk) -> torch.Tensor | None:
        """Computes a chunk of one request; returns float32 logits ``[vocab]`` after its last token, on every rank; None
        if the chunk does not reach it."""
        plan = self.plan(Step([chunk]))
        _, hidden = self.forward(plan)
        logits = self.sampled_logits(plan, hidden)
        if plan.samples.max_rows == 0:
            return None
        mine = logits[:1] if logits.shape[0] else logits.new_zeros(1, self._config.vocab_size)
        return self._mesh.world.all_gather(mine)[int(plan.samples.ranks[0])]

    @torch.inference_mode()
    def all_logits(self, chunk: Chunk, into: torch.Tensor, block: int) -> None:
        """Computes a chunk and writes the logits at its positions to ``into [prompt, vocab]`` (float32, CPU), on every
        rank; about ``block`` rows of all ranks together are gathered and multiplied by the LM head at a time."""
        plan = self.plan(Step([replace(chunk, num_logits=chunk.length)]))
        _, hidden = self.forward(plan)
        rows = upload(plan.own.rows_with_logits, hidden.device)
        plans = map(plan.of_rank, range(len(plan.rows)))
        positions = [rank_plan.positions[rank_plan.rows_with_logits] for rank_plan in plans]
        longest = plan.samples.max_rows
        step = max(1, min(longest, block // len(positions)))  # no more padding than the ranks' plans differ by
        for first in range(0, longest, step):
            mine = hidden[rows[first : first + step]]
            gathered = self._mesh.world.all_gather(F.pad(mine, (0, 0, 0, step - mine.shape[0])))
            logits = self.model.logits(gathered).cpu()
            for rank, theirs in enumerate(positions):
                part = theirs[first : first + step]
                into[part] = logits[rank * step : rank * step + len(part)]

    def forward(
        self, plan: StepPlan, sampled: torch.Tensor | None = None
    ) -> tuple[ForwardBatch | MicroBatchPair | None, torch.Tensor]:
        """The batch of a step, None if it is padded, and the normed hidden states ``[T, hidden]``."""
        if self.graphs is not None and plan.for_graph:
            return None, self.graphs.forward(plan, sampled)
        batch = self._batch(plan, sampled)
        if plan.records and isinstance(batch, ForwardBatch):
            batch.recorder = recorder_of(plan, batch, self.cache.page_size, self._config.index_topk)
        return batch, self.model(batch, self.cache)

    def _batch(self, plan: StepPlan, sampled: torch.Tensor | None) -> ForwardBatch | MicroBatchPair:
        if plan.bucket is not None:
            return eager_batch(plan, self.model, self.cache, sampled)
        repeats = not self.hooks  # what watches sees each layer run
        return build_batch(plan, self._config, self._mesh, self.cache, sampled, repeats)

    def sampled_logits(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens to choose on this rank, vocab]``."""
        padded_rows = plan.samples.rows_of(self._mesh.tp.ranks)
        if padded_rows == 0:
            return hidden.new_empty(0, self._config.vocab_size, dtype=torch.float32)
        rows = plan.own.rows_with_logits
        if torch.equal(rows, torch.arange(len(rows))):  # as a rule in decode
            return self.model.logits(hidden[: len(rows)], padded_rows)
        return self.model.logits(hidden[upload(rows, hidden.device)], padded_rows)
