"""Multi-head latent attention with DeepSeek Sparse Attention.

DeepSeek-V3 report, section 2.1.1, equations 1 to 11, for a token t and head i::

    c_t = RMSNorm(W_DKV h_t),  k^R_t = RoPE(W_KR h_t)        the latent row, one for all heads: all that is cached
    q_t = W_UQ RMSNorm(W_DQ h_t),  its last columns rotated
    o_t = Σ_s softmax_s(q_t · [W_UK c_s; k^R_s] · scale) W_UV c_s
    u_t = W_O [o_t of all heads]

In absorbed form (MQA), q · W_UK c = (W_UKᵀ q) · c: W_UK goes into the query and W_UV is applied after the attention, so
that no key or value is expanded (DeepSeek-V2 report, section 2.1.2). The sum runs over the tokens that the indexer
selects (DeepSeek-V3.2-Exp report, equation 2). Long segments of queries that see few tokens, or belong to a
model without an indexer, take the MHA form, which is cheaper for them; the batch says which rows do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsa_engine.config.model import LATENT_NORM_EPS, ModelConfig
from dsa_engine.kernels.attention.dense_attention import dense_attention
from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.attention.expand_latents import expand_latents, pays
from dsa_engine.kernels.attention.gather_latent import gather_latent
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import CacheFormat, latent_format
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.linear.per_head_matmul import per_head_matmul, split_matrices
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.rows.rope import apply_rope
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows
from dsa_engine.kernels.rows.store_latent import store_latent
from dsa_engine.kernels.rows.store_rows import store_rows
from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.indexer import Indexer, IndexQueries
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import Weighted
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams
from dsa_engine.parallel.tensor_parallel import head_group, head_parallel_projection, shard
from dsa_engine.weights.formats.base import Matrix, Multiplied, Quantized, words_of

_MIN_GATHERED = 256  # fewest latent rows gathered at a time, so that a product is worth its launch


class Attention(Weighted):
    """Attention of one layer. Every rank holds all projections whole, but o_proj, which the tp group shards by
    heads without ``batch_invariant``."""

    def __init__(self, layer: int, config: ModelConfig, runtime: Runtime, streams: Streams):
        super().__init__(runtime)
        self.layer = layer
        self.streams = streams
        self.config = config
        prefix = f"model.layers.{layer}.self_attn"
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        selects = config.indexer_types[layer] == "full"
        self.indexer = Indexer(f"{prefix}.indexer", config, runtime) if selects else None
        # q_a, wk and kv_a, in this order: where blocks have 128 rows, all but the last have whole ones.
        self.inputs = self.stacked_linear(
            Matrix(f"{prefix}.q_a_proj.weight", config.q_lora_rank, config.hidden_size),
            *([] if self.indexer is None else [self.indexer.wk]),
            Matrix(f"{prefix}.kv_a_proj_with_mqa.weight", config.latent_dim, config.hidden_size),
        )
        self.q_a_norm = self.weight(f"{prefix}.q_a_layernorm.weight", config.q_lora_rank)
        self.q_b = self.linear(f"{prefix}.q_b_proj.weight", heads * config.qk_head_dim, config.q_lora_rank)
        self.kv_a_norm = self.weight(f"{prefix}.kv_a_layernorm.weight", rank)
        per_head = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b = self.linear(f"{prefix}.kv_b_proj.weight", heads * per_head, rank)
        self.tp = head_group(runtime.mesh.tp, config.batch_invariant)
        first, last = shard(heads, self.tp, "num_attention_heads")
        width, columns = heads * config.v_head_dim, (first * config.v_head_dim, last * config.v_head_dim)
        self.o = self.linear(f"{prefix}.o_proj.weight", config.hidden_size, width, columns)

    def weights_loaded(self) -> None:
        nope, rank = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        # Kept in the run's dtype for every weight format, as in the released code's absorbed form, which multiplies by
        # W_UK transposed; the products with W_UK and W_UV take a small part of the time.
        up = self.take_plain_weight(self.kv_b).view(self.config.num_attention_heads, -1, rank)
        del self.kv_b
        # [heads, nope, rank], [heads, value, rank]
        self.w_uk, self.w_uv = split_matrices(up, nope, fixed=self.config.batch_invariant)

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, topk_slots: torch.Tensor | None,
        quantized: Quantized | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Writes the cache rows of ``x [T, hidden]``, normed, and attends: ``[T, hidden]``, and the selection that this
        layer used. ``topk_slots``: that of the last layer with an indexer, ``[sparse rows, index_topk]``;
        ``quantized``: x too, if :meth:`.Linear.memory_for` of ``inputs`` had some."""
        layer, buffers, shards = self.layer, batch.buffers, batch.shards
        with stage("MLA prolog"):
            given = self.inputs.multiplied(x, quantized)
        # The cache rows are started first, so that they, or their gather, overlap with the computation of q.
        stored = (self._store_cache_rows if batch.gathers is None else self._gather_cache_rows)(given, batch, cache)
        with stage("MLA prolog"):
            q_a, quantized_resid = self.inputs.part(0, given), self.q_b.memory_for(x)
            q_resid = rms_norm(q_a, self.q_a_norm, LATENT_NORM_EPS, *(quantized_resid or ()))
            del q_a, given
        indexed = self._index_queries(x, q_resid, quantized_resid, batch, cache)
        with stage("MLA prolog"):
            q_mha, q_mqa = self._queries(self.q_b.of_quantized(q_resid, quantized_resid), batch)
        with stage("indexer prolog"):
            index_queries = indexed()
        asked = None if shards is None else self._gather_queries(index_queries, q_mqa, batch)
        stored()
        del quantized, quantized_resid  # read by side streams until now
        pools = (cache.latent[layer], cache.index_keys[layer]) if buffers is None else buffers.of(layer)
        if asked is None:
            topk_slots = self._select(index_queries, topk_slots, batch, pools[1], cache.format)
            with stage("sparse flash attention"):
                in_pool = batch.slots_in_pool(layer, topk_slots)
                out_latent = self._mqa(q_mqa, batch, pools[0], cache.format.latent, in_pool)
                out = x.new_empty(x.shape[0], self.config.num_attention_heads, self.config.v_head_dim)
                self._mha(q_mha, batch, pools[0], cache.format.latent, out)
        else:
            out_latent, topk_slots = self._attend_together(asked, topk_slots, batch, pools, cache.format)
            out = x.new_empty(x.shape[0], self.config.num_attention_heads, self.config.v_head_dim)
        # Beside the computation: records of the selection; and tokens of the other micro-batch, before o_proj's
        # exchange, as collectives begin in the order of the host.
        if batch.recorder is not None and shards is None:
            rows = pools[0], topk_slots, in_pool, cache.format.latent
            batch.recorder.record(
                q_mha, q_mqa, self.w_uk, batch.mha_rows, batch.first_sparse, *rows, self.config.softmax_scale
            )
        if buffers is not None and not batch.first_micro_batch:
            buffers.drop(layer)
        this_thread.as_one(ForwardBatch.send_tokens, batch)
        with stage("MLA epilog"):
            per_head_matmul(out_latent, self.w_uv.transpose(1, 2), out[batch.mha_rows :])
            return head_parallel_projection(out, self.o, batch.tp_rows, self.tp), topk_slots

    def _indexer_for(self, batch: ForwardBatch) -> Indexer | None:
        """None where the rows attend to a given selection: no later row reads their index keys either."""
        return self.indexer if batch.selection is None else None

    def _index_queries(
        self, x: torch.Tensor, q_resid: torch.Tensor, quantized: Quantized | None, batch: ForwardBatch, cache: KVCache
    ) -> Callable[[], IndexQueries | None]:
        """Starts to compute the indexer's queries and head weights, if rows select; returns a function that waits for
        them."""

        def queries() -> IndexQueries | None:
            indexer, key_format = self._indexer_for(batch), cache.format.index_key
            if indexer is None or key_format is None or not batch.sparse_mqa.rows:
                return None
            return indexer.queries(x, q_resid, quantized, batch, key_format)

        # Stages are timed on the main stream: they see only the start of side work and the wait for it.
        with stage("indexer prolog"):
            return self.streams.index_queries.run(queries, x, q_resid, *words_of(quantized))

    def _select(
        self,
        queries: IndexQueries | None,
        topk_slots: torch.Tensor | None,
        batch: ForwardBatch,
        keys: torch.Tensor | None,
        stored_as: CacheFormat,
    ) -> torch.Tensor | None:
        """:meth:`.Indexer.select` where this layer has an indexer and rows select; else the selection of the last one
        that had."""
        key_format = stored_as.index_key
        if self.indexer is None or keys is None or key_format is None or queries is None:
            return topk_slots
        return self.indexer.select(queries, keys, batch, key_format)

    def _gather_queries(
        self, index_queries: IndexQueries | None, q: torch.Tensor, batch: ForwardBatch
    ) -> tuple[Callable[[], IndexQueries] | None, Callable[[], torch.Tensor]]:
        """Starts to gather the queries of all ranks that hold contexts together: those of the indexer, if rows select,
        and absorbed ones."""
        shards = batch.shards
        assert shards is not None
        with stage("communication"):
            select = None if index_queries is None else shards.gather_queries(index_queries)
            return select, shards.group.all_gather_async(q)

    def _attend_together(
        self,
        asked: tuple[Callable[[], IndexQueries] | None, Callable[[], torch.Tensor]],
        topk_slots: torch.Tensor | None,
        batch: ForwardBatch,
        pools: tuple[torch.Tensor, torch.Tensor | None],
        stored_as: CacheFormat,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of this rank's rows over all ranks that hold contexts together, and the selection of the rows of
        all of them."""
        shards, workspace = batch.shards, self.runtime.workspace
        assert shards is not None
        index_queries, queries = asked
        if index_queries is not None and pools[1] is not None and stored_as.index_key is not None:
            given = index_queries(), pools[1], self.config.index_topk, stored_as.index_key
            topk_slots = shards.select(*given, workspace)
        with stage("sparse flash attention"):
            how: Any = {"row_format": stored_as.latent, "scale": self.config.softmax_scale, "workspace": workspace}
            q, selected = queries(), topk_slots if batch.sparse_mqa.rows else None
            in_pool = batch.slots_in_pool(self.layer, selected)
            out, lse = shards.attend(q, pools[0], in_pool, how)
        if batch.recorder is not None and selected is not None and in_pool is not None:
            of_layer = lse, pools[0], selected, in_pool, stored_as.latent, self.config.softmax_scale
            batch.recorder.record_together(shards, q, *of_layer)
        return out, topk_slots

    def _store_cache_rows(self, given: Multiplied, batch: ForwardBatch, cache: KVCache) -> Callable[[], None]:
        """Starts to store the cache rows of the local tokens; returns a function that waits for them."""
        side_stream, indexer, stored_as = self.streams.cache_rows, self._indexer_for(batch), cache.format
        latents, key_pool, slots = cache.latent[self.layer], cache.index_keys[self.layer], batch.slot_mapping
        with stage("MLA prolog"):
            held = (given.x, *words_of(given.quantized), *given.outputs)
            waits = [side_stream.run(lambda: self._store_latent(given, batch, stored_as.latent, latents, slots), *held)]
        if indexer is not None and key_pool is not None and (key_format := stored_as.index_key) is not None:
            with stage("indexer prolog"):
                part, keys_to = self.inputs.part, (key_format, key_pool, slots)
                waits.append(side_stream.run(lambda: indexer.store_keys(part(1, given), batch, *keys_to), *held))

        def stored() -> None:
            with stage("indexer prolog"):
                for wait in waits:
                    wait()
            this_thread.as_one(Attention._stored, self, batch, cache)

        return stored

    def _stored(self, batch: ForwardBatch, cache: KVCache) -> None:
        cache.stored(self.layer, batch)

    def _store_latent(
        self, given: Multiplied, batch: ForwardBatch, row_format: LatentFormat, into: torch.Tensor, *slots: torch.Tensor
    ) -> None:
        """Stores latent rows of the local tokens: to their slots of a pool, or row by row without ``slots``."""
        norm, turns = (self.kv_a_norm, LATENT_NORM_EPS), (batch.cos, batch.sin)
        latent, interleaved = self.inputs.part(-1, given), self.config.rope_interleaved
        store_latent(latent, *norm, *turns, into, *slots, row_format=row_format, interleaved=interleaved)

    def _gather_cache_rows(self, given: Multiplied, batch: ForwardBatch, cache: KVCache) -> Callable[[], None]:
        """Starts gathering the cache rows of the context-parallel group's tokens, latent row and index key side by
        side; returns a function that waits for them and writes them to the slots of their tokens. The rows after this
        rank's tokens are undefined, and their slots are −1."""
        cache_format, latent_pool, key_pool = cache.format, cache.latent[self.layer], cache.index_keys[self.layer]
        tokens, latent, index_key = len(given.x), cache_format.latent.columns, cache_format.index_key
        width = cache_format.packed_width(index_key=self.indexer is not None)
        own = given.x.new_empty(batch.cp_rows, width, dtype=cache_format.latent.pool_dtype)
        with stage("MLA prolog"):
            self._store_latent(given, batch, cache_format.latent, own[:tokens, :latent])
        if self.indexer is not None and index_key is not None:
            with stage("indexer prolog"):
                into = own[:tokens, latent : latent + index_key.columns]
                self.indexer.store_keys(self.inputs.part(1, given), batch, index_key, into)
        with stage("communication"):
            assert batch.gathers is not None
            gathered = batch.gathers.all_gather_async(own)

        def store(
            rows: torch.Tensor, latent_pool: torch.Tensor, key_pool: torch.Tensor | None, slots: torch.Tensor
        ) -> None:
            with stage("MLA prolog"):
                if key_pool is None or index_key is None:
                    store_rows(latent_pool, rows[:, : latent_pool.shape[-1]], slots)
                else:
                    store_cache_rows(latent_pool, key_pool, rows, slots, index_key)

        def stored() -> None:
            with stage("communication"):
                rows = gathered()
            if batch.buffers is None or batch.pool_slots is None:
                store(rows, latent_pool, key_pool, batch.slot_mapping)
            else:
                store(rows, latent_pool, key_pool, batch.pool_slots)
                store(rows, *batch.buffers.of(self.layer), batch.slot_mapping)
                batch.buffers.start_next(self.layer)
            this_thread.as_one(Attention._stored, self, batch, cache)

        return stored

    def _queries(self, q: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """From the output of q_b: queries of the rows in MHA form, ``[mha_rows, heads, qk_head_dim]``, and of the other
        rows with W_UK absorbed, ``[T - mha_rows, heads, latent_dim]``."""
        config, border = self.config, batch.mha_rows
        nope, rank, interleaved = config.qk_nope_head_dim, config.kv_lora_rank, config.rope_interleaved
        q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        mha, others = q[:border], q[border:]
        if border:
            turned = mha[..., nope:]
            apply_rope(turned, batch.cos[:border], batch.sin[:border], interleaved=interleaved, out=turned)
        mqa = q.new_empty(others.shape[0], config.num_attention_heads, config.latent_dim)
        per_head_matmul(others[..., :nope], self.w_uk, mqa[..., :rank])
        apply_rope(
            others[..., nope:], batch.cos[border:], batch.sin[border:], interleaved=interleaved, out=mqa[..., rank:]
        )
        return mha, mqa

    def _mqa(
        self,
        q: torch.Tensor,
        batch: ForwardBatch,
        pool: torch.Tensor,
        row_format: LatentFormat,
        topk_slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """``q [rows, heads, latent_dim] -> [rows, heads, kv_lora_rank]``: dense rows attend to all visible tokens, the
        sparse rows after them to the selected ones."""
        border = batch.dense_mqa.rows
        scale, workspace = self.config.softmax_scale, self.runtime.workspace
        how: Any = {"row_format": row_format, "scale": scale, "workspace": workspace}
        parts = []
        if border:
            parts.append(dense_mla(q[:border], pool, batch.block_tables, batch.dense_mqa, **how)[0])
        if q.shape[0] > border:
            assert topk_slots is not None, "sparse rows need a selection, and the first layer makes one"
            sparse, slots = q[border:], topk_slots
            if not batch.decodes and pays(sparse, slots, batch.sparse_mqa, row_format, workspace):
                pool, slots = expand_latents(pool, slots, *batch.seen_pages(pool), row_format, q.dtype)
                plain = latent_format(row_format.rank, row_format.rope, q.dtype)
                how |= {"row_format": plain, "workspace": workspace - pool.nbytes}
            parts.append(sparse_attention(sparse, pool, slots, **how)[0])
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else q.new_empty(0, q.shape[1], row_format.rank)

    def _mha(
        self, q: torch.Tensor, batch: ForwardBatch, pool: torch.Tensor, row_format: LatentFormat, out: torch.Tensor
    ) -> None:
        """Attention of the first rows, ``q [mha_rows, heads, qk_head_dim]``, into the same rows of ``out``. Keys and
        values are expanded piece by piece: as many segments, and of their heads, as the workspace holds, or one."""
        if batch.mha is None:
            return
        # Workspace: 3/8 for keys and values, 1/8 for gathered rows, 1/2 for scores and masks.
        config, eighth = self.config, self.runtime.workspace // 8
        # For each token and head: key, value, and a copy of each at the larger of their widths.
        widths = config.qk_head_dim + config.v_head_dim + 2 * max(config.qk_head_dim, config.v_head_dim)
        max_keys = max(1, 3 * eighth // (widths * q.element_size()))
        for rows, part in batch.mha.parts(max_keys):
            step = max(1, max_keys // part.cu_seqlens_k.rows)
            for first in range(0, config.num_attention_heads, step):
                heads = slice(first, first + step)
                given = (q[rows, heads], *self._expand(pool, row_format, part.key_slots, heads, eighth))
                lengths, scale = (part.cu_seqlens_q, part.cu_seqlens_k), config.softmax_scale
                dense_attention(*given, *lengths, scale=scale, workspace=4 * eighth, out=out[rows, heads])

    def _expand(
        self, pool: torch.Tensor, row_format: LatentFormat, slots: torch.Tensor, heads: slice, workspace: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[n, heads, qk_head_dim]`` and values ``[n, heads, v_head_dim]`` of the tokens in ``slots [n]``. Latent
        rows are gathered piece by piece, as many as the workspace holds."""
        config, dtype = self.config, self.runtime.dtype
        rank, nope, rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        w_uk, w_uv = self.w_uk[heads], self.w_uv[heads]
        k = torch.empty(slots.shape[0], w_uk.shape[0], config.qk_head_dim, dtype=dtype, device=pool.device)
        v = k.new_empty(*k.shape[:2], config.v_head_dim)
        block = max(_MIN_GATHERED, workspace // ((rank + rope) * dtype.itemsize))
        for first in range(0, slots.shape[0], block):
            some = slice(first, first + block)
            latent, k_rope = gather_latent(pool, slots[some], row_format, dtype)[:, None].split((rank, rope), dim=-1)
            for_heads = latent.expand(-1, k.shape[1], -1)
            per_head_matmul(for_heads, w_uk.transpose(1, 2), k[some, :, :nope])
            k[some, :, nope:] = k_rope
            per_head_matmul(for_heads, w_uv.transpose(1, 2), v[some])
        return k, v
