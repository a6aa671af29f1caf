"""Whether a page's return from host memory is cheaper than computing its tokens again."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.startup.dummy_steps import prefill_steps
from dsa_engine.model.cache.page_moves import PageCopy, PageMoves
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh

_TOKENS = 512  # for each rank, in each of the two measurements
_NANO = 1e-9


def seconds_per_token(
    mesh: Mesh, runner: ModelRunner, cache: KVCache, options: EngineOptions, max_model_len: int
) -> tuple[float, float]:
    """Measures both on the slowest rank, at the start of a context, where computing is cheapest.

    The caches hold nothing yet: what the steps and copies leave in them is never read. Every rank calls it.

    Returns:
        seconds for a token to come back from host memory, and to be computed by a context-parallel group.
    """
    transfer = cache.transfer
    assert transfer is not None and transfer.host is not None
    tokens = min(_TOKENS, options.max_num_batched_tokens, max_model_len // mesh.cp_size) * mesh.cp_size
    (chunks, *_) = prefill_steps(mesh, options.page_size, tokens, max_model_len, options.max_num_seqs)

    def step() -> None:
        runner.launch(runner.plan(chunks)).read()

    pages = min(pages_for(tokens, options.page_size), cache.pages, transfer.host.slots)
    moves = PageMoves([PageCopy(False, number, number) for number in range(pages)])

    def copy() -> None:
        transfer.begin(moves)()
        transfer.finish()

    try:
        restored, computed = _seconds(mesh, copy), _seconds(mesh, step)
    finally:
        for chunk in chunks:
            chunk.request.finish_reason = "abort"  # frees their rows of tables
    return restored / (pages * options.page_size), computed / tokens


def _seconds(mesh: Mesh, work: Callable[[], None]) -> float:
    """The second run's time on the slowest rank."""
    work()
    _synchronize(mesh.device)
    begun = time.perf_counter()
    work()
    _synchronize(mesh.device)
    return max(mesh.all_gather_int(round((time.perf_counter() - begun) / _NANO))) * _NANO


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
