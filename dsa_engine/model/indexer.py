"""The lightning indexer: which cached tokens a query attends to (DeepSeek-V3.2-Exp report, equation 1).

The score of token s for the query at t, and the tokens that are selected::

    I_{t,s} = Σ_j w_{t,j} · ReLU(q_{t,j} · k_s)              j: heads of the indexer; one key for all heads
    selected: the index_topk tokens with the largest I_{t,s}

Projections, norm and RoPE are those of the released ``inference/model.py`` (V3.2-Exp, class ``Indexer``); its Hadamard
transform of queries and keys changes no exact product, so only FP8 keys and queries have it.
"""

from __future__ import annotations

from typing import Any

import torch

from dsa_engine.config.model import LATENT_NORM_EPS, ModelConfig
from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.indexer.topk import no_row_finished
from dsa_engine.kernels.rows.rope import apply_rope
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.layers import Float32OutputLinear, Weighted
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime
from dsa_engine.weights.formats.base import Matrix, Quantized

IndexQueries = tuple[torch.Tensor, torch.Tensor]  # and head weights, see :meth:`.Indexer.queries`


class Indexer(Weighted):
    """Weights are whole on every rank."""

    def __init__(self, prefix: str, config: ModelConfig, runtime: Runtime):
        super().__init__(runtime)
        heads, dim = config.index_n_heads, config.index_head_dim
        self.config = config
        self.wq_b = self.linear(f"{prefix}.wq_b.weight", heads * dim, config.q_lora_rank)
        self.wk = Matrix(f"{prefix}.wk.weight", dim, config.hidden_size)  # multiplied with MLA's of the same x
        self.k_norm_weight = self.weight(f"{prefix}.k_norm.weight", dim, dtype=torch.float32)
        self.k_norm_bias = self.weight(f"{prefix}.k_norm.bias", dim, dtype=torch.float32)
        self.weights_proj = Float32OutputLinear(f"{prefix}.weights_proj.weight", heads, config.hidden_size, runtime)
        self._finished = no_row_finished(runtime.device)

    def store_keys(
        self, keys: torch.Tensor, batch: ForwardBatch, key_format: IndexKeyFormat, into: torch.Tensor,
        *slots: torch.Tensor,
    ) -> None:  # fmt: skip
        """Stores wk's output, ``keys [T, dim]``, as index keys: to their slots of a pool, or row by row without any."""
        norm, turns = (self.k_norm_weight, self.k_norm_bias, LATENT_NORM_EPS), (batch.cos, batch.sin)
        interleaved = self.config.index_rope_interleaved
        store_index_keys(keys, *norm, *turns, into, *slots, key_format=key_format, interleaved=interleaved)

    def queries(
        self, x: torch.Tensor, q_resid: torch.Tensor, quantized: Quantized | None, batch: ForwardBatch,
        key_format: IndexKeyFormat,
    ) -> IndexQueries:  # fmt: skip
        """Index queries ``[sparse rows, heads, dim]`` and head weights ``[sparse rows, heads]``, by the *normed*
        output of q_a, ``q_resid [T, q_lora_rank]``, which ``quantized`` may have too.

        With an FP8 cache the queries are FP8, and the head weights contain their scales. The released code's factor
        ``heads^-0.5 · dim^-0.5`` is left out: all scores have it, so it changes no choice.
        """
        config, first = self.config, batch.first_sparse
        codes = None if quantized is None else quantized.from_row(first)
        q = self.wq_b.of_quantized(q_resid[first:], codes).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        weights = self.weights_proj(x[first:])
        cos, sin, interleaved = batch.cos[first:], batch.sin[first:], config.index_rope_interleaved
        if key_format.coded:
            return quantize_index_queries(q, weights, cos, sin, key_format=key_format, interleaved=interleaved)
        turned = q[..., : config.qk_rope_head_dim]  # RoPE on the first dimensions only, in place
        apply_rope(turned, cos, sin, interleaved=interleaved, out=turned)
        return q, weights

    def select(
        self, queries: IndexQueries, pool: torch.Tensor, batch: ForwardBatch, key_format: IndexKeyFormat
    ) -> torch.Tensor:
        """int32 slots ``[sparse rows, index_topk]`` of the tokens that the sparse rows attend to."""
        with stage("lightning indexer"):
            keys, segments, workspace = (pool, batch.block_tables), batch.sparse_mqa, self.runtime.workspace
            how: Any = {"key_format": key_format, "workspace": workspace, "finished": self._finished}
            return lightning_indexer(*queries, *keys, segments, self.config.index_topk, **how)
