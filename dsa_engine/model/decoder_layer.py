"""A decoder layer: attention, then the feed-forward part, each added to the residual (DeepSeek-V3 report, figure 2)."""

from __future__ import annotations

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.model.attention import Attention
from dsa_engine.model.forward_batch import ForwardBatch, Pass
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import MLP, Weighted
from dsa_engine.model.moe import MoE
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams


class DecoderLayer(Weighted):
    """Pre-norm layer.

    The next norm also adds to the residual, so a layer passes on its residual and, separately, one or two tensors that
    are to be added to it.
    """

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
            self.moe = MoE(layer, config, runtime, streams)

    def forward(
        self,
        delta: list[torch.Tensor],
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        cache: KVCache,
        topk_slots: torch.Tensor | None,
    ) -> Pass[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]]:
        """A pass through the layer.

        Args:
            delta: one or two tensors ``[T, hidden]`` that the layer before adds to ``residual``. The list is emptied,
                so that their memory is free while this layer runs.
            residual: ``[T, hidden]``; None before the first layer, whose one delta is the embedding.
            topk_slots: the selection of the last layer with an indexer.

        Returns:
            this layer's delta, the residual to which it is to be added, and the selection that the layer used.
        """
        with stage("MLA prolog"):
            if residual is None:
                residual = delta.pop()
                normed = rms_norm(residual, self.input_norm, self.eps)
            else:
                normed, residual = add_delta(delta, residual, self.input_norm, self.eps)
        attended, topk_slots = self.attention(normed, batch, cache, topk_slots)
        with stage("MLA epilog"):
            normed, residual = add_rms_norm(attended, residual, self.post_attention_norm, self.eps)
        if self.moe is not None:
            added = yield from self.moe(normed, batch)
            return added, residual, topk_slots
        assert self.mlp is not None
        with stage("dense MLP"):
            return [self.mlp(normed)], residual, topk_slots


def add_delta(
    delta: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``residual`` plus ``delta``, and the sum itself. Empties ``delta``."""
    first, *second = delta
    delta.clear()
    return add_rms_norm(first, residual, weight, eps, *second)
