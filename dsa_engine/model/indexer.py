"""The lightning indexer: which cached tokens a query attends to (DeepSeek-V3.2-Exp report, equation 1).

The score of token s for the query at t, and the tokens that are selected::

    I_{t,s} = Σ_j w_{t,j} · ReLU(q_{t,j} · k_s)              j: heads of the indexer; one key for all heads
    selected: the index_topk tokens with the largest I_{t,s}

Projections, norm and RoPE are those of the released ``inference/model.py`` (V3.2-Exp, class ``Indexer``); its Hadamard
transform of queries and keys changes no exact product, so only FP8 keys and queries have it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from dsa_engine.config.model import LATENT_NORM_EPS, ModelConfig
from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.indexer.topk import no_row_finished
from dsa_engine.kernels.rows.rope import apply_rope
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.layers import Float32OutputLinear, Weighted
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime
from dsa_engine.weights.formats import Linear
from dsa_engine.weights.formats.base import Quantized

# Inputs are normed. Weights with which inputs of at most this norm cannot overflow need no check. The range of float16
# is small: its norm is smaller, and still above those of models.
_INPUT_NORM, _INPUT_NORM_FLOAT16 = 2.0**30, 2.0**8

IndexQueries = tuple[torch.Tensor, torch.Tensor]  # and head weights, see :meth:`.Indexer.queries`


class Indexer(Weighted):
    """Weights are whole on every rank. ``may_overflow``: whether they are so large that each step looks for scores that
    are not finite."""

    def __init__(self, prefix: str, config: ModelConfig, runtime: Runtime):
        super().__init__(runtime)
        heads, dim = config.index_n_heads, config.index_head_dim
        self.config = config
        self.wq_b = self.linear(f"{prefix}.wq_b.weight", heads * dim, config.q_lora_rank)
        self.wk = self.linear(f"{prefix}.wk.weight", dim, config.hidden_size)
        self.k_norm_weight = self.weight(f"{prefix}.k_norm.weight", dim, dtype=torch.float32)
        self.k_norm_bias = self.weight(f"{prefix}.k_norm.bias", dim, dtype=torch.float32)
        self.weights_proj = Float32OutputLinear(f"{prefix}.weights_proj.weight", heads, config.hidden_size, runtime)
        self._finished = no_row_finished(runtime.device)
        self._prefix = prefix
        self.may_overflow = False

    def weights_loaded(self) -> None:
        if self.runtime.device.type == "meta" or not self._can_overflow():
            return
        self.may_overflow = True
        logging.getLogger(__name__).warning(
            "%s has weights so large that scores may overflow: each step checks, and requests for which they do end "
            "with an error. The file may be damaged",
            self._prefix,
        )

    def _can_overflow(self) -> bool:
        """Whether a score, or what it is made of, may not be finite."""
        half = self.runtime.dtype == torch.float16
        inputs, limit = _INPUT_NORM_FLOAT16 if half else _INPUT_NORM, torch.finfo(self.runtime.dtype).max
        root = self.config.index_head_dim**0.5
        # Bounds of numbers, in float64, where none overflows.
        query = _largest(self.wq_b) * self.config.q_lora_rank**0.5 * inputs
        key = _largest(self.wk) * self.config.hidden_size**0.5 * inputs
        normed_key = self.k_norm_weight.double().abs().max() * root + self.k_norm_bias.double().norm()
        matrix = self.weights_proj.matrix
        head_weights = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64).sum() * inputs
        score = head_weights * query * root * normed_key
        float32 = torch.finfo(torch.float32).max
        # The norm of a key squares its numbers.
        safe = (score < float32) & (query < limit) & (normed_key < limit) & (key < min(limit, 1e18))
        return bool(~safe)

    def store_keys(
        self, x: torch.Tensor, quantized: Quantized | None, batch: ForwardBatch, key_format: IndexKeyFormat,
        into: torch.Tensor, *slots: torch.Tensor,
    ) -> None:  # fmt: skip
        """Stores index keys of all local tokens ``x [T, hidden]``: to their slots of a pool, or row by row without
        ``slots``."""
        norm, turns = (self.k_norm_weight, self.k_norm_bias, LATENT_NORM_EPS), (batch.cos, batch.sin)
        interleaved = self.config.index_rope_interleaved
        keys = self.wk.of_quantized(x, quantized)
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int32 slots ``[sparse rows, index_topk]`` of the tokens that the sparse rows attend to; and which of the rows
        have scores that are not finite, see :meth:`_overflowing`."""
        with stage("lightning indexer"):
            keys, segments, workspace = (pool, batch.block_tables), batch.sparse_mqa, self.runtime.workspace
            how: Any = {"key_format": key_format, "workspace": workspace, "finished": self._finished}
            slots = lightning_indexer(*queries, *keys, segments, self.config.index_topk, **how)
        return slots, self._overflowing(queries, pool, batch, key_format) if self.may_overflow else None

    def _overflowing(
        self, queries: IndexQueries, pool: torch.Tensor, batch: ForwardBatch, key_format: IndexKeyFormat
    ) -> torch.Tensor:
        """bool ``[sparse rows]``: the rows with scores that are not finite, which select anything. It computes
        all scores once more, and does not wait for the device."""
        with stage("lightning indexer"):
            (q, weights), segments, workspace = queries, batch.sparse_mqa, self.runtime.workspace
            step, parts = max(1, workspace // (16 * max(1, segments.longest))), []
            for first in range(0, segments.rows, step):
                rows = slice(first, first + step)
                piece = segments if step >= segments.rows else segments.part(first, min(first + step, segments.rows))
                given = q[rows], weights[rows], pool, batch.block_tables, piece
                scores = indexer_scores(*given, key_format=key_format, workspace=workspace // 2)
                visible = piece.visible[:, None]
                # Where few enough are seen, all are selected, but those with a score of -inf.
                wrong = torch.where(visible > self.config.index_topk, ~scores.isfinite(), scores.isneginf())
                parts.append((wrong & (torch.arange(scores.shape[1], device=q.device) < visible)).any(dim=1))
            return torch.cat(parts)


def _largest(linear: Linear) -> torch.Tensor:
    """A bound of the magnitudes of a weight, from those of its numbers, or of its codes and scales; float64."""
    bounds = [tensor.float().abs().max().double() for tensor in linear.tensors if tensor.is_floating_point()]
    integers = any(not tensor.is_floating_point() for tensor in linear.tensors)  # at most 8 bits
    return torch.stack(bounds).prod() * (128 if integers else 1)
