"""The whole model against ``transformers``: the same checkpoint, the same logits, by every way through the engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.engine.sampling.chain import Parameters, seed_key
from oracles import CASES

# Cases whose schedule of indexers has to be worked out from other keys than transformers' own `indexer_types`.
DERIVED = ("glm-frequency", "glm-pattern")


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"cache_memory": "64MiB", "progress": False} | options)


@pytest.fixture(scope="session")
def case(oracle: Callable[..., Any], random_ids: Callable[..., list[int]], tmp_path_factory: Any) -> Callable[..., Any]:
    """``case(name)``: the oracle, the folder to load, and the tokens."""

    def get(name: str) -> tuple[Any, Path, list[int]]:
        model_type, overrides, length = CASES[name]
        made = oracle(model_type, **overrides)
        folder = made.folder
        if name in DERIVED:
            folder = tmp_path_factory.mktemp(name)
            rewrite_config(made.folder, folder, lambda config: config.pop("indexer_types"))
        return made, folder, random_ids(length)

    return get


def rewrite_config(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CASES)
def test_whole_prefill(name: str, case: Callable[..., Any], assert_same_logits: Callable[..., None]) -> None:
    oracle, folder, ids = case(name)
    ours = load(folder).prompt_logits(ids)
    assert_same_logits(ours, oracle.logits(ids), index_topk=oracle.index_topk, what=name)


@pytest.mark.parametrize(
    "name, chunk, options",
    [
        ("v32", 97, {}),  # divides neither the length nor a page, and crosses index_topk 64 within the first chunk
        ("v32", 41, {"page_size": 16, "workspace": "1MiB"}),  # crosses it within the second
        ("v32-yarn-long", 611, {"workspace": "1MiB", "page_size": 7}),
        ("v32-small-selection", 13, {}),
        ("v32-tied", 301, {"page_size": 1000}),
        ("glm", 64, {"page_size": 1}),
        ("glm-shared", 53, {}),
        ("glm-frequency", 200, {}),
        ("glm-pattern", 77, {"page_size": 48}),
        ("v3", 129, {"workspace": "64KiB"}),
        ("v3-one-group", 5, {}),
    ],
)
def test_chunked_prefill(
    name: str, chunk: int, options: dict[str, Any], case: Callable[..., Any], assert_same_logits: Callable[..., None]
) -> None:
    oracle, folder, ids = case(name)
    ours = load(folder, max_num_batched_tokens=chunk, **options).prompt_logits(ids)
    assert_same_logits(ours, oracle.logits(ids), index_topk=oracle.index_topk, what=f"{name}, chunks of {chunk}")


@pytest.mark.parametrize("workspace", ["64KiB", "1MiB"])
@pytest.mark.parametrize("name", ["v32", "v3"])
def test_whole_prefill_in_a_small_workspace(
    name: str, workspace: str, case: Callable[..., Any], assert_same_logits: Callable[..., None]
) -> None:
    oracle, folder, ids = case(name)
    ours = load(folder, workspace=workspace, page_size=17).prompt_logits(ids)
    assert_same_logits(ours, oracle.logits(ids), index_topk=oracle.index_topk, what=f"{name}, {workspace}")


def forced_decode(
    llm: LLM, requests: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Runs all requests ``(tokens, prompt length)`` together through the engine's own steps, with every "drawn" token
    replaced by the next known one. Returns for each the logits from the prompt's last position on."""
    seen: list[dict[int, torch.Tensor]] = [{} for _ in requests]
    seed_of = {seed_key(seed): seed for seed in range(len(requests))}

    def forced(logits: torch.Tensor, parameters: Parameters, at: torch.Tensor, *how: int) -> torch.Tensor:
        seeds, positions = [seed_of[key] for key in parameters.key.tolist()], at.tolist()
        for row, seed, position in zip(logits, seeds, positions, strict=True):
            seen[seed][position - 1] = row.clone()
        known = [requests[seed][0] for seed in seeds]
        return torch.tensor([ids[p] if p < len(ids) else 0 for ids, p in zip(known, positions, strict=True)])

    monkeypatch.setattr("dsa_engine.engine.sampling.chain.draw", forced)
    for number, (ids, length) in enumerate(requests):
        count = len(ids) - length + 1
        llm.engine.add(ids[:length], SamplingParams(max_tokens=count, ignore_eos=True, seed=number))
    while llm.engine.scheduler.has_work:
        llm.engine.step()
    rows = []
    for (ids, length), by_position in zip(requests, seen, strict=True):
        assert list(by_position) == list(range(length - 1, len(ids)))
        rows.append(torch.stack(list(by_position.values())))
    return rows


@pytest.mark.parametrize(
    "name, prompts, options",
    [
        ("v32", [1, 350, 577], {}),
        ("v32-small-selection", [700, 10, 650], {"page_size": 5, "max_num_batched_tokens": 100}),
        ("v32-tied", [480], {"workspace": "1MiB"}),
        ("glm", [50, 600, 450], {"max_num_batched_tokens": 111}),
        ("glm-shared", [400, 430], {}),
        ("glm-frequency", [20, 450], {}),
        ("v3", [500, 700, 3], {"page_size": 9}),
        ("v3-one-group", [470], {}),
    ],
)
def test_decode_token_by_token(
    name: str,
    prompts: list[int],
    options: dict[str, Any],
    case: Callable[..., Any],
    assert_same_logits: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ragged batch, decoded token by token, with the known next token in place of a sampled one."""
    oracle, folder, ids = case(name)
    llm = load(folder, **options)
    # Requests of different ends: the batch shrinks while it runs.
    requests = [(ids[: min(len(ids), length + 150 + 40 * i)], length) for i, length in enumerate(prompts)]
    requests[0] = (ids, prompts[0]) if prompts[0] < 2 else requests[0]
    rows = forced_decode(llm, requests, monkeypatch)
    theirs = oracle.logits(ids)
    topk = oracle.index_topk
    for (tokens, length), ours in zip(requests, rows, strict=True):
        known = theirs[length - 1 : len(tokens)]
        assert_same_logits(ours, known, index_topk=topk, first=length - 1, what=f"{name}, decode from {length}")
    assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]


def test_decode_at_3000_tokens(
    case: Callable[..., Any], assert_same_logits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, folder, ids = case("v32-yarn-long")
    (ours,) = forced_decode(load(folder), [(ids, 2880)], monkeypatch)
    assert_same_logits(ours, oracle.logits(ids)[2879:], index_topk=256, first=2879, what="v32-yarn-long, decode")


def test_prefill_only_returns_the_last_row(case: Callable[..., Any], assert_same_logits: Callable[..., None]) -> None:
    oracle, folder, ids = case("v32")
    last = prefill(load(folder, max_num_batched_tokens=300).engine, ids)
    # No share of rows can excuse a single one; this row has no near tie, as the whole prefill shows.
    assert_same_logits(last[None], oracle.logits(ids)[-1:], index_topk=64, first=len(ids) - 1, what="last row")


@pytest.mark.parametrize("name", ["v32", "glm-shared", "v3"])
def test_greedy_generate_on_a_ragged_batch(
    name: str, case: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    oracle, folder, _ = case(name)
    prompts = [random_ids(length, seed=5) for length in (300, 1, 61, 130)]
    count = 24
    llm = load(folder, max_num_batched_tokens=90, max_num_seqs=3)  # the fourth waits for a place
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, min_tokens=count))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == oracle.greedy(prompt, count)
        assert (output.prompt_token_ids, output.finish_reason, output.text) == (prompt, "length", "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["v32", "v3"])
def test_half_precision(name: str, dtype: str, case: Callable[..., Any]) -> None:
    """As near to the float32 logits as ``transformers`` in the same dtype. If tokens are selected, rounding changes the
    selection at many near ties in both, and chance decides which comes nearer."""
    oracle, folder, ids = case(name)
    exact = oracle.logits(ids)
    ours = load(folder, dtype=dtype, max_num_batched_tokens=222).prompt_logits(ids)
    assert ours.dtype == torch.float32 and bool(torch.isfinite(ours).all())

    from transformers import AutoModelForCausalLM

    half = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **half).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0].float()

    def distance(logits: torch.Tensor, rows: int) -> float:
        return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1))[:rows].median())

    sure = oracle.index_topk or len(ids)
    print(f"{name} {dtype}: ours {distance(ours, sure):.2e}, transformers {distance(theirs, sure):.2e}")
    assert distance(ours, sure) < 1.3 * distance(theirs, sure)
    assert distance(ours, sure) < (0.06 if dtype == "bfloat16" else 0.008)
    assert distance(ours, len(ids)) < 1.5 * distance(theirs, len(ids))


@pytest.mark.parametrize("name", ["v32-yarn-long", "v32", "v3"])
def test_old_rope_and_dtype_keys_mean_the_same(name: str, case: Callable[..., Any], tmp_path: Path) -> None:
    _, folder, ids = case(name)

    def age(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
        config["torch_dtype"] = config.pop("dtype")

    rewrite_config(folder, tmp_path, age)
    old = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" not in old and "dtype" not in old
    assert torch.equal(load(tmp_path).prompt_logits(ids[:400]), load(folder).prompt_logits(ids[:400]))


def test_unlike_rope_is_noticed(case: Callable[..., Any], tmp_path: Path) -> None:
    """The comparison can fail: a YaRN that is only slightly different is far over the bound."""
    oracle, folder, ids = case("v32-small-selection")

    def change(config: dict[str, Any]) -> None:
        config["rope_parameters"]["mscale"] = 1.0

    rewrite_config(folder, tmp_path, change)
    ours = load(tmp_path).prompt_logits(ids[:200])
    theirs = oracle.logits(ids)[:200]
    assert float((ours - theirs).abs().max() / theirs.abs().max()) > 1e-2


def test_shorter_model_by_override(case: Callable[..., Any], random_ids: Callable[..., list[int]]) -> None:
    """``hf_overrides`` cuts the model: logits equal those of the oracle with as many layers removed."""
    oracle, folder, _ = case("glm-shared")
    ids = random_ids(150)
    ours = load(folder, hf_overrides={"num_hidden_layers": 2}).prompt_logits(ids)
    layers = oracle.model.model.layers
    oracle.model.model.layers = layers[:2]
    try:
        with torch.no_grad():
            theirs = oracle.model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        oracle.model.model.layers = layers
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4
