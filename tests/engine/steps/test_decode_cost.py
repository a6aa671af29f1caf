"""The index keys that a step with drafts reads. Its other work: ``measure/test_costs.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.indexer import indexer_scores
from dsa_engine.measure.requests import add_filled


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
        (request,) = add_filled(llm.engine, 1, 3000, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
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
