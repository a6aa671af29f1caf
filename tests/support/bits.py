"""Random ways to compute the logits of the same requests, and what is seen of them: their bits by the tokens before."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from parallel_cases import DBO, parallel
from quantized_sizes import INDEXER, SIZES

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": SIZES | INDEXER | {"num_nextn_predict_layers": 1},
    "glm_moe_dsa": SIZES
    | INDEXER
    | {
        "num_nextn_predict_layers": 1,
        "indexer_types": ["full", "shared"],
        "index_share_for_mtp_iteration": True,
    },
    "deepseek_v3": SIZES | {"num_nextn_predict_layers": 1},
}
# By name: the argument of quantize_checkpoint, or None for the plain model; and the options of the engine.
FORMATS: dict[str, tuple[str | None, dict[str, str]]] = {
    "float32": (None, {}),
    "float32, FP8 caches": (None, {"kv_cache_dtype": "fp8"}),
    "FP8": ("fp8", {"quantization": "fp8"}),
    "FP8, FP8 caches": ("fp8", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "INT8": ("int8", {}),
    "INT8, FP8 caches": ("int8", {"kv_cache_dtype": "fp8"}),
    "INT4 experts": ("int4-experts", {}),
    "bfloat16, FP8 caches": (None, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
}
LENGTHS = (3, 16, 45, 29, 70, 1, 17, 131)  # shorter than index_topk, around it, beyond it
COUNT = 7
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 160, "cache_memory": "16MiB", "progress": False}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True}
ALL = [*range(len(LENGTHS))]
_LOADS = [1.0 + (7 * expert) % 12 for expert in range(12)]


def params_of(prompt: int) -> dict[str, Any]:
    """Every third request is sampled."""
    return GREEDY | {"temperature": 0.8, "seed": 100 + prompt} if prompt % 3 == 2 else GREEDY


def generation(ids: list[list[int]], prompts: Iterable[int]) -> dict[str, Any]:
    return {"prompts": [ids[i] for i in prompts], "params": [params_of(i) for i in prompts]}


@st.composite
def ways(draw: st.DrawFn) -> dict[str, Any]:
    """A model in a format, and a way to run it: a case of ``worker.py``, whose prompts are numbers of ``LENGTHS``."""
    world = draw(st.integers(1, 4))
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if world % n == 0]))
    cp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if world % n == 0]))
    dispatches = ["all_to_all", "all_gather", *["by_node"] * (world > 2)]
    layout = parallel(cp, tp, draw(st.sampled_from(dispatches)))
    layout["decode_dispatch"] = draw(st.sampled_from(dispatches))
    if draw(st.integers(0, 2)) == 0 and world > 1:
        layout |= {"redundant_experts": world, "expert_loads": _LOADS}
        if draw(st.booleans()):
            layout = {key: value for key, value in layout.items() if key != "expert_loads"} | {"rebalance_every": 2}
    if draw(st.booleans()):
        layout["moe_chunk_size"] = draw(st.sampled_from([16, 48]))
    options: dict[str, Any] = {
        "max_num_batched_tokens": draw(st.sampled_from([7, 16, 24, 50, 512])),
        "page_size": draw(st.sampled_from([2, 4, 16, 64])),
        "max_num_seqs": draw(st.sampled_from([2, 3, 16])),
        "max_prefill_share": draw(st.sampled_from([0.3, 1.0])),
        "enable_prefix_caching": draw(st.booleans()),
        "workspace": draw(st.sampled_from(["64KiB", "8MiB"])),
        "cache_memory": draw(st.sampled_from(["640KiB", "16MiB"])),
    }
    if draw(st.booleans()):
        options |= DBO
    case: dict[str, Any] = {
        "world": world,
        "model": draw(st.sampled_from(["deepseek_v32"] * 3 + ["glm_moe_dsa", "deepseek_v3"])),
        "format": draw(st.sampled_from([*FORMATS])),
        "parallel": layout,
        "options": options,
        "nodes": {3: [0, 0, 1], 4: [0, 0, 1, 1]}.get(world, [0] * world),
        "generate": draw(st.lists(st.lists(st.sampled_from(ALL), min_size=3, max_size=10), min_size=1, max_size=2)),
    }
    how = draw(st.sampled_from(["plain", "every", "preempts", "drafts", "drafts", "padded", "whole prompts"]))
    if how == "every":
        case["every"] = draw(st.integers(1, 4))
    elif how == "preempts":
        case["preempts"] = True
    elif how == "drafts":
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": draw(st.integers(1, 3))}
        options["speculative_config"]["use_mtp_vanilla"] = False
        case["scripted"] = draw(st.booleans())
    elif how == "padded":
        case["padded"] = world == 1 or layout["decode_dispatch"] == "all_gather"
    else:
        case["prompts"] = case["generate"][0] if how == "whole prompts" else []
    return case


def _on(world: int, *layout: Any, nodes: bool = False, **more: Any) -> dict[str, Any]:
    way: dict[str, Any] = {"world": world, "parallel": parallel(*layout) | more}
    return way | {"nodes": [rank * 2 // world for rank in range(world)]} if nodes else way


_DRAFTS = {"method": "mtp", "num_speculative_tokens": 3, "use_mtp_vanilla": False}
# What may differ between two runs, alone: the rows of the table in docs/DETERMINISM.md.
AXES: dict[str, dict[str, Any]] = {
    "other requests in the batch": {},
    "prompts in chunks of 7 tokens": {"options": {"max_num_batched_tokens": 7}},
    "prefix hits": {"options": {"enable_prefix_caching": True}, "generate": [ALL, ALL]},
    "preemption": {"preempts": True},
    "sizes of pages, cache and workspace": {
        "options": {"page_size": 2, "cache_memory": "640KiB", "workspace": "64KiB"}
    },
    "drafts, some of them right": {"options": {"speculative_config": _DRAFTS}, "scripted": True},
    "decode steps padded, as for CUDA graphs": {"padded": True},
    "2 threads": {"threads": 2},
    "2 context-parallel ranks": _on(2, 2, 1),
    "3 context-parallel ranks": _on(3, 3, 1),
    "4 context-parallel ranks": _on(4, 4, 1),
    "4 ranks in 2 context-parallel groups": _on(4, 2, 1),
    "4 tensor-parallel ranks": _on(4, 4, 4),
    'moe_dispatch "all_gather"': _on(3, 3, 1, "all_gather"),
    'moe_dispatch "by_node"': _on(4, 4, 1, "by_node", nodes=True),
    "experts in rounds": _on(2, 2, 1, moe_chunk_size=16),
    "replicas of experts": _on(3, 3, 1, redundant_experts=3, expert_loads=_LOADS),
    "experts that move while they serve": _on(2, 2, 1, redundant_experts=2, rebalance_every=2),
    "micro-batches": _on(2, 2, 1) | {"options": DBO},
}
AXIS_FORMATS = ("float32", "FP8, FP8 caches", "INT8")


def along(axis: str, format: str) -> dict[str, Any]:
    """All requests at once, which differ from each alone in this too."""
    way: dict[str, Any] = {"world": 1, "parallel": {}, "generate": [ALL]} | AXES[axis]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 512} | way.get("options", {})
    return way | {"name": f"{axis}, {format}", "model": "deepseek_v32", "format": format, "options": options}


def without_the_option(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that run without it too: tensor-parallel ranks would cut o_proj inside a block of FP8."""
    return [one for one in cases if one["format"][:3] != "FP8" or one["parallel"].get("tp_size", 1) == 1]


def drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """So many different ways, the same for a seed."""
    cases: dict[str, dict[str, Any]] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=4 * count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(ways())
    def draw(case: dict[str, Any]) -> None:
        cases.setdefault(repr(case), case)

    draw()
    # Some of them: hypothesis changes a little of one to get the next.
    chosen = random.Random(seed).sample([*cases.values()], count)
    return [case | {"name": str(number)} for number, case in enumerate(chosen)]


def reference(model: str, format: str) -> dict[str, Any]:
    """Each request alone, its prompt in one piece, on one rank."""
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
    named = {"name": f"{model}, {format}", "world": 1, "model": model, "format": format, "parallel": {}}
    return named | {"options": options, "prompts": ALL, "generate": [[number] for number in ALL]}


def finished(
    case: dict[str, Any], folder: str, ids: list[list[int]], alone: list[list[int]], on: bool
) -> dict[str, Any]:
    """The case as ``worker.py`` takes it; ``alone``: the tokens that each prompt gets by itself."""
    numbers = [one for part in case["generate"] for one in part]
    options = OPTIONS | FORMATS[case["format"]][1] | case["options"] | ({"batch_invariant": True} if on else {})
    more = {"script": [alone[number] for number in numbers]} if case.get("scripted") else {}
    return case | more | {
        "folder": folder,
        "options": options,
        "generate": [generation(ids, part) for part in case["generate"]],
        "prompts": [ids[number] for number in case.get("prompts", [])],
        "threads": case.get("threads", 1),
        "bits": True,
    }  # fmt: skip


def largest_difference(seen: Iterable[dict[bytes, list[torch.Tensor]]]) -> tuple[float, int, int]:
    """What several runs have seen, compared: the largest difference of two logits after the same tokens; how many rows
    of logits differ from another one's bits; and how many rows were compared with another one."""
    rows: dict[bytes, list[torch.Tensor]] = defaultdict(list)
    for one in seen:
        for tokens, logits in one.items():
            rows[tokens] += logits
    largest, different, compared = 0.0, 0, 0
    for first, *others in rows.values():
        compared += len(others)
        different += sum(not torch.equal(first.view(torch.int32), other.view(torch.int32)) for other in others)
        largest = max([largest, *(float((first - other).abs().max()) for other in others)])
    return largest, different, compared
