"""DeepSeek Sparse Attention: the whole engine on one page, in plain PyTorch.

Begin here. This file reads from top to bottom and has all that the engine does, once, in its simplest right form:

1. the ranks and what they exchange            4. experts                        7. requests and the scheduler
2. the model's configuration, RoPE, weights    5. a layer, the model, MTP        8. sampling
3. MLA and the lightning indexer               6. pages of the caches            9. a step, drafts, generate

Nothing here is fast: every other folder of the project makes some functions of this file fast, and says which. The
tokens are the same: tests and ``dsa-engine check`` compare the engine with this page, and both with transformers.

    python -m dsa_engine.reference.dsa demo "def main():"                       # one process
    torchrun --nproc-per-node 4 -m dsa_engine.reference.dsa MODEL "Once upon"   # context, data and expert parallel

Tensors are flat: T tokens of several requests are rows ``[T, ...]`` without a batch dimension, and every row knows its
request and its position. H is the number of heads, k of selected tokens, n of cached tokens of a request; numbers in
shapes are those of DeepSeek-V3.2.

Sources: DeepSeek-V2 (arXiv 2405.04434), -V3 (2412.19437), -V3.2-Exp (github.com/deepseek-ai/DeepSeek-V3.2-Exp), YaRN
(2309.00071), and vLLM's paged attention (2309.06180). "V3 (12)" is equation 12 of the V3 report.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor


# ---- 1. Ranks -------------------------------------------------------------------------------------------------------
class World:
    """All processes. Each runs this program with the same arguments, plans the same steps, and computes its own rows;
    only results travel: cache rows, tokens of experts and their sums, sampled tokens.

    * Prefill is *context parallel*: the ranks divide the tokens of every prompt (:func:`head_tail`).
    * Decode is *attention data parallel*: a request belongs to one rank, which has its cache and computes its tokens.
    * Experts are divided over the ranks in both (:func:`experts`).
    """

    def __init__(self) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

    def all_gather(self, rows: Tensor, padded: int) -> Tensor:
        """``[T, d]`` of each rank -> ``[size * padded, d]``: rank r's rows begin at ``r * padded``; zeros follow."""
        if self.size == 1:
            return rows
        rows = F.pad(rows, (0, 0, 0, padded - len(rows)))
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    def union(self, mine: dict[int, Any]) -> dict[int, Any]:
        """What all ranks have found out about requests, by their numbers: a few integers a step."""
        if self.size == 1:
            return mine
        of_all: list[dict[int, Any]] = [{}] * self.size
        dist.all_gather_object(of_all, mine)
        return {key: value for one in of_all for key, value in one.items()}


def head_tail(start: int, end: int, rank: int, size: int) -> list[int]:
    """The positions among ``start ... end - 1`` that a rank prefills: pieces ``rank`` and ``2 * size - 1 - rank`` of
    ``2 * size``. A token is scored against all before it, so late pieces cost more: each rank has a cheap and a costly
    one, and all finish together."""
    cut = [start + (end - start) * piece // (2 * size) for piece in range(2 * size + 1)]
    return [p for piece in (rank, 2 * size - 1 - rank) for p in range(cut[piece], cut[piece + 1])]


# ---- 2. Configuration, RoPE, weights --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """The keys of ``config.json`` that change what is computed: ``deepseek_v32``, ``glm_moe_dsa``, ``deepseek_v3``."""

    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int  # 512: the latent that stands for all heads' keys and values
    qk_nope_head_dim: int  # 128: part of a head's query and key without position
    qk_rope_head_dim: int  # 64: part with RoPE; the key's is one for all heads
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    rope: dict[str, Any]  # the keys of rope_parameters, or of the older rope_scaling with rope_theta
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    index_topk: int = 0  # 2048; 0: V3, R1: dense attention
    index_n_heads: int = 0  # 64
    index_head_dim: int = 0  # 128
    indexer_types: tuple[str, ...] = ()  # of a layer: "full" selects, "shared" takes the last selection before it
    index_share_for_mtp_iteration: bool = False  # the MTP module's later passes take the selection of its first
    rope_interleave: bool = True
    indexer_rope_interleave: bool = False  # GLM-5 rotates pairs in the indexer too
    weight_block_size: tuple[int, int] = (128, 128)
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Raises ``ValueError`` for another kind of model."""
        raw = json.loads((folder / "config.json").read_text())
        kind, layers = raw["model_type"], raw["num_hidden_layers"]
        if kind not in ("deepseek_v32", "glm_moe_dsa", "deepseek_v3"):
            raise ValueError(f"model_type {kind!r} of {folder}: this page knows deepseek_v32, glm_moe_dsa, deepseek_v3")
        keys = {name: raw[name] for name in cls.__dataclass_fields__ if raw.get(name) is not None}
        keys["rope"] = {"rope_theta": raw.get("rope_theta", 1e4)}
        keys["rope"] |= raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if kind == "deepseek_v3":
            keys["index_topk"] = 0
        else:
            every, skip = raw.get("index_topk_freq") or 1, raw.get("index_skip_topk_offset", 2)
            pattern = [{"F": "full", "S": "shared"}.get(one, one) for one in raw.get("index_topk_pattern") or ()]
            by_frequency = ["full" if max(i - skip + 1, 0) % every == 0 else "shared" for i in range(layers)]
            keys["indexer_types"] = tuple(raw.get("indexer_types") or pattern or by_frequency)
            keys.setdefault("indexer_rope_interleave", kind == "glm_moe_dsa")
        keys["weight_block_size"] = tuple((raw.get("quantization_config") or {}).get("weight_block_size") or (128, 128))
        generation = folder / "generation_config.json"  # may name further end tokens
        also = json.loads(generation.read_text()) if generation.exists() else {}
        ids = [raw.get("eos_token_id"), also.get("eos_token_id")]
        keys["eos_token_ids"] = tuple({i for one in ids for i in (one if isinstance(one, list) else [one])} - {None})
        return cls(**keys)

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim  # 576

    @property
    def softmax_scale(self) -> float:
        """``(128 + 64) ** -0.5``, times YaRN's temperature (YaRN, equation 21, as DeepSeek applies it)."""
        sharper = mscale(self.yarn_factor, self.rope.get("mscale_all_dim") or 0.0) ** 2
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * sharper

    @property
    def yarn_factor(self) -> float:
        """How many times YaRN stretches the context; 1: plain RoPE."""
        if self.rope.get("rope_type", self.rope.get("type")) != "yarn":
            return 1.0
        return self.rope.get("factor") or self.max_position_embeddings / self.rope["original_max_position_embeddings"]


def mscale(factor: float, weight: float) -> float:
    """YaRN, section 3.3: the longer the context is stretched, the sharper the softmax."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_frequencies(c: Config) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair, float32 ``[32]``, and a factor of cos and sin.

    YaRN (section 3.2) keeps pairs that turn often over the original context, slows pairs that turn rarely by its
    factor, and blends in between along a ramp.
    """
    dim, theta, rope, factor = c.qk_rope_head_dim, c.rope["rope_theta"], c.rope, c.yarn_factor
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [32]
    if factor == 1.0:
        return 1.0 / powers, 1.0
    original = rope["original_max_position_embeddings"]
    # Positions a turn of the pair that turns 32 times over the original context, and of the one that turns once.
    periods = original / (rope.get("beta_fast") or 32), original / (rope.get("beta_slow") or 1)
    fast, slow = (dim * math.log(period / (2 * math.pi)) / (2 * math.log(theta)) for period in periods)
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: keep, 1: slow
    one, every = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    scale = mscale(factor, one) / mscale(factor, every) if one and every else mscale(factor, 1.0)
    return (1 - ramp) / powers + ramp / (factor * powers), rope.get("attention_factor") or scale


def rotate(x: Tensor, turn: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """RoPE of ``x [T, ..., 64]`` by ``turn``: cos and sin ``[T, 32]``.

    Interleaved rotates the pairs (2i, 2i + 1), as MLA does; else (i, i + 32), as V3.2's *indexer* does. Short tests
    pass with the wrong one, long contexts do not.
    """
    cos, sin = (t.view(len(x), *[1] * (x.dim() - 2), t.shape[1]) for t in turn)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


class Weights(dict[Any, Any]):
    """Tensors by the parts of their names in the checkpoint: ``model.layers[3].self_attn.q_a_proj``. None: there is no
    such tensor. A matrix is ``[out, in]``."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def put(self, name: str, tensor: Tensor) -> None:
        *path, last = name.removesuffix(".weight").split(".")
        if last.endswith("bias"):  # a module's weight has the module's name, and its bias this one:
            last = f"{path.pop()}_bias"
        node = self
        for part in path:
            node = node.setdefault(int(part) if part.isdigit() else part, Weights())
        node[last] = tensor


def read_weights(folder: Path, c: Config, world: World, dtype: torch.dtype) -> Weights:
    """The tensors that a rank needs: all, but of routed experts its own share (:func:`own_experts`), and of MTP modules
    the first. FP8 becomes numbers: a code times the scale of its 128 x 128 block."""
    weights, own, rows, columns = Weights(), own_experts(c, world), *c.weight_block_size
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    file_of = {name: file for file in files for name in file.keys()}
    for name, file in file_of.items():
        parts = name.split(".")
        expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else None
        beyond = parts[1] == "layers" and int(parts[2]) > c.num_hidden_layers
        if name.endswith("_scale_inv") or beyond or (expert is not None and expert not in own):
            continue
        tensor = file.get_tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = file_of[f"{name}_scale_inv"].get_tensor(f"{name}_scale_inv").float()
            scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            tensor = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        exact = ".k_norm." in name or name.endswith("bias")  # stored in float32, and used so
        weights.put(name, tensor.to(world.device, torch.promote_types(dtype, torch.float32) if exact else dtype))
    weights.setdefault("lm_head", weights.model.embed_tokens)  # tie_word_embeddings
    return weights


# ---- 3. MLA and the lightning indexer -------------------------------------------------------------------------------
def wide(x: Tensor) -> Tensor:
    """float32 at least: norms, router, index scores, softmax and logits are computed so."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` in every row of ``[T, d]``. MLA's norms have 1e-6 in every model."""
    full = wide(x)
    return (full * (full.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def latent_rows(w: Weights, c: Config, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """What MLA caches of each token, for all heads together: ``x [T, 7168]`` -> ``[T, 512 + 64]``, V3 (1) and (3).

    The first 512 numbers are the compressed keys and values, normed; the other 64 the key's part with RoPE.
    """
    latent, key = F.linear(x, w.kv_a_proj_with_mqa).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
    return torch.cat((rms_norm(latent, w.kv_a_layernorm), rotate(key, turn, c.rope_interleave)), -1)


def up_projections(w: Weights, c: Config) -> tuple[Tensor, Tensor]:
    """W_UK and W_UV, ``[H, 128, 512]`` each, which make a head's key and value of a latent, V3 (2) and (5)."""
    both = w.kv_b_proj.view(c.num_attention_heads, -1, c.kv_lora_rank)
    return both[:, : c.qk_nope_head_dim], both[:, c.qk_nope_head_dim :]


def queries(w: Weights, c: Config, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """*Absorbed* queries: ``x [T, 7168]`` -> ``[T, H, 512 + 64]``, and the compressed query ``[T, 1536]``, V3 (6-9).

    A head's score for a latent l is ``q . (W_UK l) = (W_UK^T q) . l``. So W_UK is multiplied into the query once, and
    no key is ever made: every head attends to the same latent rows (V2, section 2.1.2). :func:`output` has W_UV.
    """
    compressed = rms_norm(F.linear(x, w.q_a_proj), w.q_a_layernorm)  # [T, 1536]
    q = F.linear(compressed, w.q_b_proj).unflatten(-1, (c.num_attention_heads, -1))  # [T, H, 128 + 64]
    plain, turned = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
    absorbed = torch.einsum("thd,hdr->thr", plain, up_projections(w, c)[0])  # [T, H, 512]
    return torch.cat((absorbed, rotate(turned, turn, c.rope_interleave)), -1), compressed


def index_rotate(c: Config, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of the *first* 64 of the 128 numbers of an index key or query. (MLA's are its last ones.)"""
    head, tail = x.split((c.qk_rope_head_dim, x.shape[-1] - c.qk_rope_head_dim), -1)
    return torch.cat((rotate(head, turn, c.indexer_rope_interleave), tail), -1)


def index_keys(w: Weights, c: Config, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """The indexer's cache, one key for all of its heads: ``x [T, 7168]`` -> ``[T, 128]``. A LayerNorm, with a bias."""
    key = wide(F.linear(x, w.wk))
    normed = F.layer_norm(key, key.shape[-1:], w.k_norm, w.k_norm_bias, 1e-6).to(x.dtype)
    return index_rotate(c, normed, turn)


def index_queries(w: Weights, c: Config, x: Tensor, q: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Index queries ``[T, 64, 128]``, from the compressed query ``q [T, 1536]``, and a weight of each head ``[T, 64]``.
    (The released model turns queries and keys by a Hadamard matrix before it rounds to FP8: no product changes.)"""
    by_head = F.linear(q, w.wq_b).unflatten(-1, (c.index_n_heads, c.index_head_dim))
    weights = F.linear(wide(x), wide(w.weights_proj)) * (c.index_n_heads * c.index_head_dim) ** -0.5
    return index_rotate(c, by_head, turn), weights


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """``[t, n]``: how much row t wants token s; -inf for tokens after it. V3.2-Exp (1)::

    I[t, s] = sum over heads j of  w[t, j] * ReLU(q[t, j] . k[s])
    """
    by_head = torch.einsum("thd,nd->thn", wide(q), wide(keys)).relu()
    scores = torch.einsum("thn,th->tn", by_head, weights)
    return scores.masked_fill(torch.arange(len(keys), device=q.device) > positions[:, None], -math.inf)


def select(q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, topk: int) -> Tensor:
    """The lightning indexer: positions ``[T, k]`` of the tokens that each row attends to; -1 where it sees fewer.

    Of equal scores the earlier token is taken. A row that sees at most k tokens takes them all: DSA is dense attention
    there. Rows go in pieces: scores of all heads are the largest tensor of a long prefill.
    """
    parts = []
    for some in pieces(len(q), q.shape[1] * len(keys)):
        scores, order = index_scores(q[some], weights[some], keys, positions[some]).sort(descending=True, stable=True)
        parts.append(order[:, :topk].masked_fill(scores[:, :topk] == -math.inf, -1))
    return torch.cat(parts)


def attend(
    q: Tensor, rows: Tensor, positions: Tensor, chosen: Tensor | None, width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of ``q [T, H, 576]`` over latent rows ``[n, 576]`` -> ``[T, H, 512]``, V3 (10), and the logarithm of
    each softmax's sum, ``[T, H]``.

    A latent row is the key of all heads; its first 512 numbers (``width``) are their value. With ``chosen [T, k]`` a
    row reads k of the n rows, whatever n is: that is the *sparse* in DeepSeek Sparse Attention. None: all before it.
    """
    parts, sums = [], []
    for some in pieces(len(q), (len(rows) if chosen is None else chosen.shape[1]) * (rows.shape[1] + q.shape[1])):
        if chosen is None:
            keys = rows[None]  # [1, n, 576]
            seen = torch.arange(len(rows), device=q.device) <= positions[some, None]  # [t, n]
        else:
            keys = rows[chosen[some].clamp(min=0)]  # [t, k, 576]
            seen = chosen[some] >= 0  # [t, k]
        scores = (wide(q[some] @ keys.mT) * scale).masked_fill(~seen[:, None], -math.inf)  # [t, H, k]
        probabilities = scores.softmax(-1).nan_to_num(0).to(q.dtype)  # zeros where nothing is seen
        parts.append(probabilities @ keys[..., :width])
        sums.append(scores.logsumexp(-1))
    return torch.cat(parts), torch.cat(sums)


def attend_across_ranks(
    q: Tensor, index: tuple[Tensor, Tensor], held: Sequence[tuple[Tensor, Tensor, Tensor]], positions: Tensor,
    topk: int, width: int, scale: float,
) -> Tensor:  # fmt: skip
    """Selection and attention in decode where a request's pages lie on several ranks (the engine's ``dcp_size``; this
    page's requests have one). Queries travel, and small results; no cache row does.

    ``held``: of each rank latent rows ``[n, 576]``, index keys ``[n, 128]`` and the n tokens' positions, ascending.
    """
    best_of, parts = list[tuple[Tensor, ...]](), []
    for _, keys, tokens in held:  # each rank: its k best tokens are *candidates*; no other can be among all k best
        seen = torch.searchsorted(tokens, positions, right=True) - 1  # what a row sees comes first on every rank
        mine = select(*index, keys, seen, topk)
        scores = index_scores(*index, keys, seen).gather(1, mine.clamp(min=0)).masked_fill(mine < 0, -math.inf)
        best_of.append((scores, tokens[mine], mine))
    scores, tokens, candidates = (torch.cat(each, -1) for each in zip(*best_of))  # exchanged: size * k for each row
    by_token = tokens.argsort(-1)  # of equal scores the earlier token
    order = by_token.gather(1, scores.gather(1, by_token).sort(descending=True, stable=True).indices)
    chosen = candidates.masked_fill(torch.ones_like(order).scatter(1, order[:, :topk], 0).bool(), -1)
    for (rows, *_), mine in zip(held, chosen.split([one.shape[1] for *_, one in best_of], -1)):
        parts.append(attend(q, rows, positions, mine, width, scale))  # each rank: those that it holds
    outputs, sums = (torch.stack(each) for each in zip(*parts))  # exchanged: a softmax in parts, each with its sum
    return (sums.softmax(0)[..., None] * outputs).sum(0)


def output(w: Weights, c: Config, attended: Tensor) -> Tensor:
    """``[T, H, 512]`` -> ``[T, 7168]``: W_UV makes each head's value of its attended latent; o_proj. V3 (5, 11)."""
    values = torch.einsum("thr,hvr->thv", attended, up_projections(w, c)[1])
    return F.linear(values.flatten(1), w.o_proj)


def pieces(rows: int, each: int, limit: int = 2**25) -> Iterator[slice]:
    """Slices of ``rows`` so short that a tensor with ``each`` numbers a row has at most ``limit``."""
    step = max(1, limit // max(1, each))
    return (slice(first, first + step) for first in range(0, rows, step))


# ---- 4. Experts -----------------------------------------------------------------------------------------------------
def route(w: Weights, c: Config, x: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, ``[T, 8]`` each, V3 (13-16). Scores are sigmoids. A bias, trained to
    balance the load, is added to *choose*, never to weigh: the best ``topk_group`` groups, each by the sum of its two
    best experts, and then the best experts inside them."""
    scores = F.linear(wide(x), wide(w.gate)).sigmoid()  # [T, E]
    choice = scores + w.gate_bias
    if c.n_group > 1:
        grouped = choice.unflatten(-1, (c.n_group, -1))  # [T, groups, E / groups]
        best = grouped.topk(2, -1).values.sum(-1).sort(descending=True, stable=True).indices[:, : c.topk_group]
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        choice = grouped.masked_fill(closed[..., None], -math.inf).flatten(1)
    ids = choice.sort(descending=True, stable=True).indices[:, : c.num_experts_per_tok]
    weights = scores.gather(1, ids)
    if c.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * c.routed_scaling_factor


def ffn(w: Weights, x: Tensor) -> Tensor:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""
    return F.linear(F.silu(F.linear(x, w.gate_proj)) * F.linear(x, w.up_proj), w.down_proj)


def own_experts(c: Config, world: World) -> range:
    """The routed experts that a rank holds."""
    return range(*(c.n_routed_experts * r // world.size for r in (world.rank, world.rank + 1)))


def experts(w: Weights, c: Config, x: Tensor, world: World, padded: int) -> Tensor:
    """The shared expert plus the routed ones, V3 (12): ``x [T, 7168]`` -> ``[T, 7168]``. Every rank gets the tokens of
    all (*dispatch*), applies its own experts to those that chose them, and the sums over ranks return (*combine*). The
    engine sends a token only to the ranks of its experts."""
    ids, weights = route(w, c, x)
    tokens = world.all_gather(x, padded)  # [size * padded, 7168]
    ids, weights = world.all_gather(ids, padded), world.all_gather(weights, padded)  # padding: weight 0
    routed = torch.zeros_like(tokens)
    for expert in own_experts(c, world):
        row, column = (ids == expert).nonzero(as_tuple=True)
        weighted = ffn(w.experts[expert], tokens[row]) * weights[row, column, None].to(x.dtype)
        routed = routed.index_add(0, row, weighted)
    if world.size > 1:
        dist.all_reduce(routed)
    return ffn(w.shared_experts, x) + routed[world.rank * padded :][: len(x)]


# ---- 5. A layer, the model, the MTP module --------------------------------------------------------------------------
@dataclass
class Batch:
    """The tokens that one pass computes: of every rank, requests and positions of each. All ranks know all of it."""

    of_ranks: list[list[tuple[Request, list[int]]]]
    prefill: bool  # the cache rows of all ranks' tokens are written on every rank

    def rows(self, rank: int) -> list[tuple[Request, int]]:
        """Request and position of each of a rank's T rows."""
        return [(request, p) for request, positions in self.of_ranks[rank] for p in positions]

    @property
    def padded(self) -> int:
        """The largest T of a rank, to which exchanges are padded."""
        return max(len(self.rows(rank)) for rank in range(len(self.of_ranks)))

    @property
    def requests(self) -> list[Request]:
        return list(dict.fromkeys(request for own in self.of_ranks for request, _ in own))


class Model:
    """The decoder and its caches on this rank: ``latent[layer] [slots, 576]`` and ``keys[layer] [slots, 128]``. A
    *page* is ``page_size`` consecutive slots, under one number in all layers. The MTP module's layer comes last."""

    def __init__(self, c: Config, weights: Weights, world: World, pages: int, page_size: int, dtype: torch.dtype):
        self.c, self.w, self.head, self.world, self.page_size = c, weights.model, weights.lm_head, world, page_size
        self.frequencies, self.rope_scale = rope_frequencies(c)
        slots, layers = pages * page_size, len(self.w.layers)
        self.latent = [torch.empty(slots, c.latent_dim, dtype=dtype, device=world.device) for _ in range(layers)]
        self.keys = [torch.empty(slots, c.index_head_dim, dtype=dtype, device=world.device) for _ in range(layers)]

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at ``positions [T]``, float32 ``[T, 32]`` each."""
        angles = positions.float()[:, None] * self.frequencies.to(positions.device)
        return angles.cos() * self.rope_scale, angles.sin() * self.rope_scale

    def write(self, layer: int, batch: Batch, rows: Tensor, keys: Tensor | None) -> None:
        """Stores the tokens' latent rows ``[T, 576]`` and index keys ``[T, 128]`` in their slots. In prefill all ranks'
        are gathered, side by side in one buffer: the only exchange that attention needs, once a layer. They go straight
        to the slots of their positions, so head-tail order costs nothing."""
        packed, rank = rows if keys is None else torch.cat((rows, keys), -1), self.world.rank
        sources = [(rank, 0)]  # whose rows, and where they begin; the slots are ours
        if batch.prefill and self.world.size > 1:
            packed = self.world.all_gather(packed, batch.padded)
            sources = [(r, r * batch.padded) for r in range(self.world.size)]
        for r, at in sources:
            for request, positions in batch.of_ranks[r]:
                slots = request.slots(rank, positions, self.page_size)
                some = packed[at : at + len(positions)]
                self.latent[layer][slots] = some[:, : self.c.latent_dim]
                if keys is not None:
                    self.keys[layer][slots] = some[:, self.c.latent_dim :]
                at += len(positions)

    def attention(self, layer: int, x: Tensor, batch: Batch, chosen: list[Tensor]) -> Tensor:
        """``x [T, 7168]``, normed -> ``[T, 7168]``. Rows are written first, so that a token sees itself. ``chosen`` has
        the positions ``[k]`` that each row attends to: a layer with an indexer renews it, a "shared" one (GLM-5.2) uses
        it as it is. Where none has one, it stays empty."""
        c, w, rank = self.c, self.w.layers[layer].self_attn, self.world.rank
        positions = torch.tensor([p for _, p in batch.rows(rank)], dtype=torch.int64, device=x.device)  # [T]
        turn = self.turns(positions)
        rows = latent_rows(w, c, x, turn)
        kinds = (*c.indexer_types, "shared" if chosen else "full")  # the last is of the MTP module
        indexer = None if kinds[layer : layer + 1] == ("shared",) else w.indexer
        keys = index_keys(indexer, c, x, turn) if indexer else None
        self.write(layer, batch, rows, keys)
        q, compressed = queries(w, c, x, turn)
        if indexer:
            q_index, head_weights = index_queries(indexer, c, x, compressed, turn)
            chosen.clear()
        attended, at = [q[:0, :, : c.kv_lora_rank]], 0  # a rank may have no rows
        for request, of_request in batch.of_ranks[rank]:
            some, at = slice(at, at + len(of_request)), at + len(of_request)
            cached = request.slots(rank, range(of_request[-1] + 1), self.page_size)  # n slots: all that it may see
            if indexer:
                keys = self.keys[layer][cached]  # [n, 128]: the indexer reads all of them ...
                chosen.extend(select(q_index[some], head_weights[some], keys, positions[some], c.index_topk))
            best = torch.stack(chosen[some]) if chosen else None  # ... and attention reads k of the latent rows
            rows = self.latent[layer][cached]  # (a copy of all n; the engine's kernels read pages in place)
            attended.append(attend(q[some], rows, positions[some], best, c.kv_lora_rank, c.softmax_scale)[0])
        return output(w, c, torch.cat(attended))

    def layer(self, number: int, x: Tensor, batch: Batch, chosen: list[Tensor]) -> Tensor:
        """``x [T, 7168]`` -> ``[T, 7168]``: attention, then experts (or an MLP), each on a norm and added to x."""
        w, eps = self.w.layers[number], self.c.rms_norm_eps
        x = x + self.attention(number, rms_norm(x, w.input_layernorm, eps), batch, chosen)
        normed = rms_norm(x, w.post_attention_layernorm, eps)
        if w.mlp.gate is None:  # the first layers
            return x + ffn(w.mlp, normed)
        return x + experts(w.mlp, self.c, normed, self.world, batch.padded)

    def forward(self, ids: Tensor, batch: Batch) -> Tensor:
        """Token ids ``[T]`` -> normed states ``[T, 7168]``."""
        x, chosen = self.w.embed_tokens[ids], list[Tensor]()
        for number in range(self.c.num_hidden_layers):
            x = self.layer(number, x, batch, chosen)
        return rms_norm(x, self.w.norm, self.c.rms_norm_eps)

    def mtp(self, ids: Tensor, states: Tensor, batch: Batch, chosen: list[Tensor]) -> Tensor:
        """The Multi-Token Prediction module, V3 (21-23): states ``[T, 7168]`` of tokens i and the ids ``[T]`` of tokens
        i + 1 -> normed states, whose logits are of tokens i + 2. It is a decoder layer with caches of its own."""
        w, eps = self.w.layers[self.c.num_hidden_layers], self.c.rms_norm_eps
        embedded = (self.w.embed_tokens if w.embed_tokens is None else w.embed_tokens)[ids]
        both = torch.cat((rms_norm(embedded, w.enorm, eps), rms_norm(states, w.hnorm, eps)), -1)  # [T, 2 * 7168]
        x = self.layer(self.c.num_hidden_layers, F.linear(both, w.eh_proj), batch, chosen)
        return rms_norm(x, w.shared_head.norm, eps)

    def logits(self, states: Tensor, mtp: bool = False) -> Tensor:
        """``[T, 7168]`` -> float32 ``[T, vocab]``."""
        own = self.w.layers[self.c.num_hidden_layers].shared_head.head if mtp else None
        return wide(F.linear(states, self.head if own is None else own))


# ---- 6. Pages of the caches -----------------------------------------------------------------------------------------
class Pages:
    """The books of one rank's pages. Every rank keeps those of all ranks, as all take the same decisions. A full page
    has a *name*, a hash of its tokens and all before them, by which a later request with the same beginning finds it
    (prefix cache). A page that no request holds keeps its name until its memory is needed."""

    def __init__(self, count: int):
        self.free = deque(range(count))
        self.idle: OrderedDict[int, None] = OrderedDict()  # named, of no request; the longest unused first
        self.holders = [0] * count
        self.by_name: dict[bytes, int] = {}
        self.names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of the longest known beginning."""
        return [self.by_name[name] for name in itertools.takewhile(self.by_name.__contains__, names)]

    def hold(self, page: int) -> int:
        self.holders[page] += 1
        self.idle.pop(page, None)
        return page

    def take(self) -> int:
        """A page for new rows; the oldest idle one is forgotten if no other is free."""
        page = self.free.popleft() if self.free else next(iter(self.idle))
        self.by_name.pop(self.names.pop(page, b""), None)
        return self.hold(page)

    def name(self, page: int, name: bytes) -> None:
        if page not in self.names and name not in self.by_name:
            self.names[page], self.by_name[name] = name, page

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):  # a beginning is of more use than what follows it
            self.holders[page] -= 1
            if not self.holders[page]:
                (self.idle.setdefault if page in self.names else self.free.append)(page)


# ---- 7. Requests and the scheduler ----------------------------------------------------------------------------------
@dataclass(eq=False)
class Request:
    """Tokens that are known, and how far they are computed. ``waiting`` -> ``prefill``, with pages on every rank ->
    ``decode``, with pages on its owner -> ``done``. A preempted request loses its pages and waits again; what it has
    said so far is then part of its prompt."""

    number: int  # order of arrival
    tokens: list[int]  # the prompt, then the output
    max_len: int  # of tokens
    temperature: float = 0.0  # 0: the most likely token
    seed: int = 0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    state: str = "waiting"
    computed: int = 0  # tokens whose rows are in the caches
    drafts: list[int] = field(default_factory=list)  # guesses of the next tokens
    owner: int = 0
    tables: list[list[int]] = field(default_factory=list)  # block table of each rank: its pages in order of position

    def slots(self, rank: int, positions: Iterable[int], page_size: int) -> Tensor:
        """int64 ``[n]``: the cache rows of positions on a rank."""
        table = self.tables[rank]
        return torch.tensor([table[p // page_size] * page_size + p % page_size for p in positions], dtype=torch.int64)


class Scheduler:
    """Decides which tokens are computed next; the same on all ranks, without a message. First come, first served. Every
    request ends: it enters with the pages of its whole prefill, and if it finds no page to decode into, the *youngest*
    on its rank loses its own; the oldest always goes on. A step prefills at most ``chunk`` tokens times the ranks."""

    def __init__(self, world: World, pages: int, page_size: int, chunk: int):
        self.world, self.page_size, self.chunk, self.num_drafts = world, page_size, chunk, 0
        self.pages = [Pages(pages) for _ in range(world.size)]
        self.requests: list[Request] = []  # all that are not done, in order of arrival

    def check(self, tokens: int) -> None:
        """Raises ``ValueError`` if a request of so many tokens does not fit into empty caches."""
        need, have = self.pages_for(tokens), len(self.pages[0].holders)
        if need > have:
            raise ValueError(f"{tokens} tokens need {need} pages of {self.page_size}; there are {have}")

    def names(self, tokens: list[int]) -> list[bytes]:
        """Names of the full pages of ``tokens``. An MTP module's row depends on the next token too."""
        names, digest, ahead = [], b"", int(self.num_drafts > 0)
        for end in range(self.page_size, len(tokens) - ahead + 1, self.page_size):
            page, after = tokens[end - self.page_size : end], tokens[end : end + ahead]
            digest = hashlib.blake2b(digest + repr(page).encode()).digest()
            names.append(digest + repr(after).encode())
        return names

    def pages_for(self, tokens: int) -> int:
        """With room for the drafts of a step, and for what the module writes if all are accepted and it drafts on."""
        return -(-(tokens + 2 * self.num_drafts) // self.page_size)

    def schedule(self) -> Batch | None:
        """Chunks of prompts if there are any, else the next tokens of all that decode."""
        chunks, budget = [], self.chunk * self.world.size
        for request in self.requests:
            if budget == 0 or (request.state == "waiting" and not self.admit(request)):
                break
            if request.state == "prefill":
                end = min(len(request.tokens), request.computed + budget)
                chunks.append((request, request.computed, end))
                budget, request.computed = budget - (end - request.computed), end
        if chunks:
            return self.prefill(chunks)
        self.give_pages()
        of_ranks: list[list[tuple[Request, list[int]]]] = [[] for _ in self.pages]
        for request in self.requests:
            if request.state == "decode":
                rows = range(request.computed, request.computed + 1 + len(request.drafts))
                of_ranks[request.owner].append((request, [*rows]))
        return Batch(of_ranks, prefill=False) if any(of_ranks) else None

    def prefill(self, chunks: Sequence[tuple[Request, int, int]]) -> Batch:
        """Context parallel: each rank takes a head and a tail piece of every chunk."""
        ranks = range(self.world.size)
        of_ranks = [[(one, head_tail(start, end, r, len(ranks))) for one, start, end in chunks] for r in ranks]
        return Batch([[(one, positions) for one, positions in own if positions] for own in of_ranks], prefill=True)

    def admit(self, request: Request) -> bool:
        """Gives a request pages on every rank: those of a known beginning, and new ones. False: there is no room."""
        tokens = request.tokens
        names = self.names(tokens)[: (len(tokens) - 1) // self.page_size]  # the last token is computed, for its logits
        known = min(len(pages.find(names)) for pages in self.pages)
        request.tables = [[pages.hold(page) for page in pages.find(names[:known])] for pages in self.pages]
        missing = self.pages_for(len(tokens)) - known
        if any(pages.available < missing for pages in self.pages):
            self.release(request)
            return False
        for pages, table in zip(self.pages, request.tables):
            table.extend(pages.take() for _ in range(missing))
        owners = [one.owner for one in self.requests if any(one.tables) and one is not request]
        request.owner = min(range(self.world.size), key=owners.count)
        request.state, request.computed, request.drafts = "prefill", known * self.page_size, []
        return True

    def give_pages(self) -> None:
        """A page for every request that decodes beyond its last one; if there is none, the youngest is preempted."""
        for request in self.requests:
            need, pages = self.pages_for(len(request.tokens)), self.pages[request.owner]
            while request.state == "decode" and len(request.tables[request.owner]) < need:
                if pages.available:
                    request.tables[request.owner].append(pages.take())
                else:
                    on_rank = [r for r in self.requests if r.state == "decode" and r.owner == request.owner]
                    youngest = on_rank[-1]  # perhaps the request itself
                    self.release(youngest)
                    youngest.state = "waiting"

    def finish_step(self, request: Request) -> None:
        """After a step: names the pages that are full now. After its prefill a request keeps those of its owner."""
        names = self.names(request.tokens)[: request.computed // self.page_size]
        for pages, table in zip(self.pages, request.tables):
            for page, name in zip(table, names):
                pages.name(page, name)
        if request.state != "prefill":
            self.release(request, keep=request.owner if request.state == "decode" else None)
        if request.state == "done":
            self.requests.remove(request)

    def release(self, request: Request, keep: int | None = None) -> None:
        """Gives back a request's pages on all ranks, but one to ``keep``."""
        for rank, table in enumerate(request.tables):
            if rank != keep:
                self.pages[rank].release(table)
                table.clear()


# ---- 8. Sampling ----------------------------------------------------------------------------------------------------
def sample(logits: Tensor, how: Request, position: int) -> int:
    """The token of a request at ``position``, from ``logits [vocab]``. Its random numbers follow from the request's
    seed and the position alone: no batch and no rank changes it, and it can be compared with a draft."""
    if how.temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / how.temperature
    if 0 < how.top_k < len(logits):
        scaled = scaled.masked_fill(scaled < scaled.topk(how.top_k).values[-1], -math.inf)
    probabilities = scaled.softmax(-1)
    if how.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= max(how.top_p, 1e-30), 0.0)
        probabilities = torch.zeros_like(ordered).scatter(0, order, ordered)
    # The largest p / Exp(1) is a draw from p (the exponential form of the Gumbel trick).
    return int((probabilities / exponential_noise(how.seed, position, logits)).argmax())


def exponential_noise(seed: int, position: int, like: Tensor) -> Tensor:
    """Draws from Exp(1), float32 ``[vocab]``: SplitMix64 (Steele, Lea, Flood, 2014) of a hash of seed and position."""

    def mix(bits: Tensor) -> Tensor:  # int64, modulo 2^64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
            bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * factor
        return bits ^ ((bits >> 31) & (2**33 - 1))

    key = int.from_bytes(hashlib.blake2b(f"{seed}".encode(), digest_size=8).digest(), "big", signed=True)
    state = mix(torch.tensor(position) * (0xD1B54A32D192ED03 - 2**64) + key).to(like.device)
    bits = mix(state + torch.arange(1, len(like) + 1, device=like.device) * (0x9E3779B97F4A7C15 - 2**64))
    uniform = (((bits >> 33) & (2**31 - 1)).float() + 0.5) * 2.0**-31
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


# ---- 9. A step, drafts, generate ------------------------------------------------------------------------------------
class Engine:
    """A model, its caches, and requests. Made by :func:`load`."""

    def __init__(self, folder: Path, dtype: torch.dtype, pages: int = 1024, page_size: int = 64, chunk: int = 2048):
        self.folder, self.world, self.config = folder, World(), Config.read(folder)
        weights = read_weights(folder, self.config, self.world, dtype)
        self.model = Model(self.config, weights, self.world, pages, page_size, dtype)
        self.scheduler = Scheduler(self.world, pages, page_size, chunk)
        self.arrivals = itertools.count()

    @torch.inference_mode()
    def step(self) -> bool:
        """The whole engine: some tokens through the model, the tokens after them, guesses of the next. False: idle."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        states = self.model.forward(self.ids(batch), batch)
        sampled = self.sample(batch, states)  # {number of the request: tokens}, of all ranks
        for request in batch.requests:
            self.accept(request, sampled.get(request.number, []))
        if self.scheduler.num_drafts:
            self.draft(batch, states, sampled)
        for request in batch.requests:
            self.scheduler.finish_step(request)
        return True

    def ids(self, batch: Batch, after: int = 0) -> Tensor:
        """Ids ``[T]`` of this rank's tokens; with ``after`` 1 of the tokens after them (0 where none is known)."""
        ids = []
        for request, positions in batch.of_ranks[self.world.rank]:
            known = request.tokens + request.drafts + [0] * after
            ids += [known[min(p + after, len(known) - 1)] for p in positions]
        return torch.tensor(ids, dtype=torch.int64, device=self.world.device)

    def sample(self, batch: Batch, states: Tensor) -> dict[int, list[int]]:
        """The token after each row that has no known one: the last row of a prompt, all rows in decode."""
        mine, own = dict[int, list[int]](), batch.rows(self.world.rank)
        rows = [row for row, (request, p) in enumerate(own) if p + 1 >= len(request.tokens)]
        for row, logits in zip(rows, self.model.logits(states[rows])):
            request, p = own[row]
            mine.setdefault(request.number, []).append(sample(logits, request, p + 1))
        return self.world.union(mine)

    def accept(self, request: Request, sampled: list[int]) -> None:
        """Verifies drafts. A row was computed with the drafts before it, and its token is right if these are. So tokens
        are taken up to the first that differs from its draft, and that one too: each is the model's own choice, with
        the random numbers of its position, as without drafts."""
        for number, token in enumerate(sampled):
            request.tokens.append(token)
            request.computed = len(request.tokens) - 1
            ended = token in self.config.eos_token_ids or len(request.tokens) >= request.max_len
            request.state = "done" if ended else "decode"
            if ended or request.drafts[number : number + 1] != [token]:  # another draft, or none
                break
        request.drafts = []

    def draft(self, batch: Batch, states: Tensor, sampled: dict[int, list[int]]) -> None:
        """The MTP module runs over the rows of the step, with the tokens after them, which fills its caches. Of 10
        known tokens row 8, which sees token 9, gives draft 1. Then the module runs over its own state and draft: on the
        rank with row 8, row 9 sees draft 1 and gives draft 2. Rows from 9 on are void; the next step redoes them.
        A draft is drawn with the random numbers of its position, as its token will be: so draws often agree too."""
        chosen = list[Tensor]()
        for number in range(self.scheduler.num_drafts if sampled else 1):  # none: chunks of unfinished prompts
            states = self.model.mtp(self.ids(batch, after=1), states, batch, chosen)
            last = {one: len(one.tokens) + number - 2 for one in batch.requests if one.number in sampled}
            rows = [row for row, (request, p) in enumerate(batch.rows(self.world.rank)) if last.get(request) == p]
            going = [[(one, [last[one] + 1]) for one, some in own if last.get(one) in some] for own in batch.of_ranks]
            batch, states = Batch(going, prefill=False), states[rows]
            chosen = [chosen[row] for row in rows] if self.config.index_share_for_mtp_iteration and chosen else []
            own = zip(batch.rows(self.world.rank), self.model.logits(states, mtp=True))
            guesses = self.world.union({one.number: sample(logits, one, p + 1) for (one, p), logits in own})
            for request in batch.requests:
                request.drafts.append(guesses[request.number])

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int = 16, temperature: float = 0.0, seed: int = 0,
        drafts: int = 0, top_k: int = 0, top_p: float = 1.0,
    ) -> list[list[int]]:  # fmt: skip
        """Token ids after each prompt, up to an end token or ``max_tokens``; the same on every rank.

        ``seed``: of every prompt's random numbers. ``drafts``: tokens of a request that the MTP module guesses in a
        step; they change no output. Raises ``ValueError`` for a prompt that is empty or does not fit."""
        if drafts and len(self.model.w.layers) == self.config.num_hidden_layers:
            raise ValueError("drafts need an MTP module, a layer after the last one; this checkpoint has none")
        if not all(prompts) or max_tokens < 1:
            raise ValueError("every prompt needs a token, and max_tokens is at least 1")
        self.scheduler.num_drafts = drafts
        how = temperature, seed, top_k, top_p
        requests = [Request(next(self.arrivals), [*p], len(p) + max_tokens, *how) for p in prompts]
        self.scheduler.check(max((one.max_len for one in requests), default=0))
        self.scheduler.requests += requests
        try:
            while self.step():
                pass
        finally:  # after an error nothing is left
            for request in self.scheduler.requests:
                self.scheduler.release(request)
            self.scheduler.requests.clear()
        return [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts)]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """Logits after every token of a prompt, ``[T, vocab]``, in float32 (float64 if the model is); on every rank."""
        scheduler, world, request = self.scheduler, self.world, Request(-1, [*ids], len(ids))
        step = scheduler.chunk * world.size
        scheduler.check(len(ids))
        request.tables = [[pages.take() for _ in range(scheduler.pages_for(len(ids)))] for pages in scheduler.pages]
        out = wide(torch.empty(len(ids), self.config.vocab_size, dtype=self.model.head.dtype))
        try:
            for start in range(0, len(ids), step):
                batch = scheduler.prefill([(request, start, min(len(ids), start + step))])
                states = self.model.forward(self.ids(batch), batch)
                parts = world.all_gather(self.model.logits(states), batch.padded).cpu()
                for rank in range(world.size):
                    positions = [p for _, p in batch.rows(rank)]
                    out[positions] = parts[rank * batch.padded :][: len(positions)]
        finally:
            scheduler.release(request)
        return out


def load(folder: str | Path, dtype: torch.dtype | None = None, **sizes: int) -> Engine:
    """An engine for a checkpoint folder, or for the model "demo". ``dtype`` is that of weights and activations;
    ``sizes``: ``pages`` and ``page_size`` (tokens) of a rank's caches; ``chunk``, see :class:`Scheduler`."""
    path = Path(__file__).parents[1] / "demo_model" if folder == "demo" else Path(folder)
    return Engine(path, dtype or (torch.bfloat16 if torch.cuda.is_available() else torch.float32), **sizes)


def main() -> None:
    """Continues a text. Turning text into ids is no part of an engine: a library does it."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="continues a text")
    parser.add_argument("model", help="a checkpoint folder with tokenizer.json, or 'demo'")
    parser.add_argument("text")
    for name, default in (("--max-tokens", 32), ("--drafts", 0)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    engine = load(given.model)
    tokenizer = Tokenizer.from_file(str(engine.folder / "tokenizer.json"))
    (output,) = engine.generate([ids := tokenizer.encode(given.text).ids], given.max_tokens, drafts=given.drafts)
    if engine.world.rank == 0:
        print(tokenizer.decode(ids + output))


if __name__ == "__main__":
    main()
