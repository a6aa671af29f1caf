"""Speculative decoding with MTP modules: drafts, and what the model makes of them.

One step of a request whose tokens are t_0 … t_{n-1}, the last of them not computed yet, with drafts d_1 … d_k of the
tokens after them:

1. The model computes 1 + k rows, of t_{n-1}, d_1 … d_k. The sampler chooses a token after each, s_0 … s_k, as it would
   have done one row at a time: the row of d_j sees the drafts before it, and its token is drawn with the random numbers
   of its own position.
2. A draft is *accepted* while it equals the token in its place: d_1 = s_0, d_2 = s_1, … The request goes on by the a
   drafts that are, and by s_a. So it gets the tokens that it would have got without drafts.
3. The module runs over the same rows with the model's hidden states and the tokens s_0 … s_k after them, and drafts
   the token after s_a. What it computes for later rows is void, and so are the model's cache rows of drafts that were
   not accepted: the next step writes them again, and nothing before that sees them.
4. In eagle mode the module goes on alone, a row at a time, from its own hidden state and its last draft. Its cache rows
   of these are void too. Each of several modules drafts one token (``passes.py``).

So the caches of model and module hold the same positions, and one ``num_computed_tokens`` serves both. A step of
prefill is the same with rows of a prompt: only 3 and 4 follow, and under context parallelism they run on the ranks
that have the rows.

There are two ways to run a step: as one graph (``graph_step.py``), if the device can choose its tokens alone; eagerly,
where model and sampler run as without drafts, and what follows is here. They share passes and rule of acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dsa_engine.engine.sampling.draw import seed_key
from dsa_engine.engine.sampling.result import Columns, Outcome, StepResult
from dsa_engine.engine.sampling.sampler import seed_of
from dsa_engine.engine.speculation.acceptance import Assume, count_accepted
from dsa_engine.engine.speculation.graph_step import GraphStep
from dsa_engine.engine.speculation.passes import EagleChain, ModuleEach, Passes
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.runtime.transfer import download, upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


class Drafter:
    """Verifies drafts and makes new ones, after every step of the model or in one graph with it.

    Args:
        model, cache, mesh: of the engine.
        observe: is called with the plan of passes whose rows are not those of the step.
        seed: of requests without a seed of their own.

    Attributes:
        passes: of the MTP modules.
        graph: runs a whole step, with its sampling and drafts, as one graph.
        assume: decides, in place of the tokens, how many drafts are accepted; for measuring where tokens mean nothing.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, observe: Callable[[StepPlan], None], seed: int):
        self._mesh = mesh
        self._seed = seed
        self.passes: Passes = (ModuleEach if len(model.mtp) > 1 else EagleChain)(model, cache, mesh, observe)
        self.graph = GraphStep(self.passes, seed)
        self.assume: Assume | None = None

    def draft(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, samples: StepResult, count: int
    ) -> StepResult:
        """Finds what was accepted, and drafts the tokens after it, eagerly; every rank takes part.

        Args:
            step, batch: of the step that the model has computed.
            hidden: its normed hidden states ``[T, hidden]``.
            samples: what was sampled from it.
            count: drafts of every request.

        Returns:
            the samples with what came of drafts; with an outcome, from which the next step may follow, after prefills.
        """
        table = []
        for request, indices in samples.indices.items():
            offered, missing = request.drafts[: len(indices) - 1], 1 + count - len(indices)
            indices_and_drafts = [*indices, *[0] * missing, *offered, *[0] * (count - len(offered))]
            table.append([len(request), len(offered), 0, *indices_and_drafts])
        on_host = torch.tensor(table, dtype=torch.int64).view(len(table), Columns.width(count))
        known = Columns.of(upload(on_host, self._mesh.device))  # with the index of each token in its place
        tokens, assumed = samples.tokens[known.tokens], None
        if self.assume is not None and table:
            keys = [seed_key(seed_of(request, self._seed)) for request in samples.indices]
            assumed = self.assume(upload(torch.tensor(keys), self._mesh.device), known.position - 1, count)
        accepted = count_accepted(tokens, known.drafts, known.offered, assumed)
        # In place of a token there may be the negative code of an error: that request ends.
        drafts, kept = self.passes.after_eager_step(step, batch, hidden, tokens.clamp(min=0), accepted)
        if not table:
            return samples
        left = Columns(known.position + accepted, known.offered, accepted, tokens, drafts).table()
        outcome, rows = Outcome(left, {request: row for row, request in enumerate(samples.indices)}), download(left)
        result = replace(samples, draft_results=lambda: outcome.read(rows), last_rows=kept)
        return result if any(request.drafts for request in samples.indices) else replace(result, outcome=outcome)
