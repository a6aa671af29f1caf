"""The model for training: ``transformers``' ``deepseek_v32`` with its indexers' losses, guided heads and an MTP module.

``transformers`` computes no gradient for an indexer and has no MTP module. Here its attention calls
:func:`.attention.attend` as its attention function, with the indexer's projections in place of selected tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as theirs

from demo_model.attention import Mode, Projections, attend, guide_loss

COMMON_STD = 0.7  # std of the common part of all initial embeddings; the rest has std 1
Guides = Mapping[int, dict[int, torch.Tensor]]  # by layer and head: the tokens that the head should attend to


class Outputs(NamedTuple):
    """Hidden states after the final norm ``[B, L, hidden]``, those of the MTP module after its norm
    ``[B, L - 1, hidden]``, the indexers' losses and those of guided heads, one per layer with such a loss."""

    hidden: torch.Tensor
    mtp_hidden: torch.Tensor | None
    index_losses: list[torch.Tensor]
    guide_losses: list[torch.Tensor]


class Indexer(theirs.DeepseekV32Indexer):
    """Projections instead of a selection, with gradients for the indexer only."""

    used = False

    def forward(self, x: torch.Tensor, q_resid: torch.Tensor, cos_sin: Any, *_: Any, **__: Any) -> Projections | None:
        """``x [B, L, hidden]``, ``q_resid [B, L, q_lora_rank]`` to queries ``[B, L, heads, dim]``, keys ``[B, L, dim]``
        and weights ``[B, L, heads]`` with all scales included; None while the indexer is not used."""
        if not self.used:
            return None
        x, q_resid, rope = x.detach(), q_resid.detach(), self.qk_rope_head_dim
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(x).to(self.k_norm.weight.dtype))[:, :, None]
        q_rotated, k_rotated = theirs.apply_rotary_pos_emb(q[..., :rope], k[..., :rope], *cos_sin, unsqueeze_dim=2)
        q = torch.cat((q_rotated.to(q.dtype), q[..., rope:]), dim=-1)
        k = torch.cat((k_rotated, k[..., rope:]), dim=-1).squeeze(2)
        with torch.autocast("cpu", enabled=False):
            weights = self.weights_proj(x.to(self.weights_proj.weight.dtype))
        return q, k, weights * (self.n_heads**-0.5 * self.softmax_scale)


def attention(
    _: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, **more: Any
) -> tuple[torch.Tensor, None]:
    """The attention function that ``transformers`` calls; it adds its losses to ``outputs``, one of ``more``."""
    q, outputs = q.to(k.dtype), more["outputs"]
    out, loss = attend(q, k, v, scaling, more["indices"], more["mode"])
    if loss is not None:
        outputs.index_losses.append(loss)
    if more["guides"]:
        outputs.guide_losses.append(guide_loss(q, k, scaling, more["guides"]))
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("demo_training", attention)


class MTPLayer(theirs.DeepseekV32DecoderLayer):
    """The MTP module (DeepSeek-V3 report, section 2.2, equations 21 to 23): predicts the token after the next one.

        h'_i = M [RMSNorm(Emb(t_{i+1})); RMSNorm(h_i)],   then a decoder layer, a norm, and the main model's head

    In the released files M (``eh_proj``) takes the embedding first, and engines feed ``hnorm`` with the main model's
    hidden states *after* its final norm (docs/TRAINING.md).
    """

    def __init__(self, config: DeepseekV32Config):
        super().__init__(config, config.num_hidden_layers - 1)
        self.enorm, self.hnorm, norm = (
            theirs.DeepseekV32RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm})

    def combine(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens i + 1 and hidden states of tokens i, ``[B, L - 1, hidden]``, to the layer's input."""
        return self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)).to(hidden.dtype)


class TrainingModel(DeepseekV32ForCausalLM):
    """The model with an MTP module as its last layer.

    Args:
        raw: keys of ``config.json``.
        seed: seed of the random weights.
    """

    def __init__(self, raw: dict[str, Any], seed: int):
        plain = {name: value for name, value in raw.items() if name not in ("quantization_config", "torch_dtype")}
        config = DeepseekV32Config(**plain, attn_implementation="demo_training", experts_implementation="eager")
        super().__init__(config)
        self.model.layers.append(MTPLayer(config))
        for layer in self.model.layers:
            layer.self_attn.indexer = Indexer(config, layer.self_attn.layer_idx)
        for gate in self.gates():
            gate.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)
            gate.register_forward_hook(_count_loads)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 1:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj", "lm_head.weight")):
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
        self, tokens: torch.Tensor, positions: torch.Tensor, mode: Mode, mtp: bool = True, guides: Guides | None = None
    ) -> Outputs:
        """``tokens`` and ``positions`` are ``[B, L]``; positions rise along a row and may leave gaps."""
        *layers, module = self.model.layers
        for layer in self.model.layers:
            layer.self_attn.indexer.used = mode.kind != "dense"
        x = embedded = self.model.embed_tokens(tokens)
        cos, sin = self.model.rotary_emb(x, positions)
        outputs = Outputs(x, None, [], [])

        def through(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
            length, heads = x.shape[1], (guides or {}).get(number)
            tables, mask = (cos[:, :length], sin[:, :length]), x.new_zeros(1, 1, 1, 1)  # attend() is causal itself
            return layer(x, mask, position_embeddings=tables, mode=mode, outputs=outputs, guides=heads)

        for i, layer in enumerate(layers):
            x = through(layer, i, x)
        hidden = self.model.norm(x)
        if not mtp:
            return outputs._replace(hidden=hidden)
        joined = module.combine(embedded[:, 1:], hidden[:, :-1])
        mtp_hidden = module.shared_head["norm"](through(module, len(layers), joined))
        return outputs._replace(hidden=hidden, mtp_hidden=mtp_hidden)

    def gates(self) -> list[Any]:
        return [module for module in self.modules() if isinstance(module, theirs.DeepseekV32TopkRouter)]

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Auxiliary-loss-free balancing (V3 report, 2.1.2): since the last call, the bias of overloaded experts falls
        by ``speed``, that of the others rises."""
        for gate in self.gates():
            gate.e_score_correction_bias.add_(torch.sign(gate.load.mean() - gate.load), alpha=speed)
            gate.load.zero_()


def _count_loads(gate: Any, _: Any, result: tuple[torch.Tensor, ...]) -> None:
    gate.load.add_(torch.bincount(result[2].flatten(), minlength=len(gate.load)))
