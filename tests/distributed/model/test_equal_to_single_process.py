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
from parallel_cases import CASES, FP8, GREEDY, MODELS, OPTIONS, parallel


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
            **{key: described[key] for key in ("padded", "preempts", "nodes", "waiting") if key in described},
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
        result: dict[str, Any] = {"last": [], "all": [], "tokens": [], "prompt_logprobs": [], "selections": []}
        alone = {key: value for key, value in described.items() if key not in ("nodes", "waiting")}
        wanted = self.case(alone | {"options": used, "parallel": {}})
        for prompt in wanted["prompts"]:
            one = self._once(wanted | {"prompts": [prompt], "generate": []})
            result["last"] += one["last"]
            result["all"] += one["all"]
        for request in wanted["generate"]:
            once = self._once(wanted | {"prompts": [], "generate": [request]})
            result["tokens"] += once["tokens"]
            result["prompt_logprobs"] += once["prompt_logprobs"]
            result["selections"] += once["selections"]
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
    # A world starts once, for all of its cases. Six and eight ranks take long.
    long = {world: [pytest.mark.slow] for world in (6, 8)}
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
        assert len(other["selections"]) == len(single["selections"]) == 8 * ("selection" in described["name"])
        for one, alone in zip(other["selections"], single["selections"], strict=True):
            assert one[0].shape == (3, 3, 64) and torch.equal(one[0], alone[0])
            torch.testing.assert_close(one[1], alone[1], rtol=1e-3, atol=1e-5)
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


@pytest.mark.parametrize("world", [2, 4])
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


def test_tensor_parallel_ranks_read_their_shards_only(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> None:
    results = runs.ranks(2, tmp_path_factory.getbasetemp() / "world2")
    whole_read, shared_read = (sum(r[f"v32 cp2 tp{tp} all_to_all"]["bytes_read"] for r in results) for tp in (1, 2))
    tables, o_proj = 2 * 204 * 96 * 4, 3 * 96 * 12 * 24 * 4
    assert whole_read - shared_read == tables + o_proj
