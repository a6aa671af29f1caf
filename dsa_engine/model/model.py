"""The decoder: embedding, layers, LM head. One forward pass serves prefill and decode; they differ in the batch
only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dsa_engine.checkpoint import Source
from dsa_engine.kernels.rms_norm import add_rms_norm, rms_norm
from dsa_engine.model.attention import Attention
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import MLP, Weighted
from dsa_engine.model.moe import MoE
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams
from dsa_engine.parallel.tensor_parallel import shard, vocab_parallel_embedding, vocab_parallel_logits


class DecoderLayer(Weighted):
    """Pre-norm layer. The residual addition is fused into the next norm, so what a layer adds is passed beside it."""

    def __init__(self, layer: int, config: ModelConfig, runtime: Runtime, streams: Streams):
        super().__init__(runtime)
        prefix = f"model.layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = self.weight(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.attention = Attention(layer, config, runtime, streams)
        self.post_attention_norm = self.weight(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp: MLP | None = None
        self.moe: MoE | None = None
        if config.mlp_layer_types[layer] == "dense":
            self.mlp = MLP(f"{prefix}.mlp", config.hidden_size, config.intermediate_size, runtime)
        else:
            self.moe = MoE(f"{prefix}.mlp", config, runtime, streams)

    def forward(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        cache: KVCache,
        topk_slots: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``delta [T, hidden]`` is what the layer before adds to ``residual [T, hidden]``; None before the first.

        Returns:
            what this layer adds, the residual that it is to be added to, and the selection that it used.
        """
        with stage("MLA prolog"):
            if residual is None:
                normed, residual = rms_norm(delta, self.input_norm, self.eps), delta
            else:
                normed, residual = add_rms_norm(delta, residual, self.input_norm, self.eps)
        attended, topk_slots = self.attention(normed, batch, cache, topk_slots)
        with stage("MLA epilog"):
            normed, residual = add_rms_norm(attended, residual, self.post_attention_norm, self.eps)
        if self.moe is not None:
            return self.moe(normed, batch), residual, topk_slots
        assert self.mlp is not None
        with stage("dense MLP"):
            return self.mlp(normed), residual, topk_slots


class Model(Weighted):
    """A decoder of any of the supported model types; the weights are empty until they are loaded."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        super().__init__(runtime)
        self.config = config
        # Sharded by vocabulary over the tensor-parallel group.
        rows = shard(config.vocab_size, runtime.mesh.tp, "vocab_size")
        table = (config.vocab_size, config.hidden_size)
        self.embed = self.weight("model.embed_tokens.weight", *table, rows=rows)
        streams = Streams.of(runtime)
        self.layers = nn.ModuleList(DecoderLayer(i, config, runtime, streams) for i in range(config.num_hidden_layers))
        self.norm = self.weight("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed if tied else self.weight("lm_head.weight", *table, rows=rows)

    def weight_sources(self) -> Iterator[Source]:
        """Every tensor, or part of one, that this rank loads."""
        for module in self.modules():
            if isinstance(module, Weighted):
                yield from module.sources

    def weights_loaded(self) -> None:
        """To be called once, when all of :meth:`weight_sources` have been loaded."""
        for module in self.modules():
            if isinstance(module, Weighted) and module is not self:
                module.weights_loaded()

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Runs the step's T local tokens, writing their cache rows; returns hidden states ``[T, hidden]``, normed."""
        with stage("embedding"):
            x = vocab_parallel_embedding(batch.input_ids, self.embed, self.runtime.mesh.tp)[: batch.rows]
        residual = topk_slots = None
        for layer in self.layers:
            x, residual, topk_slots = layer(x, residual, batch, cache, topk_slots)
        assert residual is not None
        return add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[n, vocab]`` of ``hidden [n, hidden]``, rows which all ranks of the tensor-parallel group hold."""
        with stage("LM head"):
            return vocab_parallel_logits(hidden, self.lm_head, self.runtime.mesh.tp)
