"""Speculative decoding with MTP modules: verifies drafts and makes new ones.

A request has the tokens t_0 … t_{n-1}, of which the last is not computed yet, and drafts d_1 … d_k of the next tokens.
Its step is:

1. The model computes 1 + k rows, of t_{n-1}, d_1 … d_k. The sampler chooses a token after each row, s_0 … s_k, as if
   the rows were computed one at a time: the row of d_j sees the drafts before it, and its token is drawn with the
   random numbers of its position.
2. Drafts are *accepted* up to the first that differs from the chosen token: d_1 = s_0, d_2 = s_1, … With m accepted
   drafts, the request's next tokens are s_0 … s_m: the same tokens as without drafts.
3. The MTP module runs over the same rows, with the model's hidden states and the next tokens s_0 … s_k, and drafts the
   token after s_m. Its results for later rows are void. So are the cache rows of drafts that were not accepted: the
   next step overwrites them before it reads them.
4. In eagle mode the module goes on, a row at a time, from its own hidden state and its last draft. The cache rows of
   these passes are void too. In vanilla mode each of several modules drafts one token (``passes.py``).

So the caches of model and module hold the same positions, and one ``num_computed_tokens`` serves both. In prefill the
rows are those of a prompt and only 3 and 4 follow; under context parallelism they run on the ranks that have the rows.

A step runs as one graph (``graph_step.py``) if the device alone can choose its tokens. Otherwise it runs eagerly: model
and sampler as without drafts, then :meth:`Drafter.draft`. Both ways share the passes and the rule of acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.samples import Columns, Outcome, StepResult
from dsa_engine.engine.speculation.acceptance import AcceptanceRule, count_equal
from dsa_engine.engine.speculation.graph_step import GraphStep
from dsa_engine.engine.speculation.passes import EagleChain, ModuleEach, Passes
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model


class Drafter:
    """Verifies drafts and makes new ones, after each step of the model or in one graph with it.

    Args:
        hooks: each is called with the plan of each pass whose rows are not the step's.

    Attributes:
        passes: runs the MTP modules.
        graph: runs a whole step, with its sampling and drafts, as one graph.
        rule: decides how many drafts are accepted.
    """

    def __init__(self, model: Model, cache: KVCache, hooks: list[Callable[[StepPlan], None]]):
        self._mesh = model.runtime.mesh
        self.passes: Passes = (ModuleEach if len(model.mtp) > 1 else EagleChain)(model, cache, hooks)
        self.graph = GraphStep(self.passes)
        self.rule: AcceptanceRule = count_equal

    def draft(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, sampled: StepResult, count: int
    ) -> StepResult:
        """Accepts drafts after an eager step and makes new ones; every rank takes part.

        Args:
            hidden: its normed hidden states ``[T, hidden]``.
            count: number of drafts to make for every request.

        Returns:
            the result with its drafts; after prefills the next step may follow before it is read.
        """
        samples, rank = step.samples, self._mesh.rank
        chosen = {request for request, *_ in step.own.wanted}
        chunks = [chunk for chunk in step.own.chunks if chunk.request in chosen]
        own = [replace(c, start=c.end - c.num_logits, length=c.num_logits) for c in chunks]
        indices, table = samples.indices[samples.of_rank(rank)].tolist(), []
        for first, chunk in zip(indices, own, strict=True):
            request, missing = chunk.request, 1 + count - chunk.length
            offered = request.drafts[: chunk.length - 1]
            codes = [*range(first, first + chunk.length), *[0] * missing]
            to_verify = [*offered, *[0] * (count - len(offered))]
            table.append([chunk.end - len(offered), len(offered), 0, *codes, *to_verify, request.draw_key])
        on_host = torch.tensor(table, dtype=torch.int64).view(len(table), Columns.width(count) + 1)
        on_device = upload(on_host, self._mesh.device)
        known, keys = Columns.of(on_device[:, :-1]), on_device[:, -1]  # known.tokens are indices into the samples
        tokens = sampled.tokens[known.tokens] if table else known.tokens
        accepted = self.rule(tokens, known.drafts, keys, known.position - 1).minimum(known.offered)
        # A negative token is the code of an error, which ends its request.
        safe = sampled.tokens.clamp(min=0)
        drafts, last_rows = self.passes.after_eager_step(step, batch, hidden, own, safe, tokens.clamp(min=0), accepted)
        if samples.max_rows == 0:
            return sampled
        new = Columns(known.position + accepted, known.offered, accepted, tokens, drafts).table()
        missing = int(samples.numbers.max()) + 1 - len(own)  # every rank has as many rows
        of_all_ranks = self._mesh.world.all_gather(F.pad(new, (0, 0, 0, missing)))
        follows = int(samples.counts.max()) == 1  # the host knows the tokens of no drafts
        outcome = Outcome.of(of_all_ranks, samples, self._mesh.world_size)
        return replace(sampled, outcome=outcome, last_rows=last_rows, follows=follows)
