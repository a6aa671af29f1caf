"""Conversations about shared documents through caches that are far too small, on 1 and 2 ranks, with answers that are
left early: every token is right, and no page is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.demo.random_checkpoint import write_random_checkpoint

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 256,
    "page_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "progress": False,
}
PAGE = 4 * 2 * (32 + 8 + 24) * 4  # bytes: tokens, layers, numbers of a token in the caches, float32
LARGE, SMALL = {"cache_memory": 64 * 64 * PAGE}, {"cache_memory": 90 * PAGE, "host_cache_memory": 60 * PAGE}


@pytest.fixture(scope="module")
def folder(base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "torch_dtype": "float32", "vocab_size": 204}
    keys = {"index_topk": 16, "index_head_dim": 24, "index_n_heads": 4, "routed_scaling_factor": 2.5}
    made = tmp_path_factory.mktemp("model")
    write_random_checkpoint(made, base_config | {"model_type": "deepseek_v32"} | sizes | keys, fp8=False)
    return made


def conversations(folder: Path, count: int, turns: int) -> list[list[dict[str, Any]]]:
    """Conversations of so many turns about ten documents, with the tokens of an engine without a prefix cache."""
    rng = random.Random(1)

    def words(longest: int) -> list[int]:
        return [rng.randrange(4, 200) for _ in range(rng.randint(1, longest))]

    documents = [words(120) for _ in range(10)]
    prompts = [[*rng.choice(documents), *words(12)] for _ in range(count)]
    made: list[list[dict[str, Any]]] = [[] for _ in prompts]
    with LLM(folder, enable_prefix_caching=False, **OPTIONS | LARGE) as llm:
        for _ in range(turns):
            params = [
                {"temperature": rng.choice([0.0, 0.0, 1.0]), "seed": n, "max_tokens": rng.randint(1, 9)}
                for n in range(count)
            ]
            outputs = llm.generate(prompts, [SamplingParams(**keys) for keys in params], use_tqdm=False)
            for number, (one, keys, output) in enumerate(zip(made, params, outputs, strict=True)):
                one.append({"prompt": prompts[number], "params": keys, "tokens": output.token_ids})
                prompts[number] = [*prompts[number], *output.token_ids, *words(4)]
    return made


@pytest.mark.parametrize(
    ("count", "turns", "world", "disk"),
    [
        (16, 3, 1, False),
        (16, 3, 2, True),
        *(pytest.param(500, 6, world, disk, marks=pytest.mark.slow) for world in (1, 2) for disk in (False, True)),
    ],
)
def test_soak(
    count: int, turns: int, world: int, disk: bool, folder: Path, fork_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    options = (
        OPTIONS | SMALL | ({"cache_folder": str(tmp_path / "pages"), "cache_folder_size": 400 * PAGE} if disk else {})
    )
    work = {"folder": str(folder), "options": options, "conversations": conversations(folder, count, turns)}
    (tmp_path / "work.json").write_text(json.dumps(work))
    done = fork_ranks(world, "cache_soak.py", tmp_path / "work.json", tmp_path / "results", timeout=1500)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"results.{rank}").read_text()) for rank in range(world)]
    print(json.dumps(ranks, indent=1))
    first = ranks[0]
    assert first["requests"] == count * turns + first["left"] and first["left"] > 0
    assert first["wrong"] == 0
    assert first["hits"] > first["queries"] // 4 and first["from_host"] > 0
    assert (first["fetched"] > 0) == (world > 1)
    for one in ranks:
        assert one["free"] == [one["pages"]] * world, "a page is lost"
        assert all(held <= one["slots"] for held in one["in_host"])
        assert one["in_host"] == first["in_host"] and one["hits"] == first["hits"]
    if count * turns > 1000:
        assert first["memory"][1] < 1.1 * first["memory"][0] + (8 << 20), "memory grows"
