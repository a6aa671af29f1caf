"""Two small steps through one layer of each kind, in which kernels are compared with their references."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsa_engine.engine.batch import build_batch
from dsa_engine.engine.pages import pages_for
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.step_plan import StepPlan
from dsa_engine.kernels.cache_format import CacheFormat
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh
from dsa_engine.sampling_params import SamplingParams

_PAGE_SIZE = 64


def layers_of_each_kind(config: ModelConfig) -> list[int]:
    """The first layer of every kind: dense or with experts, with an indexer of its own or the selection of another."""
    first: dict[tuple[str, str], int] = {}
    for layer, kind in enumerate(zip(config.mlp_layer_types, config.indexer_types, strict=True)):
        first.setdefault(kind, layer)
    return sorted({0, *first.values()})  # the first layer selects for those that do not


@torch.inference_mode()
def try_steps(model: Model, config: ModelConfig, mesh: Mesh, stored: CacheFormat, tokens: int) -> Iterator[str]:
    """Runs a prefill of ``tokens`` tokens by each context-parallel group, then a decode step of one of its tokens on
    every rank, through one layer of each kind; all ranks together. Yields what it has run."""
    layers = layers_of_each_kind(config)
    pages = pages_for(tokens + 1, _PAGE_SIZE)
    with torch.random.fork_rng(devices=[]):
        ids = torch.randint(config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = KVCache(config, stored, pages, _PAGE_SIZE, mesh.device)

    def run(chunks: list[Chunk]) -> None:
        plan = StepPlan.of(chunks, mesh.world_size, config, mesh.config.cp_layout)
        batch = build_batch(plan, config, mesh, cache.block_tables, None)
        model.logits(model(batch, cache, layers)[-1:])

    def request(number: int) -> Request:
        return Request(number, ids, SamplingParams(), pages=list(range(pages)))

    groups = range(mesh.world_size // mesh.cp_size)
    run([Chunk(request(group), 0, tokens, mesh.cp_ranks(group)) for group in groups])
    yield "prefill"
    run([Chunk(request(rank), tokens, 1, range(rank, rank + 1)) for rank in range(mesh.world_size)])
    yield "decode"
