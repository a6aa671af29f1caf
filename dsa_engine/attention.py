"""Multi-head latent attention with DeepSeek Sparse Attention, in absorbed form (DeepSeek-V2, section 2.1; V3.2-Exp).

The cache holds one latent row a token for all heads. W_UK is absorbed into the query and W_UV is applied after the
attention, so that no key or value is ever expanded, except for runs of queries that see so few tokens, or belong to a
model without an indexer, that dense attention over expanded keys is the cheaper way (`batch.unabsorbed_min_queries`).
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from dsa_engine.batch import ForwardBatch
from dsa_engine.cache import KVCache
from dsa_engine.config import LATENT_NORM_EPS, ModelConfig
from dsa_engine.indexer import Indexer
from dsa_engine.kernels.dense_attention import dense_attention
from dsa_engine.kernels.dense_mla import dense_mla
from dsa_engine.kernels.paged import read_rows, store_rows
from dsa_engine.kernels.rms_norm import rms_norm
from dsa_engine.kernels.rope import apply_rope
from dsa_engine.kernels.segment import Segment
from dsa_engine.kernels.sparse_attention import sparse_attention
from dsa_engine.layers import Placement, Weighted
from dsa_engine.parallel.context import gather_cache_rows
from dsa_engine.parallel.tensor import head_parallel_projection, shard
from dsa_engine.profiling import stage


class Attention(Weighted):
    """Attention of one layer. Projections are whole on every rank, o_proj is sharded by heads over the tp group."""

    def __init__(self, layer: int, config: ModelConfig, place: Placement):
        super().__init__(place)
        self.layer = layer
        self.config = config
        prefix = f"model.layers.{layer}.self_attn"
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.q_a = self.weight(f"{prefix}.q_a_proj.weight", config.q_lora_rank, config.hidden_size)
        self.q_a_norm = self.weight(f"{prefix}.q_a_layernorm.weight", config.q_lora_rank)
        self.q_b = self.weight(f"{prefix}.q_b_proj.weight", heads * config.qk_head_dim, config.q_lora_rank)
        self.kv_a = self.weight(f"{prefix}.kv_a_proj_with_mqa.weight", config.latent_dim, config.hidden_size)
        self.kv_a_norm = self.weight(f"{prefix}.kv_a_layernorm.weight", rank)
        per_head = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b = self.weight(f"{prefix}.kv_b_proj.weight", heads * per_head, rank)
        up = self.kv_b.data.view(heads, per_head, rank)
        self.w_uk = up[:, : config.qk_nope_head_dim]  # [heads, nope, rank]
        self.w_uv = up[:, config.qk_nope_head_dim :]  # [heads, value, rank]
        first, last = shard(heads, place.mesh.tp, "num_attention_heads")
        width = heads * config.v_head_dim
        columns = (first * config.v_head_dim, last * config.v_head_dim)
        self.o = self.weight(f"{prefix}.o_proj.weight", config.hidden_size, width, columns=columns)
        selects = config.indexer_types[layer] == "full"
        self.indexer = Indexer(f"{prefix}.indexer", config, place) if selects else None

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, selection: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends and caches.

        Args:
            x: ``[T, hidden]``, normed.
            batch: what the rows are.
            cache: this step's latent rows and index keys are written to it first.
            selection: slots ``[sparse rows, index_topk]`` that the last selecting layer chose, for a layer that shares.

        Returns:
            ``[T, hidden]``, and the selection that this layer used.
        """
        plan, indexer = batch.plan, self.indexer
        latent_pool, key_pool = cache.latent[self.layer], cache.index_keys[self.layer]
        dense = sum(s.length for s in plan.unabsorbed)  # rows [0, dense) take the expanded path
        unscored = dense + sum(s.length for s in plan.absorbed)  # rows [unscored, T) select

        # What others need first: it travels while q is computed.
        with stage("MLA prolog"):
            latent = self._latent(x, batch)
        with stage("indexer prolog"):
            index_key = indexer.keys(x, batch) if indexer else None
        with stage("communication"):
            gathering = (
                gather_cache_rows(latent, index_key, batch.cp_rows, self.place.mesh.cp) if batch.gathers else None
            )
        with stage("MLA prolog"):
            q_resid = rms_norm(F.linear(x, self.q_a), self.q_a_norm, LATENT_NORM_EPS)
            q_nope, q_rope = self._queries(q_resid, batch)
            q_latent = torch.cat((_per_head(q_nope[dense:], self.w_uk), q_rope[dense:]), dim=-1)
        with stage("indexer prolog"):
            index_query = indexer.queries(x, q_resid, batch, unscored) if indexer and plan.sparse else None
        with stage("communication"):
            if gathering:
                latent, index_key = gathering()
        with stage("MLA prolog"):
            store_rows(latent_pool, latent, batch.slots)
            if index_key is not None and key_pool is not None:
                store_rows(key_pool, index_key, batch.slots)

        if indexer and index_query and key_pool is not None:
            selection = indexer.select(*index_query, key_pool, batch)
        with stage("sparse flash attention"):
            out_latent = self._absorbed(q_latent, latent_pool, batch, selection, dense, unscored)
            out = x.new_empty(x.shape[0], self.config.num_attention_heads, self.config.v_head_dim)
            self._unabsorbed(torch.cat((q_nope[:dense], q_rope[:dense]), dim=-1), latent_pool, batch, out)
        with stage("MLA epilog"):
            out[dense:] = _per_head(out_latent, self.w_uv.transpose(1, 2))
            return head_parallel_projection(out, self.o, batch.tp_rows, self.place.mesh.tp), selection

    def _latent(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Cache rows ``[T, latent_dim]``: normed latent, then the rotated key that all heads share."""
        config = self.config
        compressed, k_rope = F.linear(x, self.kv_a).split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        k_rope = apply_rope(k_rope, batch.cos, batch.sin, interleaved=config.rope_interleaved)
        return torch.cat((rms_norm(compressed, self.kv_a_norm, LATENT_NORM_EPS), k_rope), dim=-1)

    def _queries(self, q_resid: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, heads, nope]`` and, rotated, ``[T, heads, rope]``."""
        config = self.config
        q = F.linear(q_resid, self.q_b).unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        nope, rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        return nope, apply_rope(rope, batch.cos, batch.sin, interleaved=config.rope_interleaved)

    def _absorbed(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        batch: ForwardBatch,
        selection: torch.Tensor | None,
        dense: int,
        unscored: int,
    ) -> torch.Tensor:
        """``q [T - dense, heads, latent_dim] -> [T - dense, heads, kv_lora_rank]``, over all or over selected rows."""
        border = unscored - dense
        value_dim, scale, workspace = self.config.kv_lora_rank, self.config.softmax_scale, self.place.workspace
        tables = batch.block_tables
        parts = []
        if border:
            over_all = dense_mla(
                q[:border], pool, tables, batch.absorbed, value_dim=value_dim, scale=scale, workspace=workspace
            )
            parts.append(over_all[0])
        if q.shape[0] > border:
            assert selection is not None, "sparse rows need a selection, and the first layer makes one"
            over_selected = sparse_attention(
                q[border:], pool, selection, value_dim=value_dim, scale=scale, workspace=workspace
            )
            parts.append(over_selected[0])
        return torch.cat(parts) if parts else q.new_empty(0, q.shape[1], self.config.kv_lora_rank)

    def _unabsorbed(self, q: torch.Tensor, pool: torch.Tensor, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Dense attention of the first rows, ``q [dense, heads, qk_head_dim]``, into the same rows of ``out``.

        Keys and values of a sequence are expanded once, for as many heads at a time as the workspace holds.
        """
        config = self.config
        for sequence, group in groupby(batch.plan.unabsorbed, key=lambda s: s.sequence):
            segments: list[Segment] = list(group)
            longest = max(s.end for s in segments)
            rows = read_rows(pool, batch.block_tables[sequence], 0, longest)
            latent, k_rope = rows.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
            # A head's keys without and with their rotated part, its values, and these as wide as the keys.
            widths = config.qk_nope_head_dim + config.v_head_dim + 2 * max(config.qk_head_dim, config.v_head_dim)
            per_head = longest * widths * rows.element_size()
            step = max(1, self.place.workspace // 2 // per_head)
            for first in range(0, config.num_attention_heads, step):
                heads = slice(first, first + step)
                k_nope = torch.einsum("sr,hdr->shd", latent, self.w_uk[heads])
                k = torch.cat((k_nope, k_rope[:, None].expand(-1, k_nope.shape[1], -1)), dim=-1)
                v = torch.einsum("sr,hdr->shd", latent, self.w_uv[heads])
                for s in segments:
                    part = slice(s.row, s.row + s.length)
                    out[part, heads] = dense_attention(
                        q[part, heads],
                        k[: s.end],
                        v[: s.end],
                        scale=config.softmax_scale,
                        workspace=self.place.workspace // 2,
                    )


def _per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, heads, in]`` by ``weight [heads, in, out]``: ``[T, heads, out]``."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
