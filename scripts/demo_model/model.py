"""The model in plain PyTorch, for training: DeepSeek-V3.2's equations, ``[batch, length]`` at a time, no cache.

Parameters have the names of the released layout, so a checkpoint is written without renaming; only the routed experts
are stacked. MLA and the mixture of experts: DeepSeek-V3 report, sections 2.1.1 and 2.1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from demo_model.attention import Indexer, Mode, attend, guide_loss, rotate_pairs
from dsa_engine.config.model import LATENT_NORM_EPS, ModelConfig

COMMON_STD = 0.7  # std of the common part of all initial embeddings; the rest has std 1
Guides = Mapping[int, dict[int, torch.Tensor]]  # by layer and head: the tokens that the head should attend to


@dataclass
class Outputs:
    """Results of a forward pass: hidden states after the final norm ``[B, L, hidden]``, those of the MTP module after
    its norm ``[B, L - 1, hidden]``, the indexers' losses and those of guided heads, one per layer with such a loss."""

    hidden: torch.Tensor
    mtp_hidden: torch.Tensor | None
    index_losses: list[torch.Tensor]
    guide_losses: list[torch.Tensor]


@dataclass
class Extra:
    """Inputs and results beside the hidden states: tables of RoPE ``[B, L, 1, rope / 2]``, the mode, guides, and
    losses."""

    cos: torch.Tensor
    sin: torch.Tensor
    mode: Mode
    guides: dict[int, torch.Tensor] | None = None
    index_loss: torch.Tensor | None = None
    guide_loss: torch.Tensor | None = None


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Multi-head latent attention with its indexer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config)

    def forward(self, x: torch.Tensor, extra: Extra) -> torch.Tensor:
        """``x [B, L, hidden]`` to the same; the losses go to ``extra``."""
        config, cos, sin = self.config, extra.cos, extra.sin
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (heads, config.qk_head_dim))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, nope + config.v_head_dim))
        k_nope, v = kv.split((nope, config.v_head_dim), dim=-1)
        turned = rotate_pairs(k_rope[:, :, None], cos, sin).expand(-1, -1, heads, -1)
        k = torch.cat((k_nope, turned.to(k_nope.dtype)), dim=-1)
        q = torch.cat((q[..., :nope], rotate_pairs(q[..., nope:], cos, sin).to(q.dtype)), dim=-1)
        index = self.indexer(x.detach(), q_resid.detach(), cos, sin) if extra.mode.uses_indexer else None
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, L, dim]
        out, extra.index_loss = attend(q, k, v, config.softmax_scale, index, extra.mode)
        extra.guide_loss = guide_loss(q, k, config.softmax_scale, extra.guides) if extra.guides else None
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = linear(hidden, intermediate)
        self.up_proj = linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Router: sigmoid scores; the correction bias chooses and never weighs. ``load`` counts the choices."""

    load: torch.Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, hidden]`` to expert numbers and weights ``[T, k]``."""
        config = self.config
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.to(self.weight.dtype), self.weight).sigmoid()
        choice = (scores.detach() + self.e_score_correction_bias).unflatten(-1, (config.n_group, -1))
        best = choice.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        closed = torch.ones(choice.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        experts = choice.masked_fill(closed[..., None], -1e9).flatten(1).topk(config.num_experts_per_tok).indices
        weights = scores.gather(1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self.load.add_(torch.bincount(experts.flatten(), minlength=config.n_routed_experts))
        return experts, weights * config.routed_scaling_factor

    @torch.no_grad()
    def balance(self, speed: float) -> float:
        """Auxiliary-loss-free balancing: the bias of overloaded experts falls by ``speed``, that of the others rises.

        Returns:
            the largest load since the last call, over the mean.
        """
        mean = self.load.mean()
        imbalance = (self.load.max() / mean.clamp_min(1)).item()
        self.e_score_correction_bias.add_(torch.sign(mean - self.load), alpha=speed)
        self.load.zero_()
        return imbalance


class Experts(nn.Module):
    """Routed experts, stacked: ``gate_up [E, 2 I, hidden]`` and ``down [E, hidden, I]``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, intermediate = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sorts tokens ``x [T, hidden]`` by expert, and returns their weighted sums in the original order."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        tokens = order // experts.shape[1]
        sizes = torch.bincount(flat, minlength=self.gate_up.shape[0]).tolist()
        outputs = []
        for part, gate_up, down in zip(x[tokens].split(sizes), self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        weighed = torch.cat(outputs).to(x.dtype) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighed)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        return self.experts(flat, *self.gate(flat)).view_as(x) + self.shared_experts(x)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, sparse: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if sparse else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, extra: Extra) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), extra)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPLayer(DecoderLayer):
    """The MTP module (DeepSeek-V3 report, section 2.2, equations 21 to 23): predicts the token after the next one.

        h'_i = M [RMSNorm(Emb(t_{i+1})); RMSNorm(h_i)],   then a decoder layer, a norm, and the main model's head

    In the released files M (``eh_proj``) takes the embedding first, and engines feed ``hnorm`` with the main model's
    hidden states *after* its final norm; docs/TRAINING.md names the evidence.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config, sparse=True)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def combine(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens i + 1 and hidden states of tokens i, ``[B, L - 1, hidden]``, to the layer's input."""
        joined = torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)
        return self.eh_proj(joined).to(hidden.dtype)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers: list[nn.Module] = [DecoderLayer(config, kind == "sparse") for kind in config.mlp_layer_types]
        layers += [MTPLayer(config) for _ in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TrainingModel(nn.Module):
    """The model with at most one MTP module; ``seed`` fixes its random weights."""

    def __init__(self, config: ModelConfig, seed: int):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 1:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down", "lm_head.weight")):
                nn.init.zeros_(parameter)  # every layer starts as the identity
            else:
                std = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
                nn.init.normal_(parameter, std=std, generator=generator)
        # As there are no biases, the common part lets a head attend by position from the first step on.
        # The LM head starts as the embedding, so that copying a token is one map for all tokens.
        embedding = self.model.embed_tokens.weight.data
        self.lm_head.weight.data.copy_(embedding / 64)
        embedding += torch.randn(config.hidden_size, generator=generator) * COMMON_STD

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mode: Mode,
        mtp: bool = True,
        guides: Guides | None = None,
    ) -> Outputs:
        """``tokens`` and ``positions`` are ``[B, L]``; positions rise along a row and may leave gaps."""
        config, depth = self.config, self.config.num_hidden_layers
        cos, sin = config.rope.cos_sin(positions.flatten())  # [B * L, rope / 2]
        cos, sin = (t.view(*positions.shape, 1, -1).to(self.model.norm.weight.dtype) for t in (cos, sin))
        embedded = self.model.embed_tokens(tokens)
        x, extras = embedded, []
        for i, layer in enumerate(list(self.model.layers)[:depth]):
            extras.append(Extra(cos, sin, mode, (guides or {}).get(i)))
            x = layer(x, extras[-1])
        hidden = self.model.norm(x)
        mtp_hidden = None
        if mtp and config.num_nextn_predict_layers:
            module = self.model.layers[depth]
            assert isinstance(module, MTPLayer)
            joined = module.combine(embedded[:, 1:], hidden[:, :-1])
            extras.append(Extra(cos[:, :-1], sin[:, :-1], mode, (guides or {}).get(depth)))
            mtp_hidden = module.shared_head["norm"](module(joined, extras[-1]))
        index_losses = [extra.index_loss for extra in extras if extra.index_loss is not None]
        return Outputs(hidden, mtp_hidden, index_losses, [e.guide_loss for e in extras if e.guide_loss is not None])

    def gates(self) -> list[Gate]:
        return [module for module in self.modules() if isinstance(module, Gate)]
