"""A decoder layer: attention, then the feed-forward part, each added to the residual."""

from __future__ import annotations

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.model.attention import Attention
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.layers import MLP, Weighted
from dsa_engine.model.moe import MoE
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.runtime import Runtime, Streams


class DecoderLayer(Weighted):
    """Pre-norm layer. The residual addition is fused into the next norm, so what a layer adds is passed beside it: one
    or two summands."""

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
        delta: list[torch.Tensor],
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        cache: KVCache,
        topk_slots: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """``delta``, one or two of ``[T, hidden]``, is what the layer before adds to ``residual [T, hidden]``. Before
        the first there is no residual, and one delta. It is emptied: its memory is free while the layer runs.

        Returns:
            what this layer adds, the residual that it is to be added to, and the selection that it used.
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
            return list(self.moe(normed, batch)), residual, topk_slots
        assert self.mlp is not None
        with stage("dense MLP"):
            return [self.mlp(normed)], residual, topk_slots


def add_delta(
    delta: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer adds, added to the residual: the norm of the sum, and the sum. Empties ``delta``."""
    first, *second = delta
    delta.clear()
    return add_rms_norm(first, residual, weight, eps, *second)
