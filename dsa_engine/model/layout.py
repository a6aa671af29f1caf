"""The released layout: every tensor of a checkpoint, by name, shape and dtype, derived from the configuration.

DeepSeek-V3/R1, V3.2 and GLM-5 share it; what differs is which layers have an indexer. From it follow the sizes that a
user asks about before loading anything: parameters, bytes, cache per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsa_engine.checkpoint.tensor_spec import TensorSpec
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import RELEASED_BLOCK_SIZE
from dsa_engine.kernels.formats.quantize import FP8


@dataclass(frozen=True)
class ParameterCounts:
    """Sizes of a model. Parameters are counted without the FP8 scales, bytes with them and without the MTP module."""

    total: int  # without the MTP module
    active: int  # that one token passes through: everything but the experts it is not routed to
    mtp: int  # the MTP module, with its copies of the embedding and the head
    bytes_fp8: int
    bytes_bfloat16: int
    bytes_float32: int


def released_tensors(config: ModelConfig, fp8: bool) -> Iterator[TensorSpec]:
    """Every tensor of a released checkpoint of this model, layer by layer, the MTP module last.

    Args:
        config: the model; matrices have its dtype unless they are FP8.
        fp8: the projections of the decoder layers are float8_e4m3fn, each followed by its float32 block scales
            (``weight_block_size``, or 128×128 where the configuration names none). The router, the indexer's
            ``weights_proj``, ``eh_proj``, embeddings, the head and norms never are.
    """
    block = config.weight_block_size or RELEASED_BLOCK_SIZE
    for spec in _unquantized_tensors(config):
        if not (fp8 and spec.quantized):
            yield TensorSpec(spec.name, spec.shape, spec.dtype)
            continue
        scale_shape = tuple(-(-size // b) for size, b in zip(spec.shape, block, strict=True))
        yield TensorSpec(spec.name, spec.shape, FP8, quantized=True)
        yield TensorSpec(spec.name + "_scale_inv", scale_shape, torch.float32)


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counts the parameters and the bytes of a model; nothing is allocated."""
    mtp_layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    mtp_prefixes = tuple(f"model.layers.{i}." for i in mtp_layers)
    everything = list(released_tensors(config, fp8=False))
    main = [spec for spec in everything if not spec.name.startswith(mtp_prefixes)]
    main_fp8 = [spec for spec in released_tensors(config, fp8=True) if not spec.name.startswith(mtp_prefixes)]
    total = sum(spec.numel for spec in main)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = (config.n_routed_experts - config.num_experts_per_tok) * expert * config.mlp_layer_types.count("sparse")
    return ParameterCounts(
        total=total,
        active=total - idle,
        mtp=sum(spec.numel for spec in everything) - total,
        bytes_fp8=sum(spec.nbytes for spec in main_fp8),
        bytes_bfloat16=sum(spec.numel * (4 if spec.dtype == torch.float32 else 2) for spec in main),
        bytes_float32=4 * total,
    )


def _layers(config: ModelConfig) -> list[tuple[int, str, str]]:
    """Index, kind of feed-forward and kind of indexer of every layer, the MTP modules last."""
    layers = list(zip(range(config.num_hidden_layers), config.mlp_layer_types, config.indexer_types, strict=True))
    mtp = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return layers + [(i, "sparse", "full" if config.has_indexer else "none") for i in mtp]


def _unquantized_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors before quantisation; ``quantized`` says which become FP8."""
    vocabulary = (config.vocab_size, config.hidden_size)
    yield TensorSpec("model.embed_tokens.weight", vocabulary, config.dtype)
    for i, mlp_type, indexer_type in _layers(config):
        prefix = f"model.layers.{i}."
        if i >= config.num_hidden_layers:
            yield TensorSpec(prefix + "embed_tokens.weight", vocabulary, config.dtype)
            yield TensorSpec(prefix + "enorm.weight", (config.hidden_size,), config.dtype)
            yield TensorSpec(prefix + "hnorm.weight", (config.hidden_size,), config.dtype)
            yield TensorSpec(prefix + "eh_proj.weight", (config.hidden_size, 2 * config.hidden_size), config.dtype)
        yield TensorSpec(prefix + "input_layernorm.weight", (config.hidden_size,), config.dtype)
        yield from _attention(config, prefix + "self_attn.")
        if indexer_type == "full":
            yield from _indexer(config, prefix + "self_attn.indexer.")
        yield TensorSpec(prefix + "post_attention_layernorm.weight", (config.hidden_size,), config.dtype)
        if mlp_type == "dense":
            yield from _mlp(config, prefix + "mlp.", config.intermediate_size)
        else:
            yield from _moe(config, prefix + "mlp.")
        if i >= config.num_hidden_layers:
            yield TensorSpec(prefix + "shared_head.norm.weight", (config.hidden_size,), config.dtype)
            yield TensorSpec(prefix + "shared_head.head.weight", vocabulary, config.dtype)
    yield TensorSpec("model.norm.weight", (config.hidden_size,), config.dtype)
    if not config.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", vocabulary, config.dtype)


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    heads, hidden, dtype = config.num_attention_heads, config.hidden_size, config.dtype
    yield TensorSpec(prefix + "q_a_proj.weight", (config.q_lora_rank, hidden), dtype, True)
    yield TensorSpec(prefix + "q_a_layernorm.weight", (config.q_lora_rank,), dtype)
    yield TensorSpec(prefix + "q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank), dtype, True)
    yield TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (config.latent_dim, hidden), dtype, True)
    yield TensorSpec(prefix + "kv_a_layernorm.weight", (config.kv_lora_rank,), dtype)
    kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield TensorSpec(prefix + "kv_b_proj.weight", (kv_b_rows, config.kv_lora_rank), dtype, True)
    yield TensorSpec(prefix + "o_proj.weight", (hidden, heads * config.v_head_dim), dtype, True)


def _indexer(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    heads, width, hidden, dtype = config.index_n_heads, config.index_head_dim, config.hidden_size, config.dtype
    yield TensorSpec(prefix + "wq_b.weight", (heads * width, config.q_lora_rank), dtype, True)
    yield TensorSpec(prefix + "wk.weight", (width, hidden), dtype, True)
    yield TensorSpec(prefix + "k_norm.weight", (width,), torch.float32)
    yield TensorSpec(prefix + "k_norm.bias", (width,), torch.float32)
    yield TensorSpec(prefix + "weights_proj.weight", (heads, hidden), dtype)


def _mlp(config: ModelConfig, prefix: str, intermediate: int) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (intermediate, config.hidden_size), config.dtype, True)
    yield TensorSpec(prefix + "up_proj.weight", (intermediate, config.hidden_size), config.dtype, True)
    yield TensorSpec(prefix + "down_proj.weight", (config.hidden_size, intermediate), config.dtype, True)


def _moe(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate.weight", (config.n_routed_experts, config.hidden_size), config.dtype)
    yield TensorSpec(prefix + "gate.e_score_correction_bias", (config.n_routed_experts,), torch.float32)
    for expert in range(config.n_routed_experts):
        yield from _mlp(config, f"{prefix}experts.{expert}.", config.moe_intermediate_size)
    yield from _mlp(config, prefix + "shared_experts.", config.moe_intermediate_size * config.n_shared_experts)
