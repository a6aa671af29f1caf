"""What a layer with experts and a handover of DeepSeek-V3.2 take on a fake device, at its sizes, with FP8 weights and
caches. The table of docs/KERNELS.md: ``pytest -m "slow or not slow" -s tests/engine/test_counted_layers.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.cache.link import PageReceiver, PageSender, RankPages, dealt
from dsa_engine.kernels.formats.cache_format import FP8
from dsa_engine.kernels.runtime import libraries
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from dsa_engine.model.kv_cache import KVCache, cache_format
from dsa_engine.model.model import DecoderLayer
from dsa_engine.parallel.disaggregation import PageGroups
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice
from fake_cuda.world import FakeGroup
from library_stubs import install

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SLOW = pytest.mark.slow
USED = {
    "FlashMLA": {f"sparse_attention, {rows} rows": "FlashMLA's sparse decode" for rows in ("few", "many")},
    "DeepGEMM": {"block_scaled_linear, many rows": "DeepGEMM's FP8 products",
                 "expert_mlp, many rows": "DeepGEMM's grouped experts",
                 "expert_mlp, few rows": "DeepGEMM's masked experts",
                 "indexer_scores, many rows": "DeepGEMM's index logits",
                 "indexer_scores, few rows": "DeepGEMM's paged index logits"},
    "FlashAttention": {"dense_attention, many rows": "FlashAttention-3"},
}  # fmt: skip


class Counted(NamedTuple):
    """What a layer takes."""

    launches: int  # ours, PyTorch's and NCCL's
    calls: int  # to the library
    collectives: int
    waits: int  # the host's, for the device
    streams: int  # with a launch
    mib: float  # maximum that lives beside what lived before


@contextmanager
def counting(device: FakeDevice, calls: list[Any]) -> Iterator[list[Counted]]:
    """Counts every layer with experts."""
    seen, forward = list[Counted](), DecoderLayer.forward

    def counted(layer: DecoderLayer, *args: Any) -> Any:
        before = len(device.launches), len(device.waits), len(calls), device.live
        device.peak = device.live
        result = yield from forward(layer, *args)
        launches = [launch for launch in device.launches[before[0] :] if launch.kind != "library"]
        if layer.moe is not None:
            collectives = sum(launch.kind == "collective" for launch in launches)
            streams = len({launch.stream for launch in launches})
            added = (device.peak - before[3]) / 2**20
            waits = len(device.waits) - before[1]
            seen.append(Counted(len(launches), len(calls) - before[2], collectives, waits, streams, added))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayer, "forward", counted)
        yield seen


@pytest.mark.parametrize(
    ("world", "library"),
    [
        (8, None),
        (8, "DeepEP"),
        *(pytest.param(n, name, marks=SLOW) for n in (1, 8, 64) for name in (None, *USED) if (n, name) != (8, None)),
    ],
)
def test_a_layer(
    fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, world: int, library: str | None
) -> None:
    """128K tokens or 8,192 a rank; then two rows a rank in a graph, or one if the ranks are 64."""
    calls = install(monkeypatch, "flash_mla", "deep_gemm", "flash_attn_interface", "deep_ep")
    dispatches = ("moe_dispatch", "decode_dispatch")
    parallel = dict.fromkeys(dispatches, "deep_ep") | {"node_size": 8} if library == "DeepEP" else {}
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", world, parallel, kv_cache_dtype="fp8")
        libraries.use(USED.get(library or "", {}))
        try:
            request = engine.add([5] * min(8192 * world, 131_072), GREEDY)
            with device.watched(), counting(device, calls) as prefill:
                step = engine.scheduler.schedule()
                engine.runner.launch(engine.runner.plan(step))
            engine.scheduler.launched(step)
            engine.finish(request, "abort")
            for _ in range(min(2 * world, 64)):
                add_filled(engine, 100_000, GREEDY)
            with counting(device, calls) as decode:
                engine.step()  # warms up and captures
        finally:
            libraries.use({})
    for what, counted in (("prefill", prefill[-1]), ("decode", decode[-1])):
        one = counted._replace(mib=round(counted.mib, 1))
        print(f"| {world} | {library or 'none'} | {what} |", *(f"{value} |" for value in one))
    assert prefill[0][:5] == prefill[1][:5], "both layers"
    assert decode[0][:5] == decode[-1][:5], "the graph as the warm-up"
    assert prefill[-1].waits == (world > 1) and decode[-1].waits == 0, "for the counts of tokens"
    assert (prefill[-1].calls + decode[-1].calls > 0) == (library is not None)
    assert (prefill[-1].collectives > 0) == (world > 1), "cache rows"
    assert (decode[-1].collectives > 0) == (world > 1 and not parallel), "tokens"


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("sends", [True, False])
def test_a_handover(threads_by_hand: None, ranks: int, sends: bool) -> None:
    """128K tokens from so many ranks to one: a message is a layer's pages of a rank that prefills, up to 24 MiB."""
    config = ModelConfig.from_dict(released_config("deepseek_v32"))
    with FakeDevice() as device:
        cache = KVCache(config, cache_format(config, FP8), 2048, 64, torch.device("cuda:0"))
        groups = PageGroups(*(FakeGroup(tuple(range(ranks + 1)), 0, None, device=device) for _ in range(2)))
        before, layers = device.live, len(cache.latent)
        end: Any = PageSender(cache, groups, layers) if sends else PageReceiver(cache, groups)
        added = (device.live - before) / 2**20
        with device.watched():
            if sends:
                end.begin([RankPages(0, 1, dealt(range(2048), 0, ranks))])
                for layer in range(layers):
                    end.arrive(layer)
                end.finish()
            else:
                end.post([RankPages(0, rank, dealt(range(2048), rank - 1, ranks)) for rank in range(1, ranks + 1)])
            between = len(device.launches)
            end.close()
        messages = device.count("collective", "exchange")
        counted = len(device.launches) / messages, messages, len(device.waits), len(device.streams_used - {0})
    print(
        f"| {ranks} | {'sends' if sends else 'receives'} | {between} |",
        *(f"{n:g} |" for n in counted),
        f"{added:.1f} |",
    )
    assert between == 0 and counted[3] == 1, "by the links' threads, on one stream"
    assert device.peak == device.live, "the buffer and nothing else"
