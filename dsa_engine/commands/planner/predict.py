"""Seconds of a prefill and of a decode step: stages by the roofline, exchanges by the model of ``moe_dispatch="auto"``.

A stage takes the longer of its products and its bytes, at the rates that kernels reach:

    seconds = max(operations / (peak · part), bytes / (bandwidth · part))

Each time is a range: from the fastest kernels that are known, measured alone or as published, to those of this project
as measured on one H100 (benchmarks/results/h100), with a tenth more for what one device does not show.

The host's time was measured without a model (`scripts/measure_host.py`). A decode step in a CUDA graph is launched
before the step before it is read, so it takes the longer of host and device. A prefill step is not: first the host
plans it, and then it takes the longer of the host's launches and the device.

With one micro-batch a step waits for its exchanges. With two, the computation hides what is no longer than itself, and
is slowed down by the multiprocessors that the exchange holds; weights are read twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsa_engine.commands.planner.demand import Demand
from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.model_costs import Decode, Stages, Work, prefill_plans, times
from dsa_engine.parallel.experts import DispatchMethod

# Large products, 790 of 989 TFLOP/s, and copies, 4.3 of 4.8 TB/s, were measured on one H200.
PRODUCT, COPY = 0.80, 0.90
# Rows of the caches are read in pieces of 132 to 1,152 bytes, and scores of the indexer are written and read again.
CACHE_ROWS = {"sparse flash attention": 0.6, "lightning indexer": 0.7}
NARROW = ("projections", "MoE experts")  # stages whose products have 8-bit inputs with FP8 or INT8 weights
# Launches of a layer with experts in FP8, and of a step outside of its layers, without collectives, as
# `pytest -m slow tests/engine/test_layer_counts.py` counts them.
LAYER_LAUNCHES, STEP_LAUNCHES = 29, 27
# The same, without collectives, of what ranks that hold contexts together do more in decode: with up to 40 rows of
# theirs, and 9 in a layer with more, counted on the fake device (tests/engine/test_context_counts.py).
CONTEXT_LAUNCHES = 11, 19
PREFILL_LAUNCHES = 41  # of a layer and a micro-batch, see tests/engine/steps/test_prefill_cost.py
# Bytes a second of a device and its host, of the 64 of PCIe 5.0 x16. The part of a selection that is in no hot row, by
# hot rows in selections: the demo model's (benchmarks/results/hot_rows.json). Drafts share the selection.
PCIE = 50e9
MISSES = {1: 0.358, 1.5: 0.327, 2: 0.307, 3: 0.273, 4: 0.255, 8: 0.230, 16: 0.209}
# Seconds of the host: a decode step, each request of the rank in it, each request of another rank; a prefill step
# before its first launch, each token of the prompt. They are the "law" in benchmarks/results/host.json, an AMD EPYC's.
HOST_DECODE = (0.508e-3, 14.8e-6, 0.0922e-6)
HOST_PREFILL = (3.59e-3, 0.0274e-6)


@dataclass(frozen=True, eq=False)
class Kernels:
    """What a set of kernels reaches."""

    parts: dict[str, tuple[float, float]]  # of the peak of products in prefill and in decode; other stages: PRODUCT
    weights: float  # part of the bandwidth with which products of few rows read weights
    launch: float  # seconds from one kernel's end to the next one's begin in a CUDA graph; a small kernel's least time
    eager: float  # seconds of the host for a launch outside of graphs
    selection: float  # seconds of top-k in a layer of a decode step
    collective: float  # part of the multiprocessors that a running collective holds
    slack: float = 1.0  # factor of every time


# On the H100: DeepGEMM's products alone at 65%, its logits at 53%, FlashMLA 584 TFLOP/s. Published:
# DeepGEMM's grouped products, 1,200. 20 of 132 multiprocessors are DeepSeek-V3's. The others are assumed.
# 8,192 tokens in four layers, where the device waits for the host, took 24.9 ms on an H200 (2ac63e51), 574 launches as
# counted: 43 us each. By a trace on an H100, 18 of them lie in PyTorch's and CUDA's calls, 25 in Python between them;
# since, 0.3 times as many functions are called for a launch.
BEST = Kernels(
    {
        "projections": (0.6, 0.6),
        "lightning indexer": (0.48, 0.48),
        "sparse flash attention": (0.59, 0.41),
        "MoE experts": (0.6, 0.5),
    },
    weights=0.8, launch=2e-6, eager=18e-6, selection=20e-6, collective=20 / 132,
)  # fmt: skip
# Measured on the H100, attention in prefill (Gluon) on an H200, but for the multiprocessors that NCCL takes.
# "projections" have all that is around the products.
OWN = Kernels(
    {
        "projections": (0.21, 0.21),
        "lightning indexer": (0.40, 0.40),
        "sparse flash attention": (0.49, 0.27),
        "MoE experts": (0.30, 0.5),
    },
    weights=0.55, launch=3e-6, eager=26e-6, selection=25e-6, collective=48 / 132, slack=1.1,
)  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A prefill of one prompt per context-parallel group, or a decode step, without other work."""

    how: Deployment
    dispatch: DispatchMethod
    micro_batches: int  # the faster number of them, 1 or 2
    seconds: float  # of the prompt, or of a token of a request
    requests: int  # prompts or requests of all ranks of the instance
    room: float  # bytes that remain on a rank with all of them in its caches; negative if they do not fit
    host: float  # seconds of the host: in decode all; in prefill those that the device waits for
    stages: dict[str, float]  # seconds, and of what they wait for


def predict_prefill(placed: Placed, tokens: int, kernels: Kernels) -> Predicted:
    """A prefill of a prompt of ``tokens`` tokens by every context-parallel group."""
    how = placed.how
    own, groups = cdiv(tokens, how.cp_size), how.ranks // how.cp_size
    chunk = min(how.chunk, own)
    dispatch = placed.dispatch(chunk)

    def seconds(micro: int) -> dict[str, float]:
        rows = cdiv(chunk, micro)
        work = placed.costs.prefill(prefill_plans(placed.config, tokens, how.cp_size, rows), 0, groups=groups)
        passes = cdiv(own, rows)
        stages = _timed(placed, kernels, work, dispatch, rows, passes, micro, decodes=False)
        launched = passes * placed.config.num_hidden_layers * PREFILL_LAUNCHES * kernels.eager
        return stages | {"host": max(0.0, launched - sum(stages.values()))}

    stages, micro = _faster(seconds, how.ranks > 1)
    if gathered := placed.gather_of_contexts(tokens, chunk):  # under the layer before
        stages["context parallelism"] = _waited(gathered, stages, kernels)
    stages["host"] += cdiv(own, chunk) * HOST_PREFILL[0] + tokens * HOST_PREFILL[1]
    room = placed.cache_room(chunk, dispatch) - placed.prefilled(tokens)
    return Predicted(how, dispatch, micro, sum(stages.values()), groups, room, stages["host"], stages)


def predict_decode(placed: Placed, requests: int, demand: Demand, kernels: Kernels) -> Predicted:
    """A decode step of all ranks' ``requests``, divided evenly, in a CUDA graph, with the dispatch of "auto" there."""
    how, own = placed.how, cdiv(requests, placed.how.ranks)
    # Requests of a rank, where each has its part of all that its group holds.
    attended = own if how.dcp_size == 1 else cdiv(requests, how.ranks // how.dcp_size) / how.dcp_size
    dispatch: DispatchMethod = "all_gather"

    def seconds(micro: int) -> dict[str, float]:
        each = cdiv(own, micro)
        rows = each * (1 + how.drafts)
        work = placed.costs.decode(Decode(each, requests * each // own, demand.context + how.drafts, how.drafts))
        work |= {name: work[name] * (attended / own) for name in CACHE_ROWS if name in work}
        return _timed(placed, kernels, times(work, micro), dispatch, rows, micro, micro, decodes=True)

    stages, micro = _faster(seconds, own > 1 and how.ranks > 1)
    if how.hot_rows:
        topk = placed.config.index_topk
        missed = float(np.interp(how.hot_rows / topk / (1 + how.drafts), [*MISSES], [*MISSES.values()]))
        stages["rows from host memory"] = attended * missed * topk * placed.latent_bytes / PCIE
    host = HOST_DECODE[0] + HOST_DECODE[1] * own + HOST_DECODE[2] * (requests - own)
    stages["host"] = max(0.0, host - sum(stages.values()))
    room = placed.cache_room(own * (1 + how.drafts)) - placed.cached(demand.longest, requests)
    seconds_of_token = sum(stages.values()) / demand.tokens_per_step(how.drafts)
    return Predicted(how, dispatch, micro, seconds_of_token, requests, room, host, stages)


def _faster(seconds: Callable[[int], dict[str, float]], may_divide: bool) -> tuple[dict[str, float], int]:
    tried = [(seconds(micro), micro) for micro in ((1, 2) if may_divide else (1,))]
    return min(tried, key=lambda one: sum(one[0].values()))


def stage_seconds(placed: Placed, kernels: Kernels, name: str, work: Work, decodes: bool) -> float:
    """The longer of a stage's products and its bytes."""
    device = placed.device
    narrow = placed.narrow if name in NARROW else name == "lightning indexer" and placed.cache.coded
    peak = (device.narrow_tflops if narrow else device.tflops) * 1e12
    products = work.flops / (peak * kernels.parts.get(name, (PRODUCT, PRODUCT))[decodes])
    part = CACHE_ROWS.get(name, kernels.weights if decodes else COPY)
    return kernels.slack * max(products, work.bytes_read / (device.tb_s * 1e12 * part))


def _timed(
    placed: Placed, kernels: Kernels, work: Stages, dispatch: DispatchMethod, rows: int, passes: int, micro: int,
    *, decodes: bool,
) -> dict[str, float]:  # fmt: skip
    """Seconds of the stages of ``passes`` passes over ``rows`` rows of each rank, and of what they wait for."""
    config = placed.config
    stages = {name: stage_seconds(placed, kernels, name, one, decodes) for name, one in work.items()}
    if decodes and "lightning indexer" in stages:
        drafting = min(placed.how.drafts, 1) if config.index_share_for_mtp_iteration else placed.how.drafts
        selecting = config.indexer_types.count("full") + drafting
        stages["lightning indexer"] += kernels.slack * passes * selecting * kernels.selection
    together = decodes and placed.how.dcp_size > 1
    of_layer, of_step = (more * together for more in CONTEXT_LAUNCHES)
    launched = (LAYER_LAUNCHES + of_layer) * (config.num_hidden_layers + placed.how.drafts) + STEP_LAUNCHES + of_step
    stages["launches"] = kernels.slack * passes * launched * kernels.launch
    stages["tensor parallelism"] = passes * placed.tensor_parallel(rows)
    if together:
        stages["context parallelism"] = passes * placed.context_parallel(rows)
    layers = config.mlp_layer_types.count("sparse") + placed.how.drafts
    seconds = passes * layers * placed.exchange(dispatch, rows)
    return stages | {"exchange of tokens": seconds if micro == 1 else _waited(seconds, stages, kernels)}


def _waited(seconds: float, stages: dict[str, float], kernels: Kernels) -> float:
    """What an exchange under the stages adds to them."""
    return max(seconds - sum(stages.values()), kernels.collective * seconds)
