"""Runs steps: from chunks to sampled tokens, and to logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.batch import ForwardBatch, StepPlan
from dsa_engine.cache import KVCache
from dsa_engine.config import ModelConfig
from dsa_engine.decode_graphs import DecodeGraphs
from dsa_engine.model import Model
from dsa_engine.parallel import Mesh
from dsa_engine.sampling import log_probabilities, sample
from dsa_engine.sequence import Chunk, Sequence

# Codes in place of a token, where a request's sampling went wrong.
_NOT_FINITE, _NOTHING_LEFT, _RAISED = -1, -2, -3
_ERRORS = {
    _NOT_FINITE: "the model's logits for its next token are not finite (inf or nan)",
    _NOTHING_LEFT: "no token is left to sample: min_tokens with its stop_token_ids forbids every one",
}


class Sampled(NamedTuple):
    """What a step has sampled for one sequence: a token, or the error that this sequence ends with."""

    sequence: Sequence
    token: int
    logprobs: dict[int, float] | None  # by token id, as in RequestOutput.logprobs; None where they were not asked for
    error: str | None


class ModelRunner:
    """One rank's model and caches. Every rank calls the same methods with the same chunks.

    Args:
        model, cache, config, mesh: of the engine.
        seed: of requests without a seed of their own.
        graphs: runs the decode steps that it takes; None to run every step kernel by kernel.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: ModelConfig,
        mesh: Mesh,
        seed: int,
        graphs: DecodeGraphs | None = None,
    ):
        self._model = model
        self._cache = cache
        self._config = config
        self._mesh = mesh
        self._seed = seed
        self._graphs = graphs

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> list[Sampled]:
        """Computes the chunks and samples where a sequence's known tokens end: the same on every rank."""
        plan = self.plan(chunks)
        hidden = self._forward(plan)
        return self._sample(plan, self._sampled_logits(plan, hidden))

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
        step = StepPlan.of(chunks, self._mesh.world_size, self._config, self._mesh.config.cp_layout)
        self._mesh.begin_step([share.rows for share in step.ranks])
        return step

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        if self._graphs is not None and self._graphs.takes(plan):
            return self._graphs.forward(plan)
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

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> list[Sampled]:
        """Chooses the tokens of this rank's rows ``logits [n, vocab]``, which it changes, and exchanges everybody's.

        The tokens stay on the device until all are there: one host transfer a step, unless more is asked for.
        """
        everybodys = [(rank, i, s) for rank, p in enumerate(plan.ranks) for i, (_, s) in enumerate(p.samples)]
        most = max(len(p.samples) for p in plan.ranks)
        if most == 0:
            return []
        mine = [sequence for rank, _, sequence in everybodys if rank == self._mesh.rank]
        asked = [s.params.logprobs for _, _, s in everybodys if s.params.logprobs is not None]
        unmodified = logits.clone() if asked else logits
        tokens, errors = self._choose(mine, logits)
        spare = most - len(mine)
        codes = self._mesh.ep.all_gather(F.pad(tokens, (0, spare))).view(-1, most).tolist()
        logprobs: list[list[list[float]]] = []
        if asked:
            best = min(max(asked), self._config.vocab_size)
            table = F.pad(log_probabilities(unmodified, tokens.clamp(min=0), best), (0, 0, 0, spare))
            logprobs = self._mesh.ep.all_gather(table).view(-1, most, table.shape[1]).tolist()
        texts: list[list[str]] = []
        if any(codes[rank][i] == _RAISED for rank, i, _ in everybodys):
            texts = self._exchange_texts([errors.get(i, "") for i in range(most)])
        sampled = []
        for rank, i, sequence in everybodys:
            code = codes[rank][i]
            error = None if code >= 0 else _ERRORS[code] if code in _ERRORS else texts[rank][i]
            found = None
            if error is None and sequence.params.logprobs is not None:
                found = _ranked(code, logprobs[rank][i], sequence.params.logprobs)
            sampled.append(Sampled(sequence, code, found, error))
        return sampled

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, str]]:
        """A token for every row, int64 ``[n]``, or the code of an error; and the texts of the errors that were raised.

        What one request's parameters or logits make impossible is that request's error, and nobody else's.
        """
        forbidden = [
            (i, token)
            for i, s in enumerate(sequences)
            if len(s.output) < s.params.min_tokens
            for token in (*self._config.eos_token_ids, *(s.params.stop_token_ids or ()))
            if token < logits.shape[1]
        ]
        if forbidden:
            rows, ends = torch.tensor(forbidden, dtype=torch.int64).T.to(logits.device)
            logits[rows, ends] = float("-inf")
        highest, tokens = logits.max(dim=-1)  # the choice of all greedy requests; NaN counts as the highest
        errors: dict[int, str] = {}
        for i, sequence in enumerate(sequences):
            params = sequence.params
            if params.temperature > 0:
                seed = self._seed + sequence.id if params.seed is None else params.seed
                try:
                    tokens[i] = sample(logits[i], params, seed, len(sequence))
                except Exception as error:
                    tokens[i] = _RAISED
                    errors[i] = f"its sampling failed: {type(error).__name__}: {error}"
        tokens = tokens.where(highest.isfinite(), _NOT_FINITE).where(highest != float("-inf"), _NOTHING_LEFT)
        return tokens, errors

    def _exchange_texts(self, texts: list[str]) -> list[list[str]]:
        """As many short texts of every rank, to every rank; they are cut to 400 bytes."""
        width = 400
        encoded = b"".join(text.encode()[:width].ljust(width, b"\0") for text in texts)
        mine = torch.tensor(list(encoded), dtype=torch.uint8, device=self._mesh.device).view(-1, width)
        rows = self._mesh.ep.all_gather(mine).view(-1, len(texts), width).tolist()
        return [[bytes(row).rstrip(b"\0").decode(errors="ignore") for row in of_rank] for of_rank in rows]


def _ranked(token: int, row: list[float], count: int) -> dict[int, float]:
    """A row of :func:`log_probabilities` by token id: the ``count`` most likely tokens, and the sampled one."""
    most = len(row) // 2
    found = dict(zip(map(int, row[1 : 1 + most][:count]), row[1 + most :], strict=False))
    return found | {token: row[0]}
