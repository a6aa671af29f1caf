"""The model for training: the layers of :mod:`dsa_engine.reference.dsa`, in batches of documents, with the losses of
the lightning indexer (DeepSeek-V3.2-Exp, section 2.1, equations 3 and 4) and of guided heads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsa_engine.config.model import ModelConfig
from dsa_engine.model.layout import released_tensors
from dsa_engine.reference import dsa

ROWS = 256  # queries of a block
KEEP_BLOCKS = 2048  # tokens of a document above which the backward pass computes blocks again instead of storing them
COMMON_STD = 0.7  # std of the common part of all initial embeddings; the rest has std 1
Guides = Mapping[int, dict[int, Tensor]]  # by layer and head: the tokens [B, L] that the head should attend to; -1: any


class Outputs(NamedTuple):
    """Hidden states after the final norm ``[B, L, hidden]``, those of the MTP module after its norm
    ``[B, L - 1, hidden]``, the indexers' losses and those of guided heads, one per layer with such a loss."""

    hidden: Tensor
    mtp_hidden: Tensor | None
    index_losses: list[Tensor]
    guide_losses: list[Tensor]


class TrainingModel:
    """The main model and its MTP module, of a folder with a ``config.json``.

    Attributes:
        tensors: those of the released layout by name, but for the MTP module's copies of embedding and head.
        loads: of each layer with experts, how many tokens chose each since the last :meth:`balance`.
    """

    def __init__(self, folder: Path, seed: int, dtype: torch.dtype = torch.float32):
        self.raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.c, self.world = dsa.Config.read(folder), dsa.World()
        self.tensors: dict[str, Tensor] = {}
        self.w, self.loads = dsa.Weights(), dict[int, Tensor]()
        frequencies, self._rope_scale = dsa.rope_frequencies(self.c)
        self._frequencies = frequencies.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for spec in released_tensors(ModelConfig.from_dict(self.raw), fp8=False):
            if spec.name.endswith((f"{self.c.num_hidden_layers}.embed_tokens.weight", "shared_head.head.weight")):
                continue
            if len(spec.shape) == 1:
                tensor = torch.full(spec.shape, float(not spec.name.endswith("bias")))
            elif spec.name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor = torch.zeros(spec.shape)  # every layer starts as the identity
            else:
                std = 1.0 if "embed_tokens" in spec.name else spec.shape[-1] ** -0.5
                tensor = torch.randn(spec.shape, generator=generator) * std
            self.tensors[spec.name] = tensor.to(dtype)
        # As there are no biases, the common part lets a head attend by position from the first step on.
        # The LM head starts as the embedding, so that copying a token is one map for all tokens.
        embedding = self.tensors["model.embed_tokens.weight"]
        self.tensors["lm_head.weight"] = embedding / 64
        embedding += torch.randn(embedding.shape[1], generator=generator) * COMMON_STD
        for name, tensor in self.tensors.items():
            self.w.put(name, tensor.requires_grad_(not name.endswith("e_score_correction_bias")))

    def __call__(
        self, tokens: Tensor, positions: Tensor, topk: int | None, mtp: bool = True, guides: Guides | None = None
    ) -> Outputs:
        """``tokens`` and ``positions`` are ``[B, L]``; positions rise along a row and may leave gaps. A query attends
        to ``topk`` tokens, the best of the indexer, which learns on these; 0: it attends to all, and the indexer learns
        from all; None: to all, without an indexer."""
        w, eps = self.w.model, self.c.rms_norm_eps
        outputs = Outputs(torch.empty(0), None, [], [])
        x = w.embed_tokens[tokens]
        for number in range(self.c.num_hidden_layers):
            x = self._layer(number, x, positions, topk, guides, outputs)
        hidden = dsa.rms_norm(x, w.norm, eps)
        if not mtp:
            return outputs._replace(hidden=hidden)
        module, embedded = w.layers[self.c.num_hidden_layers], w.embed_tokens[tokens[:, 1:]]
        normed = dsa.rms_norm(embedded, module.enorm, eps), dsa.rms_norm(hidden[:, :-1], module.hnorm, eps)
        joined = F.linear(torch.cat(normed, dim=-1), module.eh_proj).to(x.dtype)
        y = self._layer(self.c.num_hidden_layers, joined, positions[:, :-1], topk, guides, outputs)
        return outputs._replace(hidden=hidden, mtp_hidden=dsa.rms_norm(y, module.shared_head.norm, eps))

    def _layer(
        self, number: int, x: Tensor, positions: Tensor, topk: int | None, guides: Guides | None, outputs: Outputs
    ) -> Tensor:
        """``[B, L, hidden]`` to the same; adds the layer's losses to ``outputs``."""
        c, w = self.c, self.w.model.layers[number]
        shape, flat = x.shape[:2], x.flatten(0, 1)
        angles = positions.flatten()[:, None] * self._frequencies
        turn = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        normed = dsa.rms_norm(flat, w.input_layernorm, c.rms_norm_eps)
        rows = dsa.latent_rows(w.self_attn, c, normed, turn).unflatten(0, shape)  # [B, L, latent]
        q, compressed = dsa.queries(w.self_attn, c, normed, turn)
        q = q.unflatten(0, shape)  # [B, L, heads, latent]
        if topk is None:
            keys = rows[:, None].expand(-1, c.num_attention_heads, -1, -1)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, keys, is_causal=True, scale=c.softmax_scale)
            attended = out.transpose(1, 2)[..., : c.kv_lora_rank].flatten(0, 1)
        else:
            indexer, stopped = w.self_attn.indexer, normed.detach()  # its gradients reach the indexer only
            index_q, weights = dsa.index_queries(indexer, c, stopped, compressed.detach(), turn)
            index_k = dsa.index_keys(indexer, c, stopped, turn)
            index_q, weights, index_k = (one.unflatten(0, shape) for one in (index_q, weights, index_k))
            attended, loss = attend(q, rows, index_q, weights, index_k, c, topk)
            outputs.index_losses.append(loss)
        if guides and number in guides:
            outputs.guide_losses.append(guide_loss(q, rows, c.softmax_scale, guides[number]))
        flat = flat + dsa.output(w.self_attn, c, attended)
        normed = dsa.rms_norm(flat, w.post_attention_layernorm, c.rms_norm_eps)
        if w.mlp.gate is None:
            return (flat + dsa.ffn(w.mlp, normed)).unflatten(0, shape)
        with torch.no_grad():
            load = torch.bincount(dsa.route(w.mlp, c, normed)[0].flatten(), minlength=c.n_routed_experts)
        self.loads[number] = self.loads.get(number, 0) + load
        return (flat + dsa.experts(w.mlp, c, normed, self.world, len(normed))).unflatten(0, shape)

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Auxiliary-loss-free balancing (V3 report, 2.1.2): since the last call, the bias of overloaded experts falls
        by ``speed``, that of the others rises."""
        for number, load in self.loads.items():
            self.w.model.layers[number].mlp.gate_bias.add_(torch.sign(load.float().mean() - load), alpha=speed)
        self.loads.clear()


def attend(
    q: Tensor, rows: Tensor, index_q: Tensor, weights: Tensor, keys: Tensor, c: dsa.Config, topk: int
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries ``[B, L, heads, latent]`` over latent rows ``[B, L, latent]``, by the indexer's
    queries ``[B, L, index heads, dim]``, weights ``[B, L, index heads]`` and keys ``[B, L, dim]``:
    ``[B * L, heads, kv_lora_rank]``, and the indexer's loss, the mean over all queries."""
    length, parts, losses = q.shape[1], [], []
    for document in zip(q, rows, index_q, weights, keys, strict=True):
        for first in range(0, length, ROWS):
            block = (*document, c, topk, slice(first, min(first + ROWS, length)))
            out, loss = checkpoint(_block, *block, use_reentrant=False) if length > KEEP_BLOCKS else _block(*block)
            parts.append(out)
            losses.append(loss)
    return torch.cat(parts), torch.stack(losses).sum() / (len(q) * length)


def _block(
    q: Tensor, rows: Tensor, index_q: Tensor, weights: Tensor, keys: Tensor, c: dsa.Config, topk: int, some: slice
) -> tuple[Tensor, Tensor]:
    """``some`` queries of a document: their attention, and the sum of their indexer losses."""
    first, last = some.start, some.stop
    rows = rows[:last]
    scores = dsa.index_scores(index_q[some], weights[some], keys[:last], torch.arange(first, last))
    closed = scores.detach() == float("-inf")
    if 0 < topk < last:
        chosen = scores.detach().topk(topk, dim=-1).indices
        closed = torch.ones_like(closed).scatter_(1, chosen, False) | closed
    logits = dsa.wide(q[some] @ rows.mT) * c.softmax_scale  # [t, heads, n]
    attention = logits.masked_fill(closed[:, None], float("-inf")).softmax(dim=-1)
    out = attention.to(q.dtype) @ rows[:, : c.kv_lora_rank]
    # Equations 3 and 4: KL(p || softmax(I)), where p is the heads' attention, summed and normalised, without gradient.
    target = attention.detach().mean(dim=1)
    log_index = scores.masked_fill(closed, float("-inf")).log_softmax(dim=-1).masked_fill(closed, 0.0)
    return out, torch.xlogy(target, target).sum() - (target * log_index).sum()


def guide_loss(q: Tensor, rows: Tensor, scale: float, targets: dict[int, Tensor]) -> Tensor:
    """Loss of heads that should attend to one given token each: the mean of ``-log attention[t, target[t]]``, of ``q
    [B, L, heads, latent]`` and ``rows [B, L, latent]``. ``targets``: by head, tokens ``[B, L]``, none after the query;
    -1: any."""
    heads, wanted = list(targets), torch.stack(list(targets.values()), dim=1)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu_(1)
    logits = dsa.wide(q[:, :, heads].transpose(1, 2) @ rows[:, None].mT) * scale
    return F.cross_entropy(logits.masked_fill(future, float("-inf")).flatten(0, 2), wanted.flatten(), ignore_index=-1)
