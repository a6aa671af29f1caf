"""Every division of the work over ranks that must not change a result: models, options, prompts, by number of ranks."""

from __future__ import annotations

from typing import Any

# Divides by 2, 3, 4, 6: heads (o_proj), vocabulary (embedding, LM head), experts.
SIZES: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 204}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("deepseek_v32", SIZES),
    "glm": ("glm_moe_dsa", SIZES | {"indexer_types": ["full", "shared", "full"]}),
    "v3": ("deepseek_v3", SIZES),
    "v32-fp8": ("deepseek_v32", SIZES | {"kv_lora_rank": 128, "index_head_dim": 32}),
}
# Random weights in the released FP8 format: 3 layers, whose o_proj is cut between blocks by up to 4 ranks.
FP8 = {"num_hidden_layers": 3, "vocab_size": 204, "index_topk": 64}
FP8 |= {"n_routed_experts": 12, "n_group": 2, "topk_group": 1}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "cache_memory": "256MiB"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_tokens": 12, "ignore_eos": True}
RAGGED = [5, 150, 1, 300, 64, 33, 9, 2]


def parallel(cp: int, tp: int, dispatch: str = "all_to_all") -> dict[str, Any]:
    return {"cp_size": cp, "tp_size": tp, "moe_dispatch": dispatch, "decode_dispatch": dispatch}


def lengths(cp: int) -> list[int]:
    """Shorter than the plan's pieces, around multiples of them, around index_topk and the page, and long."""
    return sorted({1, 2, 3, 5, 7, 2 * cp - 1, 2 * cp, 2 * cp + 1, 63, 64, 65, 30 * cp - 1, 30 * cp + 1, 701})


def case(name: str, model: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "lengths": [], "ragged": [], "options": {}} | keys


def whole(model: str, cp: int, tp: int, dispatch: str, every_length: bool = False) -> dict[str, Any]:
    """``every_length``: test all lengths at which a plan may be wrong; a few lengths test the rest of a layer."""
    return case(
        f"{model} cp{cp} tp{tp} {dispatch}",
        model,
        parallel=parallel(cp, tp, dispatch),
        lengths=lengths(cp) if every_length else [1, 2 * cp + 1, 30 * cp - 1, 333],
        ragged=RAGGED,
    )


def others(world: int, cp: int, tp: int) -> list[dict[str, Any]]:
    """Spot checks, each of one option that divides a step otherwise, on context-parallel groups of ``cp`` ranks."""
    config = parallel(cp, tp)
    return [
        case(
            "chunked",
            "v32",
            parallel=config,
            options={"max_num_batched_tokens": 48},
            lengths=[3, 48 * cp + 1, 96 * cp, 333],
            ragged=RAGGED,
        ),
        case("experts in rounds", "v32", parallel=config | {"moe_chunk_size": 40}, lengths=[301], ragged=RAGGED),
        case("cp1", "v32", parallel=parallel(1, world), lengths=[1, 150], ragged=RAGGED),
    ]


def of_two_ranks() -> list[dict[str, Any]]:
    """Spot checks of options that know no number of ranks; test_batch_invariant draws them on up to four."""
    config = parallel(2, 1)
    return [
        case("few sequences at once", "v32", parallel=config, options={"max_num_seqs": 4}, ragged=RAGGED),
        case("small pages", "glm", parallel=config, options={"page_size": 16}, lengths=[17, 333], ragged=RAGGED),
        case("sampled", "v32", parallel=config, ragged=RAGGED, params=SAMPLED),
        case("selection", "glm", parallel=config, options=DBO, ragged=RAGGED, params=GREEDY | {"selection": 3}),
        case("dummy", "v32", parallel=config, options={"load_format": "dummy", "seed": 7}, lengths=[7, 150]),
    ]


def stored(cp: int, tp: int, dispatch: str) -> dict[str, Any]:
    """FP8 weights and products."""
    name, config = f"FP8 weights cp{cp} tp{tp} {dispatch}", parallel(cp, tp, dispatch)
    options = {"quantization": "fp8", "max_num_batched_tokens": 64}
    return case(name, "fp8 weights", parallel=config, options=options, lengths=[65, 150], ragged=RAGGED)


DBO: dict[str, Any] = {"enable_dbo": True}


def micro_batches(model: str, cp: int, dispatch: str, chunk: int | None = None, **keys: Any) -> dict[str, Any]:
    """Every step that can be cut is; with ``chunk`` tokens travel in rounds."""
    options = DBO | {"max_num_batched_tokens": 48}
    name = f"micro-batches of {model} cp{cp} {dispatch} {chunk or ''} {' '.join(keys)}"
    more = {"options": options, "lengths": [2, 5, 301], "ragged": RAGGED}
    return case(name, model, parallel=parallel(cp, 1, dispatch) | {"moe_chunk_size": chunk}, **more, **keys)


def fp8_caches(cp: int, dispatch: str) -> dict[str, Any]:
    """Prompts in several chunks, whose rows are gathered in FP8."""
    options = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 48}
    name = f"FP8 caches cp{cp} {dispatch}"
    return case(name, "v32-fp8", parallel=parallel(cp, 1, dispatch), options=options, lengths=[5, 301], ragged=RAGGED)


def replicas(model: str, cp: int, dispatch: str, number: int = 4, **keys: Any) -> dict[str, Any]:
    """Replicas of the experts with the largest loads, which are made up."""
    loads = [1.0 + (7 * expert) % 12 for expert in range(12)]
    config = {"redundant_experts": number, "expert_loads": loads}
    name = f"{number} replicas of {model} cp{cp} {dispatch}"
    more = {"lengths": [2, 301], "ragged": RAGGED} | keys
    return case(name, model, parallel=parallel(cp, 1, dispatch) | config, **more)


def by_node(nodes: list[int]) -> list[dict[str, Any]]:
    """The dispatch by nodes, in prefill and decode, with each feature that concerns the experts."""
    cp, at = len(nodes), {"nodes": nodes}
    once = parallel(cp, 1, "by_node")
    in_rounds = once | {"moe_chunk_size": 40, "redundant_experts": 4}
    cases = [
        case("plain", "v32", parallel=once, lengths=[1, 333], ragged=RAGGED),
        case("replicas, in rounds", "v32", parallel=in_rounds, lengths=[2, 301], ragged=RAGGED),
        case("chosen by size", "glm", parallel=parallel(cp, 1, "auto"), lengths=[17, 333], ragged=RAGGED),
        micro_batches("v32", cp, "by_node", preempts=True),
        micro_batches("v32", cp, "by_node", waiting=True),
        micro_batches("v32", cp, "by_node", chunk=40, waiting=True),
        stored(cp, 1, "by_node"),
        rebalanced("v32", cp, "by_node"),
    ]
    return [one | at | {"name": f"by node {nodes}, {one['name']}"} for one in cases]


def rebalanced(model: str, cp: int, dispatch: str, number: int = 4, **keys: Any) -> dict[str, Any]:
    """Experts move in every second step, by what a few tokens have chosen."""
    config = {"redundant_experts": number, "rebalance_every": 2}
    name = f"rebalanced {model}, {number} replicas cp{cp} {dispatch} {' '.join(keys)}"
    return case(name, model, parallel=parallel(cp, 1, dispatch) | config, **{"ragged": RAGGED} | keys)


DISPATCHES = ("all_to_all", "all_gather")
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        *(whole("v32", 2, tp, dispatch, tp == 1) for tp in (1, 2) for dispatch in DISPATCHES),
        whole("glm", 2, 2, "all_gather"),
        whole("v3", 2, 1, "all_to_all"),
        fp8_caches(2, "all_to_all"),
        *others(2, cp=2, tp=1),
        *of_two_ranks(),
        *(micro_batches("v32", 2, dispatch) for dispatch in DISPATCHES),
        micro_batches("v32", 2, "all_gather", padded=True),
        micro_batches("v32", 2, "all_to_all", waiting=True),
        micro_batches("v32", 2, "all_to_all", chunk=40, waiting=True),
        micro_batches("fp8 weights", 2, "all_to_all"),
        stored(2, 1, "all_to_all"),
        stored(2, 2, "all_gather"),
        replicas("v32", 2, "all_to_all"),
        replicas("v32", 2, "all_gather", padded=True),
        replicas("fp8 weights", 2, "all_to_all", options={"quantization": "fp8"}),
        rebalanced("v32", 2, "all_to_all", preempts=True),
        rebalanced("v32", 2, "all_to_all", lengths=[301], ragged=[], options={"max_num_batched_tokens": 48}),
        rebalanced("v32", 2, "all_gather", padded=True),
        rebalanced("v32", 2, "all_gather", number=0, options=DBO),
        rebalanced("fp8 weights", 2, "all_to_all", options={"quantization": "fp8"}),
    ],
    4: [
        whole("v32", 4, 1, "all_to_all", every_length=True),
        whole("v32", 4, 1, "all_gather"),
        *(whole("v32", 4, 2, dispatch) for dispatch in DISPATCHES),
        whole("v32", 2, 1, "all_to_all"),  # two context-parallel groups
        whole("v32", 2, 4, "all_gather"),  # tensor-parallel groups across them
        whole("v3", 4, 2, "all_gather"),
        fp8_caches(4, "all_gather"),
        *others(4, cp=2, tp=4),
        stored(4, 1, "all_gather"),
        stored(2, 4, "all_to_all"),
        replicas("v32", 4, "all_gather"),
        replicas("v32", 2, "all_to_all", number=36),  # every rank has all
        replicas("v32", 4, "all_to_all"),  # 16 physical experts
        *by_node([0, 0, 1, 1]),
        rebalanced("v32", 2, "all_to_all"),
    ],
    5: [
        case(
            f"uneven experts {dispatch}",  # 12 on 5 ranks: 3, 3, 2, 2, 2
            "v32",
            parallel=parallel(5, 1, dispatch),
            lengths=[1, 65, 333],
            ragged=RAGGED,
        )
        for dispatch in DISPATCHES
    ]
    + by_node([0, 0, 1, 0, 1])[:2]
    + [rebalanced("v32", 5, dispatch, number=4) for dispatch in DISPATCHES],  # 4, 3, 3, 3, 3
    6: [
        *(whole("v32", 3, 2, dispatch) for dispatch in DISPATCHES),
        whole("glm", 2, 3, "all_to_all"),  # neither kind of group contains the other
    ],
    8: by_node([0, 0, 0, 0, 1, 1, 1, 1])[:2] + by_node([0, 0, 1, 1, 2, 2, 3, 3])[:2],
}
