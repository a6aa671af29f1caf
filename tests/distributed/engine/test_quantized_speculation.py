"""Tokens with drafts equal those without drafts for every stored format, on 1 and 2 ranks: FP8 and INT8 weights, FP8
caches. A value that rounds to another code may change a token, if the model finds two equally likely."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.weights.convert import quantize_checkpoint
from quantized_sizes import INDEXER, SIZES

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": SIZES | INDEXER | {"num_nextn_predict_layers": 3},  # a module for each draft
    "glm_moe_dsa": SIZES | INDEXER | {"num_nextn_predict_layers": 1, "indexer_types": ["full", "shared"]},
    "deepseek_v3": SIZES | {"num_nextn_predict_layers": 1},
}
# The argument of quantize_checkpoint, or None for the plain model; and the options of the engine.
FORMATS: dict[str, tuple[str | None, dict[str, str]]] = {
    "int8": ("int8", {}),
    "fp8 caches": (None, {"kv_cache_dtype": "fp8"}),
    "fp8, fp8 caches": ("fp8", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
}
OPTIONS = {"device": "cpu", "max_model_len": 128, "page_size": 4, "cache_memory": "4MiB", "progress": False}
LENGTHS = (3, 16, 45, 29)  # prompts: shorter than index_topk, around it, beyond it
DRAFTS, COUNT = 3, 16
PARALLEL: dict[int, dict[str, Any]] = {1: {}, 2: {"cp_size": 2}}

ALL = list(product(MODELS, FORMATS))
ONE_EACH = [("deepseek_v32", "fp8, fp8 caches"), ("glm_moe_dsa", "int8"), ("deepseek_v3", "fp8 caches")]

# Rounding in float32 depends on the number of rows in a product, and sometimes moves a value to the next code;
# tests/weights/formats/test_preemption.py says how far that was seen to move logits.
NEAR_TIE = 0.05  # nats


@pytest.fixture(scope="module")
def stored(base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    """The folder of a model, as ``quantize_checkpoint`` stores it; written once."""
    made: dict[tuple[str, str | None], Path] = {}

    def get(model: str, quantize: str | None) -> Path:
        if (model, None) not in made:
            made[model, None] = tmp_path_factory.mktemp("plain") / model
            config = base_config | {"model_type": model} | MODELS[model]
            write_random_checkpoint(made[model, None], config, fp8=False)
        if quantize is not None and (model, quantize) not in made:
            made[model, quantize] = tmp_path_factory.mktemp("stored") / model
            quantize_checkpoint(made[model, None], made[model, quantize], quantize)
        return made[model, quantize]

    return get


@pytest.mark.parametrize(
    "world, chosen",
    [
        pytest.param(1, ONE_EACH, id="1, one each"),
        pytest.param(1, [pair for pair in ALL if pair not in ONE_EACH], id="1", marks=pytest.mark.slow),
        pytest.param(2, ALL, id="2", marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens(
    world: int,
    chosen: list[tuple[str, str]],
    stored: Callable[[str, str | None], Path],
    random_ids: Callable[..., list[int]],
    fork_ranks: Callable[..., Any],
    worker: SimpleNamespace,
    tmp_path: Path,
) -> None:
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True, "logprobs": 2}
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    cases = []
    for model, name in chosen:
        quantize, options = FORMATS[name]
        plain: dict[str, Any] = {
            "name": f"{model}, {name}",
            "folder": str(stored(model, quantize)),
            "options": OPTIONS | options,
            "parallel": PARALLEL[world],
            "generate": [{"prompts": prompts, "params": [params] * len(prompts)}],
        }
        script = worker.run_case(plain | {"parallel": {}})["tokens"][0]
        drafted = OPTIONS | options | {"speculative_config": {"num_speculative_tokens": DRAFTS}}
        cases += [plain, plain | {"name": f"{model}, {name}, drafts", "options": drafted, "script": script}]
    if world == 1:
        results = {case["name"]: worker.run_case(case) for case in cases}
    else:
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        done = fork_ranks(world, "worker.py", tmp_path / "cases.json", tmp_path)
        assert done.returncode == 0, done.stderr
        results = torch.load(tmp_path / "rank0.pt")
    for plain, drafted in zip(cases[::2], cases[1::2], strict=True):
        without, result = results[plain["name"]], results[drafted["name"]]
        accepted = {number for number, _ in result["drafts"].values()}
        assert accepted >= {0, 1, DRAFTS}, plain["name"]
        assert all(len(set(tokens)) > 3 for tokens in without["tokens"][0]), "tokens that hardly change prove nothing"
        changed = [i for i in range(len(prompts)) if result["tokens"][0][i] != without["tokens"][0][i]]
        assert len(changed) <= 1, plain["name"]
        for i in changed:
            gap = gap_at_first_change(without["tokens"][0][i], result["tokens"][0][i], without["logprobs"][0][i])
            print(f"{plain['name']}: a token was replaced by one {gap:.1e} nats less likely")
            assert gap < NEAR_TIE


def gap_at_first_change(one: list[int], other: list[int], logprobs: list[dict[int, float]]) -> float:
    """Distance in nats of the two best tokens of ``one``, at the position where ``other`` first has the second."""
    at = next(i for i, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs)
    return logprobs[at][one[at]] - logprobs[at][other[at]]
