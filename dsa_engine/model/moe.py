"""Mixture of experts with a shared expert; the routed experts are divided over ranks.

DeepSeek-V3 report, section 2.1.2, equations 12 to 16, for the normed input u_t of a token::

    s_i = sigmoid(u_t · e_i)                                  e_i: a row of the gate
    g_i = s_i / Σ s_j  of the k experts with the largest s_i + b_i, 0 of others
    out = Σ FFN_shared(u_t) + Σ g_i FFN_i(u_t)
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.expert_mlp import UNCOUNTED_BYTES
from dsa_engine.kernels.moe.router import route
from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.kernels.runtime.pieces import Results
from dsa_engine.model.forward_batch import ForwardBatch, Pass
from dsa_engine.model.layers import MLP, Float32OutputLinear, Weighted
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams
from dsa_engine.parallel.experts.counts import count_topk_ids
from dsa_engine.parallel.experts.dispatch import CountedDispatcher, Dispatch, Routed, StepSizes
from dsa_engine.weights.formats.base import Quantized, words_of


class Router(Weighted):
    """Equations 13 to 16: which experts a token goes to, and with which weights."""

    def __init__(self, prefix: str, config: ModelConfig, runtime: Runtime):
        super().__init__(runtime)
        self.config, experts = config, config.n_routed_experts
        self.gate = Float32OutputLinear(f"{prefix}.weight", experts, config.hidden_size, runtime)
        self.bias = self.weight(f"{prefix}.e_score_correction_bias", experts, dtype=torch.float32)
        self.counts: torch.Tensor | None = None  # to which `topk_ids` are added, see ExpertCounter

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, hidden]`` -> int32 experts and float32 weights ``[T, k]``; −1 for tokens outside the mask."""
        config = self.config
        topk_ids, topk_weights = route(
            self.gate(x),
            self.bias,
            top_k=config.num_experts_per_tok,
            groups=config.n_group,
            top_groups=config.topk_group,
            normalise=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
            token_mask=token_mask,
        )
        if self.counts is not None:
            count_topk_ids(topk_ids, self.counts)
        return topk_ids, topk_weights


class MoE(Weighted):
    """A rank holds a part of the routed experts (`parallel/experts/`); router and shared expert are whole.

    With ``ModelConfig.batch_invariant`` each pair of a token and an expert travels by itself, with weight 1, and the
    token's rank adds their results, in the order of its pairs: no sum depends on which ranks hold which experts.
    """

    def __init__(self, layer: int, config: ModelConfig, runtime: Runtime, streams: Streams):
        super().__init__(runtime)
        self.config = config
        self.streams = streams
        prefix = f"model.layers.{layer}.mlp"
        hidden, intermediate, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.router = Router(f"{prefix}.gate", config, runtime)
        mesh = runtime.mesh
        self.dispatchers = mesh.experts.dispatchers  # of prefill and of decode steps
        self.expert_parallel = mesh.experts.of_layer(experts, layer, config.n_group, config.topk_group)
        held = [f"{prefix}.experts.{expert}" for expert in self.expert_parallel.held]
        self.experts = self.grouped_experts(held, hidden, intermediate)
        chunk = mesh.config.moe_chunk_size
        self.max_pairs = runtime.max_tokens * config.num_experts_per_tok if chunk is None else chunk
        self.shared = MLP(f"{prefix}.shared_experts", hidden, config.n_shared_experts * intermediate, runtime)

    def begin(self, x: torch.Tensor, quantized: Quantized | None, batch: ForwardBatch) -> Results:
        """Starts the tokens ``x [T, hidden]``, or as they are ``quantized``, on their way, or tells their counts; then
        the shared expert, so that they do not wait for it. Returns what :meth:`forward` needs."""
        with stage("MoE gate"):
            topk_ids, topk_weights = self.router(x, batch.token_mask)
        with stage("MoE dispatch"):
            dispatch = self._start(x, quantized, topk_ids, topk_weights, batch)
        with stage("MoE shared"):
            shared = self.streams.shared_expert.run(partial(self.shared, x, quantized), x, *words_of(quantized))
        return [dispatch, shared, *((topk_ids, topk_weights) if self.config.batch_invariant else ())]

    def forward(self, begun: Results, batch: ForwardBatch) -> Pass[list[torch.Tensor]]:
        """The terms of equation 12, ``[T, hidden]`` each: the sums of the routed experts, and the output of the shared
        expert."""
        dispatch, shared, *routed = begun
        begun.clear()
        yield "MoE dispatch"
        # In a padded step the host may not ask the device how many pairs are local.
        number, rounds, uncounted = 0, 1, UNCOUNTED_BYTES if batch.token_mask is None else sys.maxsize
        while number < rounds:
            with stage("MoE dispatch"):
                received, rounds = dispatch.receive(number), dispatch.rounds
            with stage("MoE experts"):
                sums = self.experts(received, uncounted)
            del received  # room for what comes back
            batch.send_tokens()  # before the sums, which would hold them up
            with stage("MoE combine"):
                dispatch.send_back(number, sums)
            del sums
            number += 1
        yield "MoE combine"
        with stage("MoE combine"):
            sums = dispatch.combine()
            if self.config.batch_invariant:
                topk_ids, topk_weights = routed
                pair_rows = torch.arange(len(sums), dtype=torch.int32, device=sums.device).view(topk_ids.shape)
                sums = combine(sums, pair_rows, topk_weights)
            return [sums, shared()]

    def _start(
        self, x: torch.Tensor, quantized: Quantized | None, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        batch: ForwardBatch,
    ) -> Dispatch:  # fmt: skip
        dispatcher, product, copies = self.dispatchers[batch.decodes], self.experts.product, 1
        tokens, to_words = x, product.to_words
        if to_words is not None and dispatcher.takes_words(product.blockwise):
            fits = quantized is not None and product.blockwise and quantized.power_of_two == product.power_of_two
            tokens = quantized.words if quantized is not None and fits else to_words(x)
        if self.config.batch_invariant:
            copies = topk_ids.shape[1]
            tokens, topk_ids = tokens.repeat_interleave(copies, dim=0), topk_ids.view(-1, 1)
            topk_weights = topk_weights.new_ones(topk_ids.shape)
        # A padded step may be captured in a CUDA graph, so nothing is counted in it; it has few rows.
        max_pairs = self.max_pairs if batch.token_mask is None else sys.maxsize
        sizes = StepSizes(batch.ep_rows * copies, max_pairs, x.shape[1] * x.element_size())
        given = self.expert_parallel, Routed(tokens, topk_ids, topk_weights), sizes, batch.unsent
        if isinstance(dispatcher, CountedDispatcher):
            return dispatcher.start(*given)
        dispatch: Dispatch = this_thread.as_one(dispatcher.start, *given)
        return dispatch
