"""The layers of a checkpoint in plain float32, for some rows at a time: what the engine's layers are compared with.

Written from the papers' equations: no kernel, no absorbed form, no cache. The engine's are only the reading of
``config.json``, YaRN's frequencies and the decoding of INT8 and INT4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch.nn.functional import layer_norm, silu

from dsa_engine.config.model import LATENT_NORM_EPS, ModelConfig
from dsa_engine.kernels.formats.hadamard import hadamard_reference
from dsa_engine.kernels.formats.int8 import quantize_rows_int8_reference
from dsa_engine.kernels.formats.quantize import FP8, quantize_rows_reference
from dsa_engine.model.layout import released_tensors
from dsa_engine.weights import CheckpointReader
from dsa_engine.weights.formats import Matrix, weight_format
from dsa_engine.weights.index import locate_tensors, open_shard

Rounding = Callable[[torch.Tensor], torch.Tensor]


def unrounded(values: torch.Tensor) -> torch.Tensor:
    return values


class PlainModel:
    """Reads what it needs of a checkpoint; the tensors of one layer at a time stay in memory."""

    def __init__(self, folder: Path, config: ModelConfig):
        self.config, self._files = config, locate_tensors(folder)
        self._reader = CheckpointReader(folder, config.weight_block_size)
        self._layer, self._known = -1, dict[str, torch.Tensor]()

    def names(self, layer: int) -> list[str]:
        """The tensors of a layer."""
        return [name for name in self._files if name.startswith(f"model.layers.{layer}.")]

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as the file has it."""
        tensor: torch.Tensor = open_shard(self._files[name]).get_tensor(name)
        return tensor

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in float32: FP8 codes times the scales of their blocks."""
        values, blocks = self.stored(name) if name in self._files else None, self.config.weight_block_size
        if values is None or not values.is_floating_point() or (values.dtype == FP8 and blocks is None):
            return self._decoded(name)
        if values.dtype != FP8 or blocks is None:
            return values.float()
        scales = self.stored(f"{name}_scale_inv").float()
        for dim, block in enumerate(blocks):
            scales = scales.repeat_interleave(block, dim).narrow(dim, 0, values.shape[dim])
        return values.float() * scales

    def _decoded(self, name: str) -> torch.Tensor:
        """A matrix of INT8 or INT4 codes, by the class of its format."""
        made = weight_format(self.config.quantization, None, torch.float32, torch.device("cpu"))
        rows, columns = self._shapes[name]
        linear = made.linear(Matrix(name, rows, columns))
        for source in linear.sources:
            self._reader.load(source)
        linear.loaded()
        return linear.dequantized()

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in released_tensors(self.config, False)}

    def part(self, layer: int, name: str) -> torch.Tensor:
        """A tensor of a layer, by the end of its name; kept until another layer is asked for."""
        if layer != self._layer:
            self._layer, self._known = layer, {}
        if name not in self._known:
            self._known[name] = self.tensor(f"model.layers.{layer}.{name}")
        return self._known[name]

    def normed(self, layer: int, h: torch.Tensor, name: str = "input") -> torch.Tensor:
        return rms_norm(h, self.part(layer, f"{name}_layernorm.weight"), self.config.rms_norm_eps)

    def scores(
        self, layer: int, h: torch.Tensor, rows: torch.Tensor, swapped: bool = False,
        weights: Rounding = unrounded, keys: Rounding = unrounded,
    ) -> torch.Tensor:  # fmt: skip
        """The indexer's scores of ``rows [P]`` (positions), ``[P, T]``; -inf for tokens after the row.

        Args:
            h: ``[T, hidden]``, the residual stream before the layer.
            swapped: with the other form of RoPE.
            weights, keys: applied to the indexer's matrices, and to its keys and queries, to see what another format
                would choose.
        """
        config, x, name = self.config, self.normed(layer, h), "self_attn.indexer."
        rope, interleaved = config.qk_rope_head_dim, config.index_rope_interleaved != swapped
        q = self._q_resid(layer, x[rows]) @ weights(self.part(layer, f"{name}wq_b.weight")).T
        k = x @ weights(self.part(layer, f"{name}wk.weight")).T
        weight, bias = (self.part(layer, f"{name}k_norm.{one}") for one in ("weight", "bias"))
        q, k = q.unflatten(-1, (config.index_n_heads, -1)), layer_norm(k, weight.shape, weight, bias, LATENT_NORM_EPS)
        k = k[:, None]
        q = torch.cat((self._turned(q[..., :rope], rows, interleaved), q[..., rope:]), dim=-1)
        k = torch.cat((self._turned(k[..., :rope], torch.arange(len(k)), interleaved), k[..., rope:]), dim=-1)
        q, k = keys(q), keys(k[:, 0])
        by_head, total = x[rows] @ self.part(layer, f"{name}weights_proj.weight").T, torch.zeros(len(rows), len(k))
        for head in range(config.index_n_heads):
            total += by_head[:, head, None] * (q[:, head] @ k.T).relu()
        return total.masked_fill(~visible(rows, len(k)), -torch.inf)

    def attend(
        self, layer: int, h: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, *, swapped: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``rows [P]`` over the tokens that are ``chosen [P, T]``, see :meth:`scores`.

        Returns:
            its output ``[P, hidden]``, and the mean over heads of dense attention's probabilities ``[P, T]``.
        """
        config, x, interleaved = self.config, self.normed(layer, h), self.config.rope_interleaved != swapped
        nope, rank, seen = config.qk_nope_head_dim, config.kv_lora_rank, visible(rows, len(h))
        q = self._q_resid(layer, x[rows]) @ self.part(layer, "self_attn.q_b_proj.weight").T
        q = q.unflatten(-1, (config.num_attention_heads, -1))
        q_rope = self._turned(q[..., nope:], rows, interleaved)
        kv = x @ self.part(layer, "self_attn.kv_a_proj_with_mqa.weight").T
        latent = rms_norm(kv[:, :rank], self.part(layer, "self_attn.kv_a_layernorm.weight"), LATENT_NORM_EPS)
        k_rope = self._turned(kv[:, None, rank:], torch.arange(len(h)), interleaved)[:, 0]
        up = self.part(layer, "self_attn.kv_b_proj.weight").view(config.num_attention_heads, -1, rank)
        outputs, mass = [], torch.zeros(len(rows), len(h))
        for head in range(config.num_attention_heads):
            key, value = latent @ up[head, :nope].T, latent @ up[head, nope:].T
            logits = (q[:, head, :nope] @ key.T + q_rope[:, head] @ k_rope.T) * config.softmax_scale
            mass += logits.masked_fill(~seen, -torch.inf).softmax(-1) / config.num_attention_heads
            outputs.append(logits.masked_fill(~(seen & chosen), -torch.inf).softmax(-1) @ value)
        return torch.cat(outputs, dim=-1) @ self.part(layer, "self_attn.o_proj.weight").T, mass

    def _q_resid(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        latent = x @ self.part(layer, "self_attn.q_a_proj.weight").T
        return rms_norm(latent, self.part(layer, "self_attn.q_a_layernorm.weight"), LATENT_NORM_EPS)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """RoPE of ``x [n, heads, dim]``: pairs (2i, 2i+1), or (i, i + dim/2)."""
        cos, sin = (part[:, None] for part in self.config.rope.cos_sin(positions))
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def feed_forward(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        """What the feed-forward part adds to ``h [P, hidden]``, the residual stream after attention."""
        x = self.normed(layer, h, "post_attention")
        if self.config.mlp_layer_types[layer] == "dense":
            return self.mlp(layer, "mlp", x)
        out = self.mlp(layer, "mlp.shared_experts", x)
        ids, weights = self.routed(layer, x)
        for expert in ids.unique().tolist():
            rows, rank = (ids == expert).nonzero(as_tuple=True)
            out[rows] += weights[rows, rank, None] * self.mlp(layer, f"mlp.experts.{expert}", x[rows])
        return out

    def routed(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and their weights, ``[P, k]`` each, for ``x [P, hidden]``."""
        config = self.config
        scores = (x @ self.part(layer, "mlp.gate.weight").T).sigmoid()
        choice = (scores + self.part(layer, "mlp.gate.e_score_correction_bias")).unflatten(-1, (config.n_group, -1))
        if config.n_group > 1:
            groups = choice.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            closed = torch.ones(choice.shape[:2], dtype=torch.bool).scatter_(1, groups, False)
            choice = choice.masked_fill(closed[..., None], -torch.inf)
        ids = choice.flatten(1).topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, ids)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * config.routed_scaling_factor

    def mlp(self, layer: int, name: str, x: torch.Tensor, down: bool = True) -> torch.Tensor:
        """A SwiGLU part by its name; without ``down`` its inner activations. Experts are not kept in memory."""

        def part(one: str) -> torch.Tensor:
            whole = f"{name}.{one}_proj.weight"
            return self.tensor(f"model.layers.{layer}.{whole}") if ".experts." in name else self.part(layer, whole)

        inner = silu(x @ part("gate").T) * (x @ part("up").T)
        return inner @ part("down").T if down else inner


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def visible(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool ``[P, tokens]``: the tokens up to each row's position."""
    return torch.arange(tokens) <= rows[:, None]


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool ``[P, T]``: the ``count`` largest finite scores of each row, or all."""
    top = scores.topk(min(count, scores.shape[1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, top, True) & (scores > -torch.inf)


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    """Index keys or queries ``[..., dim]`` as FP8 caches hold them: rounded after a Hadamard transform."""
    size = x.shape[-1]
    codes, scales = quantize_rows_reference(
        hadamard_reference(x, size**-0.5) if size & (size - 1) == 0 else x, size, False
    )
    return codes.float() * scales


def in_int8(weight: torch.Tensor) -> torch.Tensor:
    """A matrix ``[out, in]`` in INT8, with a scale for each row."""
    codes, scales = quantize_rows_int8_reference(weight)
    return codes.float() * scales[:, None]
