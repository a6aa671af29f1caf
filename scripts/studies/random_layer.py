"""One attention layer of :mod:`dsa_engine.reference.dsa` with random weights, on which the studies of MLA and of
context parallelism stand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsa_engine.reference import dsa


class Size(NamedTuple):
    """The sizes of one layer and of its indexer; a head's query has the parts ``nope`` and ``rope``."""

    heads: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    index_heads: int = 64
    index_dim: int = 128
    topk: int = 2048
    q_rank: int = 1536
    hidden: int = 7168

    def config(self) -> dsa.Config:
        """What the reference's attention reads of a configuration: plain RoPE, no experts."""
        given: dict[str, Any] = {"vocab_size": 0, "num_hidden_layers": 1, "routed_scaling_factor": 1.0, "rope": {}}
        given |= {"n_routed_experts": 0, "num_experts_per_tok": 0, "n_group": 1, "topk_group": 1}
        given |= {"q_lora_rank": self.q_rank, "kv_lora_rank": self.kv_rank, "num_attention_heads": self.heads}
        return dsa.Config(**given, qk_nope_head_dim=self.nope, qk_rope_head_dim=self.rope)

    def weights(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dsa.Weights:
        """Normally distributed, scaled so that results stay near 1; the same on all ranks; on "meta" only shapes."""
        torch.manual_seed(seed)
        shapes = {
            "q_b_proj": (self.heads * (self.nope + self.rope), self.q_rank),
            "kv_b_proj": (self.heads * (self.nope + self.value), self.kv_rank),
            "o_proj": (self.hidden, self.heads * self.value),
        }
        made = {name: torch.randn(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        return dsa.Weights({name: values * values.shape[1] ** -0.5 for name, values in made.items()})


SIZES = {
    "v2": Size(128, 512, 128, 64, 128, hidden=5120),  # without an indexer
    "v3.2": Size(128, 512, 128, 64, 128),
    "small": Size(16, 128, 32, 16, 32, index_heads=16, index_dim=32, topk=256),
}
