"""N ranks compute the same as one process: logits, tokens, weights, with every division of the work.

All cases of a world size run in one launch. The single process is this one, with default options and the whole prompt
in one step. A part: pytest -k 4-ranks, or -k chunked.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.demo import demo_config
from dsa_engine.demo.random_checkpoint import write_random_checkpoint

# Divides by 2, 3, 4, 6: heads (o_proj), vocabulary (embedding, LM head), experts.
SIZES = {"num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 204}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("deepseek_v32", SIZES),
    "glm": ("glm_moe_dsa", SIZES | {"indexer_types": ["full", "shared", "full"]}),
    "v3": ("deepseek_v3", SIZES),
    "v32-fp8": ("deepseek_v32", SIZES | {"kv_lora_rank": 128, "index_head_dim": 32}),
}
# Random weights in the released FP8 format: 3 layers, whose o_proj is cut between blocks by up to 4 ranks.
FP8 = {"num_hidden_layers": 3, "vocab_size": 204, "index_topk": 64, "n_routed_experts": 12, "n_group": 2}
FP8 |= {"topk_group": 1}
OPTIONS = {"device": "cpu", "max_model_len": 1024, "cache_memory": "256MiB"}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "max_tokens": 12, "ignore_eos": True}
RAGGED = [5, 150, 1, 300, 64, 33, 9, 2]


def parallel(cp: int, tp: int, dispatch: str = "all_to_all", layout: str = "head_tail") -> dict[str, Any]:
    return {"cp_size": cp, "tp_size": tp, "moe_dispatch": dispatch, "decode_dispatch": dispatch, "cp_layout": layout}


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
    """Spot checks, each of one option, on context-parallel groups of ``cp`` ranks."""
    config = parallel(cp, tp)
    return [
        case(
            "chunked",
            "v32",
            parallel=config,
            options={"max_num_batched_tokens": 48},
            lengths=[3, 48 * cp + 1, 96 * cp, 701],
            ragged=RAGGED,
        ),
        case(
            "contiguous", "v32", parallel=parallel(cp, tp, layout="contiguous"), lengths=[1, 5, 65, 701], ragged=RAGGED
        ),
        case("experts in rounds", "v32", parallel=config | {"moe_chunk_size": 16}, lengths=[301], ragged=RAGGED),
        case("few sequences at once", "v32", parallel=config, options={"max_num_seqs": 2}, ragged=RAGGED),
        case("small pages", "glm", parallel=config, options={"page_size": 16}, lengths=[17, 333], ragged=RAGGED),
        case("sampled", "v32", parallel=config, ragged=RAGGED, params=SAMPLED),
        case("dummy", "v32", parallel=config, options={"load_format": "dummy", "seed": 7}, lengths=[7, 150]),
        case("cp1", "v32", parallel=parallel(1, world), lengths=[1, 150], ragged=RAGGED),
    ]


def stored(cp: int, tp: int, dispatch: str) -> dict[str, Any]:
    """FP8 weights and products."""
    name, config = f"FP8 weights cp{cp} tp{tp} {dispatch}", parallel(cp, tp, dispatch)
    options = {"quantization": "fp8", "max_num_batched_tokens": 64}
    return case(name, "fp8 weights", parallel=config, options=options, lengths=[65, 150], ragged=RAGGED)


DBO = {"enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 2}


def two_batches(model: str, cp: int, dispatch: str, **keys: Any) -> dict[str, Any]:
    """Every step that can be cut is."""
    options = DBO | {"max_num_batched_tokens": 48}
    name = f"two batches of {model} cp{cp} {dispatch} {' '.join(keys)}"
    more = {"options": options, "lengths": [2, 5, 301], "ragged": RAGGED}
    return case(name, model, parallel=parallel(cp, 1, dispatch), **more, **keys)


def fp8_caches(cp: int, dispatch: str) -> dict[str, Any]:
    """Prompts in several chunks, whose rows are gathered in FP8."""
    options = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 48}
    name = f"FP8 caches cp{cp} {dispatch}"
    return case(name, "v32-fp8", parallel=parallel(cp, 1, dispatch), options=options, lengths=[5, 301], ragged=RAGGED)


def replicas(model: str, cp: int, dispatch: str, number: int = 4, shared: bool = False, **keys: Any) -> dict[str, Any]:
    """Replicas of the experts with the largest loads, which are made up.

    Args:
        shared: whether the shared expert is a routed one.
    """
    loads = [1.0 + (7 * expert) % 12 for expert in range(12)]
    config = {"redundant_experts": number, "expert_loads": loads, "route_shared_expert": shared}
    name = f"{number} replicas of {model}{', shared expert routed' * shared} cp{cp} {dispatch}"
    more = {"lengths": [2, 301], "ragged": RAGGED} | keys
    return case(name, model, parallel=parallel(cp, 1, dispatch) | config, **more)


def by_machine(machines: list[int]) -> list[dict[str, Any]]:
    """The dispatch by machines, in prefill and decode, with each feature that concerns the experts."""
    cp, at = len(machines), {"machines": machines}
    once = parallel(cp, 1, "by_machine")
    in_rounds = once | {"moe_chunk_size": 16, "redundant_experts": 3, "route_shared_expert": True}
    cases = [
        case("plain", "v32", parallel=once, lengths=[1, 333], ragged=RAGGED),
        case("replicas, in rounds", "v32", parallel=in_rounds, lengths=[2, 301], ragged=RAGGED),
        case("chosen by size", "glm", parallel=parallel(cp, 1, "auto"), lengths=[17, 333], ragged=RAGGED),
        two_batches("v32", cp, "by_machine", preempts=True),
        stored(cp, 1, "by_machine"),
        rebalanced("v32", cp, "by_machine"),
    ]
    return [one | at | {"name": f"by machine {machines}, {one['name']}"} for one in cases]


def rebalanced(
    model: str, cp: int, dispatch: str, number: int = 4, shared: bool = False, **keys: Any
) -> dict[str, Any]:
    """Experts move in every second step, by what a few tokens have chosen."""
    config = {"redundant_experts": number, "route_shared_expert": shared, "rebalance_every": 2}
    name = (
        f"rebalanced {model}, {number} replicas{', shared expert routed' * shared} cp{cp} {dispatch} {' '.join(keys)}"
    )
    return case(name, model, parallel=parallel(cp, 1, dispatch) | config, **{"ragged": RAGGED} | keys)


DISPATCHES = ("all_to_all", "all_gather")
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        *(whole("v32", 2, tp, dispatch, tp == 1) for tp in (1, 2) for dispatch in DISPATCHES),
        whole("glm", 2, 2, "all_gather"),
        whole("v3", 2, 1, "all_to_all"),
        *(fp8_caches(2, dispatch) for dispatch in DISPATCHES),
        *others(2, cp=2, tp=1),
        *(two_batches("v32", 2, dispatch) for dispatch in DISPATCHES),
        two_batches("v32", 2, "all_gather", padded=True),
        two_batches("fp8 weights", 2, "all_to_all"),
        stored(2, 1, "all_to_all"),
        stored(2, 2, "all_gather"),
        replicas("v32", 2, "all_to_all"),
        replicas("v32", 2, "all_gather", shared=True, padded=True),
        replicas("fp8 weights", 2, "all_to_all", shared=True, options={"quantization": "fp8"}),
        rebalanced("v32", 2, "all_to_all", preempts=True),
        rebalanced("v32", 2, "all_to_all", lengths=[301], ragged=[], options={"max_num_batched_tokens": 48}),
        rebalanced("v32", 2, "all_gather", shared=True, padded=True),
        rebalanced("v32", 2, "all_gather", number=0, options=DBO),
        rebalanced("fp8 weights", 2, "all_to_all", options={"quantization": "fp8"}),
    ],
    3: [
        *(rebalanced("v32", 3, dispatch, number=2) for dispatch in DISPATCHES),
        *(whole("v32", 3, 1, dispatch, dispatch == "all_to_all") for dispatch in DISPATCHES),
        whole("glm", 3, 1, "all_to_all"),
        *others(3, cp=3, tp=3),
        *(two_batches("v32", 3, dispatch, preempts=True) for dispatch in DISPATCHES),
        *(
            replicas("v32", 3, dispatch, shared=dispatch == "all_to_all") for dispatch in DISPATCHES
        ),  # they do not divide
        *by_machine([0, 0, 1]),
    ],
    4: [
        whole("v32", 4, 1, "all_to_all", every_length=True),
        whole("v32", 4, 1, "all_gather"),
        *(whole("v32", 4, 2, dispatch) for dispatch in DISPATCHES),
        whole("v32", 2, 1, "all_to_all"),  # two context-parallel groups
        whole("v32", 2, 4, "all_gather"),  # tensor-parallel groups across them
        whole("v3", 4, 2, "all_gather"),
        *(fp8_caches(4, dispatch) for dispatch in DISPATCHES),
        *others(4, cp=2, tp=4),
        stored(4, 1, "all_gather"),
        stored(2, 4, "all_to_all"),
        replicas("v32", 4, "all_gather"),
        replicas("v32", 2, "all_to_all", number=36),  # every rank has all
        replicas("v32", 4, "all_to_all", number=3, shared=True),  # 16 physical experts
        *by_machine([0, 0, 1, 1]),
        rebalanced("v32", 2, "all_to_all", shared=True),
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
    + by_machine([0, 0, 1, 0, 1])[:2]
    + [rebalanced("v32", 5, dispatch, number=4) for dispatch in DISPATCHES],  # 4, 3, 3, 3, 3
    6: [
        *(whole("v32", 3, 2, dispatch) for dispatch in DISPATCHES),
        whole("glm", 2, 3, "all_to_all"),  # neither kind of group contains the other
    ],
    8: by_machine([0, 0, 0, 0, 1, 1, 1, 1]) + by_machine([0, 0, 1, 1, 2, 2, 3, 3])[:2],
}


class Runs:
    """Launches a world at its first use, and computes the same in this process."""

    def __init__(
        self,
        fork_ranks: Callable[..., Any],
        worker: SimpleNamespace,
        oracle: Callable[..., Any],
        ids: Callable[..., list[int]],
        fp8: Path,
    ):
        self._fp8 = fp8
        self._launch, self._worker, self._oracle, self._ids = fork_ranks, worker, oracle, ids
        self._worlds: dict[int, list[dict[str, Any]]] = {}
        self._single: dict[str, dict[str, Any]] = {}

    def case(self, described: dict[str, Any]) -> dict[str, Any]:
        """The case as the worker takes it."""
        model_type, overrides = MODELS.get(described["model"], ("", {}))
        folder = self._oracle(model_type, **overrides).folder if model_type else self._fp8
        prompts = [self._ids(n, 204) for n in described["ragged"]]
        params = [described.get("params", GREEDY) | {"seed": 100 + i if i % 2 else None} for i in range(len(prompts))]
        params[::2] = [keys | {"prompt_logprobs": 1} for keys in params[::2]]
        return {
            "name": described["name"],
            "folder": str(folder),
            "parallel": described.get("parallel", {}),
            "options": OPTIONS | described["options"],
            **{key: described[key] for key in ("padded", "preempts", "machines") if key in described},
            "prompts": [self._ids(n, 204) for n in described["lengths"]],
            "generate": [{"prompts": prompts, "params": params}] if prompts else [],
        }

    def ranks(self, world: int, folder: Path) -> list[dict[str, Any]]:
        """The results of every rank, by name of the case."""
        if world not in self._worlds:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cases.json").write_text(json.dumps([self.case(c) for c in CASES[world]]))
            done = self._launch(world, "worker.py", folder / "cases.json", folder)
            assert done.returncode == 0, done.stderr
            assert done.stdout == "" and "Warning" not in done.stderr, done.stderr
            self._worlds[world] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
        return self._worlds[world]

    def single(self, described: dict[str, Any]) -> dict[str, Any]:
        """Each prompt and each generation is computed once for all cases."""
        same, options = ("load_format", "seed", "kv_cache_dtype", "quantization"), described["options"]
        used = {key: options[key] for key in same if key in options}
        result: dict[str, Any] = {"last": [], "all": [], "tokens": [], "prompt_logprobs": []}
        alone = {key: value for key, value in described.items() if key != "machines"}
        wanted = self.case(alone | {"options": used, "parallel": {}})
        for prompt in wanted["prompts"]:
            one = self._once(wanted | {"prompts": [prompt], "generate": []})
            result["last"] += one["last"]
            result["all"] += one["all"]
        for request in wanted["generate"]:
            once = self._once(wanted | {"prompts": [], "generate": [request]})
            result["tokens"] += once["tokens"]
            result["prompt_logprobs"] += once["prompt_logprobs"]
        return result | {"bytes_read": self._once(wanted | {"prompts": [], "generate": []})["bytes_read"]}

    def _once(self, wanted: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps({k: v for k, v in wanted.items() if k != "name"}, sort_keys=True)
        if key not in self._single:
            self._single[key] = self._worker.run_case(wanted)
        return self._single[key]


@pytest.fixture(scope="session")
def runs(
    fork_ranks: Callable[..., Any],
    worker: SimpleNamespace,
    oracle: Callable[..., Any],
    random_ids: Callable[..., list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    fp8 = tmp_path_factory.mktemp("fp8") / "model"
    write_random_checkpoint(fp8, demo_config() | FP8, fp8=True)
    return Runs(fork_ranks, worker, oracle, random_ids, fp8)


def assert_same_prompt_logprobs(actual: list[Any], single: list[Any]) -> None:
    """Compares each token; under 1% may differ after a near tie of the selection."""
    differing, all_of_them = 0, 0
    for prompt, other in zip(itertools.chain(*actual), itertools.chain(*single), strict=True):
        assert len(prompt) == len(other) and prompt[0] is None and other[0] is None
        all_of_them += len(prompt)
        for one, two in zip(prompt[1:], other[1:], strict=True):
            same = list(one) == list(two) and all(abs(one[t][0] - two[t][0]) < 1e-3 for t in one)
            differing += not same
    assert differing <= 0.01 * all_of_them


def cases_of(*models: str) -> pytest.MarkDecorator:
    """Parametrizes a test with the cases of some models, in every world."""
    chosen = [(world, c) for world, cases in CASES.items() for c in cases if c["model"] in models]
    # A world starts once, for all of its cases. Three, six and eight ranks take long; five have uneven cuts too.
    long = {world: [pytest.mark.slow] for world in (3, 6, 8)}
    params = [pytest.param(w, c, id=f"{w}-ranks, {c['name']}", marks=long.get(w, [])) for w, c in chosen]
    return pytest.mark.parametrize(("world", "described"), params)


@cases_of(*MODELS)
def test_equal_to_single_process(
    world: int,
    described: dict[str, Any],
    runs: Runs,
    tmp_path_factory: pytest.TempPathFactory,
    assert_same_logits: Callable[..., None],
) -> None:
    ranks = [
        results[described["name"]] for results in runs.ranks(world, tmp_path_factory.getbasetemp() / f"world{world}")
    ]
    single = runs.single(described)
    for length, last, every, last_1, every_1 in zip(
        described["lengths"], ranks[0]["last"], ranks[0]["all"], single["last"], single["all"], strict=True
    ):
        topk = None if described["model"] == "v3" else 64
        assert every.shape == (length, 204)
        if described["model"] == "v32-fp8":  # a number between two codes may round to the other
            assert float((every - every_1).norm() / every_1.norm()) < 1e-3
            assert float((last - last_1).norm() / last_1.norm()) < 1e-3
            continue
        assert_same_logits(every, every_1, index_topk=topk, what=f"all of {length}")
        assert_same_logits(last[None], last_1[None], what=f"last of {length}")
    assert ranks[0]["tokens"] == single["tokens"]
    assert_same_prompt_logprobs(ranks[0]["prompt_logprobs"], single["prompt_logprobs"])
    for other in ranks:
        assert all(map(torch.equal, other["last"], ranks[0]["last"])), "every rank returns the same"
        assert all(map(torch.equal, other["all"], ranks[0]["all"]))
        assert other["tokens"] == ranks[0]["tokens"]
        assert other["prompt_logprobs"] == ranks[0]["prompt_logprobs"]
        assert other["pages_lost"] == 0 and other["own_pages_lost"] == 0
        assert other["moved_bytes"] == ranks[0]["moved_bytes"]
    assert (ranks[0]["moved_bytes"] > 0) == ("rebalance_every" in described["parallel"])


@cases_of("fp8 weights")
def test_quantised_products_too(
    world: int, described: dict[str, Any], runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same tokens. If a value rounds to another code, its row differs by a step of e4m3. So the error of all rows
    together is bounded, and the median row is as near as without quantisation."""
    ranks = [
        results[described["name"]] for results in runs.ranks(world, tmp_path_factory.getbasetemp() / f"world{world}")
    ]
    single = runs.single(described)
    assert all(rank["tokens"] == single["tokens"] for rank in ranks)
    assert (ranks[0]["moved_bytes"] > 0) == ("rebalance_every" in described["parallel"])
    for ours, theirs in zip(ranks[0]["all"], single["all"], strict=True):
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        print(f"logits: median {float(error.median()):.1e}, over 1e-4 {float((error > 1e-4).float().mean()):.1%}")
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-3
        assert float(error.median()) < 1e-4


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_rank_reads_its_own_experts_only(
    world: int, runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    described = next(c for c in CASES[world] if c["parallel"] == parallel(world, 1) and c["model"] == "v32")
    results = runs.ranks(world, tmp_path_factory.getbasetemp() / f"world{world}")
    read = [r[described["name"]]["bytes_read"] for r in results]
    experts = 2 * 12 * 3 * 48 * 96 * 4  # layers, experts, matrices, their size, float32
    common = runs.single(described)["bytes_read"] - experts
    assert common > 0
    assert [one - common for one in read] == [experts // world] * world
    assert results[0][described["name"]]["experts"] == [12 // world] * 2


def test_ranks_with_uneven_numbers_of_experts_read_their_own(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    described, held = CASES[5][0], [3, 3, 2, 2, 2]
    results = [r[described["name"]] for r in runs.ranks(5, tmp_path_factory.getbasetemp() / "world5")]
    assert [r["experts"] for r in results] == [[count] * 2 for count in held]
    one = 2 * 3 * 48 * 96 * 4  # layers, matrices, their size, float32
    common = runs.single(described)["bytes_read"] - 12 * one
    assert [r["bytes_read"] - common for r in results] == [count * one for count in held]


def test_replicas_are_read_as_other_experts(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    named = "{} replicas of v32 cp2 all_to_all"
    results = [
        (number, r[named.format(number)])
        for world, number in ((2, 4), (4, 36))
        for r in runs.ranks(world, tmp_path_factory.getbasetemp() / f"world{world}")
    ]
    common = runs.single(CASES[2][0])["bytes_read"] - 2 * 12 * 3 * 48 * 96 * 4
    for number, result in results:
        held = {4: 8, 36: 12}[number]
        assert result["experts"] == [held] * 2 and result["bytes_read"] == common + 2 * held * 3 * 48 * 96 * 4


def test_tensor_parallel_ranks_read_their_shards_only(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    results = runs.ranks(2, tmp_path_factory.getbasetemp() / "world2")
    whole_read, shared_read = (sum(r[f"v32 cp2 tp{tp} all_to_all"]["bytes_read"] for r in results) for tp in (1, 2))
    tables, o_proj = 2 * 204 * 96 * 4, 3 * 96 * 12 * 24 * 4
    assert whole_read - shared_read == tables + o_proj


def test_dummy_weights_are_not_read(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert [r["dummy"]["bytes_read"] for r in runs.ranks(2, tmp_path_factory.getbasetemp() / "world2")] == [0, 0]
