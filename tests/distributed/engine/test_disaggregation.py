"""P/D disaggregation: outputs equal those of one process, and no page is lost or sent twice."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.weights.convert import quantize_checkpoint
from quantized_sizes import INDEXER, SIZES

MODEL = {"model": "demo-random", "max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 32}
SMALL = MODEL | {"cache_memory": "384KiB"}  # 27 pages, where a request needs up to 16

# Each part with its own tensor parallelism and caches; tiers of the prefix cache; experts that move; micro-batches.
EACH_ITS_OWN = {
    "options": {
        "host_cache_memory": "256KiB",
        "cache_folder": "pages",
        "enable_dbo": True,
        "decode_options": {"tp_size": 2, "cache_memory": "448KiB"},
    },
    "parallel": {"rebalance_every": 3},
}
ONE_MODULE = SIZES | INDEXER | {"num_nextn_predict_layers": 1, "indexer_types": ["full", "shared"]}


def requests(number: int) -> list[list[Any]]:
    """Requests of all kinds: greedy, seeded, with penalties, log-probabilities, stops, several outputs, one token."""
    rng, made = random.Random(5), []
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3, "top_p": 0.9},
        {"temperature": 0.8, "seed": 4, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 9, "n": 3},
        {"stop": ["e", "a"]},
        {"max_tokens": 1},
        {"max_tokens": 2, "min_tokens": 2},
    ]
    shared = [rng.randrange(4, 320) for _ in range(40)]
    for index in range(number):
        own = [rng.randrange(4, 320) for _ in range(rng.choice([1, 5, 16, 33, 60]))]
        params = {"temperature": 0.0, "max_tokens": rng.choice([9, 25, 40]), "ignore_eos": True}
        made.append([shared + own if index % 3 == 0 else own, params | kinds[index % len(kinds)]])
    return made


@pytest.fixture(scope="module")
def disaggregated(fork_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``disaggregated(prefill, decode, case)``: the results of every rank."""

    def run(prefill: int, decode: int, case: dict[str, Any]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("disaggregated")
        (folder / "case.json").write_text(json.dumps(case))
        done = fork_ranks(prefill + decode, "disaggregation_worker.py", prefill, folder / "case.json", folder)
        assert done.returncode == 0, done.stderr
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(prefill + decode)]

    return run


def single(case: dict[str, Any]) -> list[Any]:
    """The outputs of one process, with room for all."""
    options = {name: value for name, value in case["options"].items() if name not in EACH_ITS_OWN["options"]}
    return passes(options, case | {"repeated": 1})[0]


def passes(options: dict[str, Any], case: dict[str, Any]) -> list[Any]:
    """The outputs of one process each time that it runs the requests."""
    run = runpy.run_path(str(Path(__file__).parents[1] / "programs" / "disaggregation_worker.py"))["run"]
    with LLM(device="cpu", **options | {"cache_memory": "16MiB"}) as llm:
        return run(llm, case | {"cancelled": 0})["outputs"]


def assert_same(outputs: list[Any], expected: list[Any]) -> None:
    for one, wanted in zip(outputs, expected, strict=True):
        for out, want in zip(one, wanted, strict=True):
            assert out[:4] == want[:4]
            for logprobs, others in zip(out[4:], want[4:], strict=True):
                for of, other in zip(logprobs or [], others or [], strict=True):
                    assert (of or {}) == pytest.approx(other or {}, abs=2e-3)


def check(prefill: int, results: list[dict[str, Any]], expected: list[Any]) -> None:
    for outputs in results[0]["outputs"]:
        assert_same(outputs, expected)
    assert all(result["lost"] == 0 and result["running"] == 0 for result in results)
    sent, received = (sum(result[name] for result in results) for name in ("sent", "received"))
    assert sent == received > 0 and sent % results[0]["page_bytes"] == 0


def test_one_rank_each(disaggregated: Callable[..., Any]) -> None:
    """A cache so small that requests wait for room, lose their pages and come back, while others are cancelled."""
    case = {"options": SMALL, "generate": requests(24), "cancelled": 12}
    results = disaggregated(1, 1, case)
    check(1, results, single(case))
    assert results[1]["preemptions"] > 0 and results[1]["prefilled"] == 0


# With two, both parts have a leader and another rank.
@pytest.mark.parametrize("prefill", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_two_engines_in_a_row(disaggregated: Callable[..., Any], prefill: int) -> None:
    """The leaders of a part are in more process groups than its other ranks when the second engine makes its own."""
    case = {"options": SMALL | {"max_num_batched_tokens": 16}, "generate": requests(4), "engines": 2}
    check(prefill, disaggregated(prefill, 2, case), single(case))


@pytest.mark.parametrize(
    "prefill, decode, own",
    [(2, 2, EACH_ITS_OWN), *(pytest.param(*ranks, {}, marks=pytest.mark.slow) for ranks in ((2, 2), (2, 1), (1, 2)))],
    ids=["2-2, each its own", "2-2", "2-1", "1-2"],
)
def test_several_ranks(
    disaggregated: Callable[..., Any], tmp_path: Path, prefill: int, decode: int, own: dict[str, Any]
) -> None:
    options = SMALL | {"max_num_batched_tokens": 16} | own.get("options", {})
    if own:
        options["cache_folder"] = str(tmp_path / "pages")
    case = own | {"options": options, "generate": requests(16), "cancelled": 4}
    results = disaggregated(prefill, decode, case)
    check(prefill, results, single(case))
    assert all(result["sent"] > 0 for result in results[:prefill])
    assert all(result["received"] > 0 for result in results[prefill:])
    if own:
        assert all(result["moved"] for result in results)
        assert all(result["to_host"] and result["to_disk"] for result in results[:prefill])
        assert not any(result["to_host"] or result["to_disk"] for result in results[prefill:])
        assert [result["pages"] for result in results] == [27, 27, 32, 32]
        assert [result["tp_size"] for result in results] == [1, 1, 2, 2]


def test_tokens_come_during_a_step(disaggregated: Callable[..., Any]) -> None:
    """A long step of the prefill side delays no token of requests that decode."""
    greedy = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    case = {"options": MODEL, "generate": [[[5, 6], greedy], [[7] * 30, greedy]], "held": True}
    results = disaggregated(1, 1, case)
    assert results[0]["outputs"] == [one[0][0] for one in single(case)]
    assert results[0]["lost"] == results[1]["lost"] == 0


def test_bytes_are_those_of_the_pages(disaggregated: Callable[..., Any]) -> None:
    """Every page of a prompt is sent once, and none that the decode side has from before."""
    generate = [[[5 + number] * length, {"max_tokens": 4}] for number, length in enumerate((1, 8, 9, 70))]
    results = disaggregated(1, 1, {"options": MODEL | {"cache_memory": "4MiB"}, "generate": generate, "repeated": 2})
    first, again = 1 + 1 + 2 + 9, 1 + 1 + 1 + 1
    assert results[0]["sent"] == (first + again) * results[0]["page_bytes"] == results[1]["received"]
    assert results[0]["hits"] == results[1]["hits"] == 8 * (first - again)
    assert [one["generated"] for one in results] == [32, 24], "the prefill side counts all tokens of the run"


@pytest.mark.parametrize("disk", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tiers(disaggregated: Callable[..., Any], tmp_path: Path, disk: bool) -> None:
    """Conversations of two turns, whose prompts are more than the device of the prefill side holds. It finds the first
    ones again in host memory, and pages that another process has written on the disk. The decode side has no tiers; it
    finds what it has received and computed, so only the rest is sent."""
    lengths, words = (61, 45, 70, 33, 90), 12
    params = {"temperature": 0.0, "max_tokens": words, "ignore_eos": True}
    generate = [[[5 + number, *range(9, 8 + length)], params] for number, length in enumerate(lengths)]
    options = MODEL | ({"cache_folder": str(tmp_path / "pages")} if disk else {})
    case: dict[str, Any] = {"generate": generate, "repeated": 2, "continued": True}
    expected = passes(options, case)
    own = {"cache_memory": "256KiB", "host_cache_memory": "4MiB", "decode_options": {"cache_memory": "4MiB"}}
    prefill, decode = disaggregated(1, 1, case | {"options": options | own})
    for outputs, alone in zip(prefill["outputs"], expected, strict=True):
        assert_same(outputs, alone)
    first = [length // 8 for length in lengths]  # full pages
    again = [(length + words - 1) // 8 for length in lengths]  # the rows of a last token are not computed
    assert sum(first) > prefill["pages"]
    cached = [first, again] if disk else [[0] * len(lengths), first]
    assert prefill["cached"] == [[8 * pages for pages in turn] for turn in cached]
    assert prefill["from_host"] > 0 and prefill["from_disk"] == (sum(again) if disk else 0), "each is read once"
    assert decode["hits"] == 8 * sum(again)
    sent = sum(pages_for(length, 8) + pages_for(length + words + 1, 8) for length in lengths) - sum(again)
    assert prefill["sent"] == decode["received"] == sent * prefill["page_bytes"]
    assert decode["to_host"] == decode["from_host"] == decode["from_disk"] == prefill["lost"] == decode["lost"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("prefill, decode", [(1, 1), (2, 2)])
def test_drafts(disaggregated: Callable[..., Any], prefill: int, decode: int) -> None:
    options = SMALL | {"max_num_batched_tokens": 16, "speculative_config": {"num_speculative_tokens": 2}}
    case = {"options": options, "generate": requests(16), "cancelled": 4}
    check(prefill, disaggregated(prefill, decode, case), single(case))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_fp8(disaggregated: Callable[..., Any], base_config: dict[str, Any], tmp_path: Path, drafts: int) -> None:
    """FP8 weights and caches, with and without drafts."""
    write_random_checkpoint(tmp_path / "plain", base_config | {"model_type": "glm_moe_dsa"} | ONE_MODULE, fp8=False)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "fp8")
    options: dict[str, Any] = MODEL | {"model": str(tmp_path / "fp8"), "cache_memory": "4MiB", "kv_cache_dtype": "fp8"}
    if drafts:
        options["speculative_config"] = {"num_speculative_tokens": drafts}
    rng = random.Random(1)
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    generate = [[[rng.randrange(4, 200) for _ in range(length)], greedy] for length in (3, 16, 45, 29)]
    case = {"options": options | {"quantization": "fp8"}, "generate": generate}
    check(1, disaggregated(1, 1, case), single(case))


@pytest.mark.slow
def test_soak(disaggregated: Callable[..., Any]) -> None:
    kinds = [one for one in requests(24) if not {"n", "prompt_logprobs", "stop"} & one[1].keys()]
    case = {"options": SMALL | {"max_num_batched_tokens": 16}, "generate": kinds, "soak": 300}
    results, expected = disaggregated(2, 2, case), single(case)
    assert len(results[0]["streams"]) == 300
    ended = 0
    for kind, tokens, reason in results[0]["streams"]:
        wanted = expected[kind][0]
        ended += reason is not None
        assert tokens == wanted[0][: len(tokens)] and (reason is None or (tokens, reason) == (wanted[0], wanted[2]))
    assert 150 < ended < 300
    assert all(result["lost"] == 0 for result in results)
    assert results[2]["preemptions"] > 0
    begun, end = results[0]["memory"]
    print("memory", begun, end, "preemptions", results[2]["preemptions"])
    assert end - begun < 48 << 20


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 2])
def test_a_rank_that_is_killed_ends_the_run(torchrun: Callable[..., Any], tmp_path: Path, killed: int) -> None:
    """A rank of either side, while pages are on their way."""
    case = {"options": SMALL, "generate": requests(24), "killed": killed, "steps": 12, "timeout": 20, "repeated": 9}
    (tmp_path / "case.json").write_text(json.dumps(case))
    done = torchrun(4, "disaggregation_worker.py", 2, tmp_path / "case.json", tmp_path)
    assert done.returncode != 0 and not (tmp_path / "rank0.json").exists()
    assert f"rank      : {killed} (local_rank: {killed})" in done.stderr.split("Root Cause")[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("prefill", "decode", "dcp", "decode_dcp"),
    [(2, 2, 2, 2), (2, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 1), (1, 2, 1, 2), (3, 1, 3, 1), (1, 3, 1, 3)],
)
def test_parts_that_hold_contexts_together(
    disaggregated: Callable[..., Any], tmp_path: Path, prefill: int, decode: int, dcp: int, decode_dcp: int, seed: int
) -> None:
    rng = random.Random(seed)
    memory, its_memory = (rng.choice(["384KiB", "768KiB"]) for _ in range(2))
    tokens = rng.choice([16, 64])
    own = {"dcp_size": decode_dcp, "tp_size": rng.choice([1, decode]), "cache_memory": its_memory}
    options: dict[str, Any] = {"cache_memory": memory, "max_num_batched_tokens": tokens, "decode_options": own}
    options["enable_dbo"] = rng.random() < 0.5
    if rng.random() < 0.5:
        options["speculative_config"] = {"num_speculative_tokens": rng.choice([1, 2])}
    if rng.random() < 0.6:
        options["host_cache_memory"] = rng.choice(["128KiB", "1MiB"])
    if rng.random() < 0.5:
        options["cache_folder"] = str(tmp_path / "pages")
    parallel = {"cp_size": prefill, "dcp_size": dcp}
    if decode > 1 and prefill > 1 and rng.random() < 0.5:
        parallel |= {"rebalance_every": 3, "redundant_experts": rng.choice([0, 2])}
    case = {"options": MODEL | options, "parallel": parallel, "generate": requests(16), "cancelled": 5, "repeated": 2}
    results = disaggregated(prefill, decode, case)
    print(case["options"], parallel, *results, sep="\n")
    check(prefill, results, single(case | {"options": MODEL}))
