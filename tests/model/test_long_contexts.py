"""Positions beyond those of other tests: GLM-5.2 has 1,048,576."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.reference import dsa
from oracles import make_ids

LAST = 1_048_575


def test_angles_of_the_last_position() -> None:
    """Frequencies and angles are float32, as in ``transformers``: at the end of GLM-5.2's context cos and sin of the
    second pair are 0.05 off."""
    rope = ModelConfig.from_dict(released_config("glm_5_2")).rope
    positions = torch.arange(LAST - 99, LAST + 1)
    cos, sin = rope.cos_sin(positions)
    angles = positions.double()[:, None] * 8e6 ** -(torch.arange(0, 64, 2).double() / 64)
    error = torch.maximum((cos - angles.cos()).abs(), (sin - angles.sin()).abs()).amax(dim=0)
    print("largest errors of pairs 0, 1, 2, 4, 8, 16:", error[[0, 1, 2, 4, 8, 16]].tolist())
    assert error[0] < 1e-6, "the first pair turns by a radian: its angles are exact"
    assert bool((error < 2.0**-22 * angles.amax(dim=0) + 1e-6).all())


@pytest.mark.slow
def test_400_000_tokens(oracle: Callable[..., Any], assert_same_logits: Callable[..., None]) -> None:
    """A layer with GLM-5.2's angles against ``reference/dsa.py``: rows of the prefill, and decode after it."""
    keys: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "index_n_heads": 4, "index_head_dim": 16}
    keys |= {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}, "max_position_embeddings": LAST + 1}
    folder, ids = oracle("glm_moe_dsa", **keys).folder, make_ids(400_000)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 400_064, "cache_memory": "1GiB"}
    llm = LLM(folder, **options, max_num_seqs=1, progress=False)
    begun = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1, selection=3, ignore_eos=True)
    (output,) = llm.generate([ids], params)
    taken = time.perf_counter() - begun
    print(f"prefill and decode: {taken:.0f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
    tokens = [*ids, *output.token_ids]
    rows = torch.tensor([399_999, 400_000, 400_001])
    theirs, selected = reference_rows(folder, tokens[:-1], rows)
    ours = torch.tensor([[one[i].logprob for i in range(200)] for one in output.logprobs])
    assert_same_logits(ours, theirs.log_softmax(dim=-1).float(), what="at 400,000")
    assert output.selection is not None
    assert output.selection.positions[0].tolist() == selected.sort(dim=1).values.tolist()


def reference_rows(folder: Any, tokens: list[int], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of these rows of a model of one layer, in float64, and the positions that they select."""
    model = dsa.load(folder, torch.float64, pages=1).model
    c, w = model.c, model.w.layers[0]
    embedded, positions = model.w.embed_tokens[torch.tensor(tokens)], torch.arange(len(tokens))
    x, turns = dsa.rms_norm(embedded, w.input_layernorm, c.rms_norm_eps), model.turns(positions)
    latent, keys = dsa.latent_rows(w.self_attn, c, x, turns), dsa.index_keys(w.self_attn.indexer, c, x, turns)
    own = turns[0][rows], turns[1][rows]
    q, compressed = dsa.queries(w.self_attn, c, x[rows], own)
    index_q, head_weights = dsa.index_queries(w.self_attn.indexer, c, x[rows], compressed, own)
    chosen = dsa.select(index_q, head_weights, keys, rows, c.index_topk)
    attended, _ = dsa.attend(q, latent, rows, chosen, c.kv_lora_rank, c.softmax_scale)
    states = embedded[rows] + dsa.output(w.self_attn, c, attended)
    states = states + dsa.ffn(w.mlp, dsa.rms_norm(states, w.post_attention_layernorm, c.rms_norm_eps))
    return model.logits(dsa.rms_norm(states, model.w.norm, c.rms_norm_eps)), chosen
