"""Runs steps: from chunks to sampled tokens, and to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.batch import ForwardBatch, StepPlan
from dsa_engine.cache import KVCache
from dsa_engine.config import ModelConfig
from dsa_engine.model import Model
from dsa_engine.parallel import Mesh
from dsa_engine.sampling import sample
from dsa_engine.sequence import Chunk, Sequence


class ModelRunner:
    """One rank's model and caches. Every rank calls the same methods with the same chunks."""

    def __init__(self, model: Model, cache: KVCache, config: ModelConfig, mesh: Mesh, seed: int):
        self._model = model
        self._cache = cache
        self._config = config
        self._mesh = mesh
        self._seed = seed

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> list[tuple[Sequence, int]]:
        """Computes the chunks and samples where a sequence's known tokens end: the same pairs on every rank."""
        plan = self.plan(chunks)
        hidden = self._forward(plan)
        samples = plan.ranks[self._mesh.rank].samples
        logits = self._sampled_logits(plan, hidden)
        chosen = [self._choose(sequence, row) for (_, sequence), row in zip(samples, logits, strict=True)]
        return self._exchange(plan, chosen)

    @torch.inference_mode()
    def last_logits(self, chunks: list[Chunk]) -> torch.Tensor | None:
        """Computes the chunks of one sequence; float32 logits ``[vocab]`` after its last token, on every rank.

        None where the chunks do not reach the last token.
        """
        plan = self.plan(chunks)
        hidden = self._forward(plan)
        logits = self._sampled_logits(plan, hidden)
        owners = [rank for rank, p in enumerate(plan.ranks) if p.samples]
        if not owners:
            return None
        mine = logits[:1] if logits.shape[0] else logits.new_zeros(1, self._config.vocab_size)
        return self._mesh.ep.all_gather(mine)[owners[0]]

    @torch.inference_mode()
    def all_logits(self, chunk: Chunk, into: torch.Tensor, block: int) -> None:
        """Computes a chunk and writes the logits of its positions to ``into [prompt, vocab]`` (float32, CPU), on
        every rank.

        About ``block`` rows, of all ranks together, are gathered and multiplied with the LM head at a time.
        """
        plan = self.plan([chunk])
        hidden = self._forward(plan)
        positions = [share.positions() for share in plan.ranks]
        step = max(1, block // len(plan.ranks))
        for first in range(0, max(share.rows for share in plan.ranks), step):
            mine = hidden[first : first + step]
            gathered = self._mesh.ep.all_gather(F.pad(mine, (0, 0, 0, step - mine.shape[0])))
            logits = self._model.logits(gathered).cpu()
            for rank, theirs in enumerate(positions):
                part = theirs[first : first + step]
                into[part] = logits[rank * step : rank * step + len(part)]

    def plan(self, chunks: list[Chunk]) -> StepPlan:
        """All ranks' shares of the chunks."""
        return StepPlan.of(chunks, self._mesh.world_size, self._config, self._mesh.config.cp_layout)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        batch = ForwardBatch.build(plan, self._config, self._mesh, self._cache.page_size)
        return self._model(batch, self._cache)

    def _sampled_logits(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[samples of this rank, vocab]``."""
        tp = self._mesh.tp
        rows = torch.tensor([row for row, _ in plan.ranks[self._mesh.rank].samples], dtype=torch.int64)
        most = max(len(plan.ranks[r].samples) for r in tp.ranks)
        if most == 0:
            return hidden.new_empty(0, self._config.vocab_size, dtype=torch.float32)
        wanted = hidden[rows.to(hidden.device)]
        everybodys = tp.all_gather(F.pad(wanted, (0, 0, 0, most - len(rows))))
        first = tp.index * most
        return self._model.logits(everybodys)[first : first + len(rows)]

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> int:
        params = sequence.params
        if len(sequence.output) < params.min_tokens:
            ends = torch.tensor([*self._config.eos_token_ids, *(params.stop_token_ids or ())], dtype=torch.int64)
            logits[ends[ends < logits.shape[0]].to(logits.device)] = float("-inf")
        seed = self._seed + sequence.id if params.seed is None else params.seed
        return sample(logits, params, seed, len(sequence))

    def _exchange(self, plan: StepPlan, chosen: list[int]) -> list[tuple[Sequence, int]]:
        """Every rank's tokens, to every rank."""
        most = max(len(p.samples) for p in plan.ranks)
        if most == 0:
            return []
        mine = torch.tensor(chosen + [-1] * (most - len(chosen)), dtype=torch.int64, device=self._mesh.device)
        tokens = self._mesh.ep.all_gather(mine).view(-1, most).tolist()
        return [
            (sequence, tokens[rank][i])
            for rank, p in enumerate(plan.ranks)
            for i, (_, sequence) in enumerate(p.samples)
        ]
