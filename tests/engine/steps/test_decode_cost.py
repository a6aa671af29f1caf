"""The cost of a decoded token grows with its context by the index keys that are scored, and by nothing else.

Counted, not timed: the floating-point operations of a decode step and the bytes that it makes, stage by stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.indexer import indexer_scores
from dsa_engine.kernels.runtime import launch
from dsa_engine.measure.requests import add_filled
from dsa_engine.measure.stage_timer import StageTimer
from stages import current_stage

CONTEXTS = (2048, 4096, 8192, 32768)


class Work(TorchDispatchMode):
    """Sums by stage the operations of matrix products, and the bytes of new tensors without views."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # linear, for instance, calls an operation for its product
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result, name = function(*args, **kwargs), current_stage()
        if function._overloadpacket in flop_registry:
            self.flops[name] += flop_registry[function._overloadpacket](*args, **kwargs, out_val=result)
        there = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in there:
                self.made[name] += x.nbytes
        return result


@pytest.fixture(autouse=True)
def references() -> Iterator[None]:
    """The engines here use references, as only PyTorch's operations are counted, not the C++ kernels."""
    yield
    launch.use_references(always=False)


def decode_step(llm: LLM, context: int) -> Work:
    """The work of one token that sees ``context`` others."""
    request = add_filled(llm.engine, context, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    llm.engine.step()  # what is made once
    with StageTimer(llm.engine.mesh.device), Work() as work:
        llm.engine.step()
    llm.engine.finish(request, "abort")
    return work


def test_only_the_index_keys_grow(demo_cache: Path) -> None:
    llm = LLM("demo-random", device="cpu", kernels="reference", cache_memory="80MiB", max_num_seqs=1, progress=False)
    config = llm.engine.config
    works = {context: decode_step(llm, context) for context in CONTEXTS}
    first = works[CONTEXTS[0]]
    assert all(first.flops[stage] > 0 for stage in ("MLA prolog", "sparse flash attention", "MoE experts", "LM head"))
    # A product of 2 · dim operations a head, and 2 more for its weight.
    a_key = config.num_hidden_layers * config.index_n_heads * 2 * (config.index_head_dim + 1)
    grown = {}
    for context, work in works.items():
        more = context - CONTEXTS[0]
        changed = {stage: n - first.flops[stage] for stage, n in work.flops.items() if n != first.flops[stage]}
        assert changed == ({"lightning indexer": more * a_key} if more else {})
        stages = [stage for stage in work.made if work.made[stage] != first.made[stage]]
        assert set(stages) <= {"lightning indexer", "other"}, "all but the scores is of the same size"
        # The block table is made in every step: 4 bytes a page, copied a few times.
        assert work.made["other"] - first.made["other"] <= 32 * more / llm.engine.cache.page_size
        grown[context] = work.made["lightning indexer"] - first.made["lightning indexer"]
    one = grown[4096] / 2048
    assert all(bytes_ == one * (context - CONTEXTS[0]) for context, bytes_ in grown.items()), "in proportion"
    # Keys, one product a head and the score are written once; the selection makes about as much as the scores.
    keys = 4 * config.num_hidden_layers * (config.index_head_dim + config.index_n_heads + 1)
    assert keys <= one <= 1.5 * keys


@pytest.mark.parametrize("drafts, modules", [(1, 1), (3, 1), (7, 1), (3, 3)])
def test_index_keys_are_read_once_for_all_drafts(
    drafts: int, modules: int, demo_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with drafts reads the keys that a step without reads, and those of the drafts: once in each layer of the
    model, and once in each pass of a module."""
    llm = LLM(
        "demo-random",
        device="cpu",
        kernels="reference",
        cache_memory="40MiB",
        max_num_seqs=1,
        progress=False,
        load_format="dummy",
        hf_overrides={"num_nextn_predict_layers": modules},
        speculative_config={"num_speculative_tokens": drafts},
    )
    read: list[int] = []
    original = indexer_scores.read_index_keys

    def counted(pool: torch.Tensor, table: torch.Tensor, start: int, stop: int, *more: Any) -> torch.Tensor:
        read.append(stop - start)
        return original(pool, table, start, stop, *more)

    monkeypatch.setattr(indexer_scores, "read_index_keys", counted)
    layers, rows = llm.engine.config.num_hidden_layers, {}
    for count in (0, drafts):
        llm.engine.set_num_drafts(count)
        request = add_filled(llm.engine, 3000, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        llm.engine.step()
        visible = len(request) + count
        assert len(request.drafts) == count
        read.clear()
        llm.engine.step()
        rows[count] = sum(read) - layers * visible
        # The pass over the step's rows, then one row each, which may see as many tokens as if all drafts were accepted,
        # and all new drafts; or a pass of each module.
        chain = (count - 1) * (visible + (count - 1 if modules == 1 else 0))
        assert rows[count] == (visible + chain if count else 0)
        llm.engine.finish(request, "abort")
