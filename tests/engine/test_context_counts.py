"""What it takes that ranks hold contexts together (``dcp_size``), on the fake device at production sizes: launches,
collectives and bytes of a prefill and of a decode step of DeepSeek-V3.2 with FP8 caches, and pages on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import record
from dsa_engine.commands.planner.predict import CONTEXT_LAUNCHES
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.startup import start
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LAYERS = 3
CHUNK, PROMPT, ROWS = 65_536, 131_072, 8  # tokens of all ranks in a step; tokens of the prompt; requests of a rank


def counted(device: FakeDevice, engine: Engine, log: list[Any], run: Callable[[], Any]) -> dict[str, Any]:
    """Launches, and collectives and MB that this rank sends in those of its cp and dcp groups."""
    log.clear()
    with device.watched():
        run()
    launches = device.captures[0].launches if device.captures else device.launches
    kinds = Counter(f"{one.kind} of {len(one.ranks)}" for one in log)
    sent = sum(sum(one.sent) for one in log)
    halves = 2 if device.captures else 1  # a step is run before it is captured
    result = {"launches": len(launches), "MB a layer": round(sent / halves / LAYERS / 1e6, 1)}
    return result | {name: count // halves for name, count in kinds.items()}


# Launches of the prompt's two chunks and of a decode step, all layers and sampling included, with no hit. MB are of a
# layer: of a chunk's rows, and pages of the chunk before; in decode of queries, candidates and outputs.
CASES: dict[tuple[int, int], list[dict[str, Any]]] = {
    (8, 1): [
        {"launches": 148, "MB a layer": 45.9, "all_gather of 8": 3},
        {"launches": 152, "MB a layer": 45.9, "all_gather of 8": 3},
        {"launches": 96, "MB a layer": 0.0},
    ],
    (8, 8): [
        {"launches": 150, "MB a layer": 45.9, "all_gather of 8": 3},
        {"launches": 168, "MB a layer": 91.1, "all_gather of 8": 9},
        {"launches": 161, "MB a layer": 17.1, "all_gather of 8": 13, "all_to_all of 8": 6},
    ],
    (64, 1): [
        {"launches": 137, "MB a layer": 51.6, "all_gather of 64": 3},
        {"launches": 120, "MB a layer": 51.6, "all_gather of 64": 3},
        {"launches": 96, "MB a layer": 0.0},
    ],
    (64, 8): [
        {"launches": 139, "MB a layer": 51.6, "all_gather of 64": 3},
        {"launches": 136, "MB a layer": 96.8, "all_gather of 64": 3, "all_gather of 8": 6},
        {"launches": 161, "MB a layer": 17.1, "all_gather of 8": 13, "all_to_all of 8": 6},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "dcp"), [(8, 1), (8, 8), (64, 1), (64, 8)])
def test_a_layer(world: int, dcp: int, fake_engine: Callable[..., Engine]) -> None:
    with FakeDevice() as device:
        options = {"max_num_batched_tokens": CHUNK // world, "max_num_seqs": ROWS * world, "kv_cache_dtype": "fp8"}
        engine = fake_engine(
            device, "deepseek_v32", world, {"dcp_size": dcp, "decode_dispatch": "all_gather"}, **options
        )
        log, results = record(engine.mesh.cp, engine.mesh.dcp), []
        request = engine.add([5] * PROMPT, GREEDY)
        while not request.prefilled:
            step = engine.scheduler.schedule()
            plan = engine.runner.plan(step)
            results.append(counted(device, engine, log, lambda plan=plan: engine.runner.launch(plan)))
            engine.scheduler.launched(step)
        assert max(Counter(page % dcp for page in request.pages).values()) == PROMPT // 64 // dcp
        engine.finish(request, "abort")
        add_filled(engine, ROWS * world, 100_000, GREEDY)
        results.append(counted(device, engine, log, engine.step))
        assert engine.runner.graphs is not None
        widths = {inputs.tables.shape[1] for inputs in engine.runner.graphs._inputs.values()}
        assert widths == {PROMPT // 64 // dcp}, "the next power of two of 100,000 tokens"
        for _ in range(2):  # launched before the previous step is read
            with device.watched():
                engine.step()
            assert device.waits == ["event in samples.py:read"] and device.count("graph") == 1
    print(*results, sep="\n")
    assert results == CASES[world, dcp]


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "more"), [("FFF", 6), ("FSS", 4)])
def test_hot_rows_of_a_layer(
    pattern: str, more: int, fake_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches of a layer that selects, one of a layer that shares the selection, all in the graph."""
    counts, shared = [], {"num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "index_topk_pattern": pattern}
    for hot in ((0, 0, 0), (100, 8, 4096)):
        monkeypatch.setattr(start, "KVCache", lambda *given, hot=hot: KVCache(*given[:6], *hot))
        with FakeDevice() as device:
            engine = fake_engine(device, "glm_moe_dsa", 1, kv_cache_dtype="fp8", hf_overrides=shared, max_num_seqs=8)
            add_filled(engine, 8, 10_000, GREEDY)
            counts.append(counted(device, engine, [], engine.step)["launches"])
            with device.watched():
                engine.step()
            assert device.count("graph") == 1
    assert counts[1] - counts[0] == more


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "fewer"), [(1, 0), (8, 2)])
def test_launches_of_the_plan(requests: int, fewer: int, fake_engine: Callable[..., Engine]) -> None:
    """Kernels of a decode step, without collectives, that ``dcp_size`` adds to each layer, and outside of them."""
    more = Counter[int]()
    for dcp in (1, 8):
        for layers in (3, 4):
            with FakeDevice() as device:
                sizes = {"num_hidden_layers": layers, "first_k_dense_replace": 1}
                parallel = {"dcp_size": dcp, "decode_dispatch": "all_gather"}
                engine = fake_engine(device, "deepseek_v32", 8, parallel, kv_cache_dtype="fp8", hf_overrides=sizes)
                add_filled(engine, 8 * requests, 10_000, GREEDY)
                with device.watched():
                    engine.step()
            names = Counter(one.name for one in device.captures[0].launches)
            kernels = names.total() - names["all_gather"] - names["all_to_all"] - names["reduce_scatter"]
            more[layers] += kernels if dcp > 1 else -kernels
    in_layer = more[4] - more[3]
    assert (in_layer, more[3] - 3 * in_layer) == (CONTEXT_LAUNCHES[0] - fewer, CONTEXT_LAUNCHES[1])


@pytest.mark.slow
def test_pages_of_a_million_tokens(fake_engine: Callable[..., Engine]) -> None:
    """Each rank holds an eighth of them, and at most a page more."""
    longer = {"num_hidden_layers": LAYERS, "first_k_dense_replace": 1, "max_position_embeddings": 1_048_576}
    with FakeDevice() as device:
        engine = fake_engine(device, "glm_moe_dsa", 8, {"dcp_size": 8}, kv_cache_dtype="fp8", hf_overrides=longer)
        (request,) = add_filled(engine, 1, 1_048_000, GREEDY)
        of_ranks = Counter(page % 8 for page in request.pages)
        assert sum(of_ranks.values()) == 16_375 and max(of_ranks.values()) == 2047
        assert engine.cache.page_bytes * 2047 < 1.001 / 8 * engine.cache.page_bytes * 16_375
