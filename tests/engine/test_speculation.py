"""Speculative decoding: drafts are the module's, and tokens are those without it, whatever is accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.request import Request

VOCAB = 200
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=22, ignore_eos=True, seed=3)
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 16},
    "glm_moe_dsa": {"index_topk": 16, "indexer_types": ["full", "shared", "full"]},
    "deepseek_v3": {},
}
LENGTHS = (1, 3, 15, 16, 17, 40, 75)  # of prompts: shorter than index_topk, at it, beyond it
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "page_size": 4,
    "cache_memory": "4MiB",
    "progress": False,
}


def engine_of(folder: Path, drafts: int, **options: Any) -> LLM:
    return LLM(
        folder, **OPTIONS | {"speculative_config": {"num_speculative_tokens": drafts} if drafts else {}} | options
    )


@dataclass
class Script:
    """Keeps the drafts that an engine makes, and puts others in their place, of which as many are right as the request
    and its length say: none, some, all. ``known`` are the outputs, by prompt and seed."""

    known: dict[Any, list[int]]
    drafts: int
    made: dict[Any, list[int]] = field(default_factory=dict)  # by request and length
    accepted: set[int] = field(default_factory=set)

    def follow(self, llm: LLM) -> None:
        scheduler = llm.engine.scheduler
        original = scheduler.verified

        def verified(request: Request, drafts: list[int]) -> None:
            self.made[(key_of(request), len(request))] = drafts
            self.accepted.add(len(request) - 1 - request.num_computed_tokens + len(request.drafts))
            original(request, self.guess(request))

        scheduler.verified = verified  # type: ignore[method-assign]

    def guess(self, request: Request) -> list[int]:
        done = request.num_output_tokens
        right = self.known[key_of(request)][done : done + self.drafts]
        kept = (done * 5 + len(request.prompt)) % (self.drafts + 2)
        return [token if i < kept else (token + 1) % VOCAB for i, token in enumerate(right)]


def key_of(request: Request) -> Any:
    return tuple(request.prompt), request.params.seed


@pytest.fixture(scope="module")
def cases(random_ids: Callable[..., list[int]]) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    params = [replace(GREEDY, seed=0) if i % 2 else replace(SAMPLED, seed=i) for i in range(len(prompts))]
    # Rows that see drafts: what depends on the tokens before counts them.
    params[0] = replace(params[0], repetition_penalty=1.3, frequency_penalty=0.5)
    params[1] = replace(params[1], presence_penalty=0.7, logit_bias={9: 1.0})
    return prompts, params


@pytest.fixture(scope="module")
def wanted(drafting_oracle: Callable[..., Any], cases: Any) -> Callable[[str], Any]:
    """Of a model: its folder; the outputs without drafts, by prompt and seed; 7 drafts at every length."""
    found: dict[str, Any] = {}

    def get(model_type: str) -> Any:
        if model_type not in found:
            folder = drafting_oracle(model_type, **MODELS[model_type]).folder
            outputs = [o.token_ids for o in engine_of(folder, 0).generate(*cases)]
            keys = [(tuple(prompt), one.seed) for prompt, one in zip(*cases, strict=True)]
            llm, script = engine_of(folder, 7), Script({key: [] for key in keys}, 0)
            script.follow(llm)
            assert [o.token_ids for o in llm.generate(*cases)] == outputs
            found[model_type] = folder, dict(zip(keys, outputs, strict=True)), script.made
        return found[model_type]

    return get


COMBINATIONS = [
    pytest.param(model_type, drafts, options, id=f"{model_type}-{drafts}-{name}")
    for (name, options), (model_type, drafts) in itertools.product(
        {
            "whole": {},
            "chunked": {"max_num_batched_tokens": 7, "max_prefill_share": 1.0},
            # 25 pages hold the longest request alone: others are preempted in the middle of their drafts.
            "preempted": {"max_num_batched_tokens": 16, "cache_memory": 25},
        }.items(),
        [("deepseek_v32", 1), ("deepseek_v32", 2), ("deepseek_v32", 7), ("glm_moe_dsa", 3), ("deepseek_v3", 3)],
    )
]


@pytest.mark.parametrize("model_type, drafts, options", COMBINATIONS)
def test_the_same_tokens(model_type: str, drafts: int, options: dict[str, Any], wanted: Any, cases: Any) -> None:
    """Whatever is accepted; and the module drafts the same, whatever way a request has come to its tokens."""
    folder, outputs, made = wanted(model_type)
    pages = options.get("cache_memory")
    if pages is not None:
        cache = engine_of(folder, drafts).engine.cache
        pools = [*cache.latent, *(keys for keys in cache.index_keys if keys is not None)]
        options = options | {"cache_memory": pages * sum(pool[0].nbytes for pool in pools)}
    llm, script = engine_of(folder, drafts, **options), Script(outputs, drafts)
    script.follow(llm)
    assert [o.token_ids for o in llm.generate(*cases)] == list(outputs.values())
    assert script.accepted >= {0, drafts} and len(script.accepted) > drafts // 2
    assert len(script.made) >= 20
    for key, drafted in script.made.items():
        assert drafted[:drafts] == made[key][:drafts]
    scheduler = llm.engine.scheduler
    assert (scheduler.preemptions > 0) == (pages is not None)
    assert not scheduler.has_work and scheduler.free_pages == [llm.engine.cache.pages]


@pytest.mark.parametrize("model_type", MODELS)
def test_drafts_are_those_of_the_equations(
    model_type: str, drafting_oracle: Callable[..., Any], assert_same_logits: Callable[..., None], cases: Any
) -> None:
    """Logits of every draft of a chain of 4, behind a prompt and behind verified rows, against float64."""
    oracle = drafting_oracle(model_type, **MODELS[model_type])
    llm = engine_of(oracle.folder, 4, max_num_batched_tokens=32)
    engine, prompt = llm.engine, cases[0][-1]
    rows: list[torch.Tensor] = []
    original = engine.model.own_logits

    def kept(hidden: torch.Tensor, most: int) -> torch.Tensor:
        rows.append(original(hidden, most))
        return rows[-1]

    engine.model.own_logits = kept  # type: ignore[method-assign]
    request = engine.add(prompt, replace(GREEDY, max_tokens=12))
    while not request.output:
        engine.step()
    chains = []
    for _ in range(4):
        assert len(rows) == 5 and len(request.drafts) == 4  # the model's rows, then a draft each
        chains.append((torch.cat(rows[1:]), oracle.drafts([*prompt, *request.output], 4)))
        assert request.drafts == chains[-1][1].argmax(dim=-1).tolist()
        rows.clear()
        engine.step()
    ours, theirs = (torch.cat(part) for part in zip(*chains, strict=True))
    assert_same_logits(ours, theirs.float(), what="of drafts")


def write_predictable(folder: Path, source: Path) -> None:
    """A model whose layers add nothing: the token behind t is t + 1. Its module adds nothing either, and says the same
    of the token that it embeds."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight") and "layernorm" not in name:
            tensor.fill_(1.0)
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, dims=0).contiguous()
    layer = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    prefix = f"model.layers.{layer}."
    tensors[prefix + "eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())


def test_a_module_that_knows_is_always_right(drafting_oracle: Callable[..., Any], tmp_path: Path) -> None:
    write_predictable(tmp_path / "model", drafting_oracle("deepseek_v32", index_topk=16).folder)
    for drafts in (1, 3, 7):
        llm = engine_of(tmp_path / "model", drafts)
        steps: list[int] = []
        original = llm.engine.scheduler.computed

        def computed(chunks: Any, original: Any = original, steps: list[int] = steps) -> None:
            steps.append(sum(chunk.num_logits for chunk in chunks))
            original(chunks)

        llm.engine.scheduler.computed = computed  # type: ignore[method-assign]
        output = llm.generate([[30, 31, 32] * 9], replace(GREEDY, max_tokens=1 + 4 * (drafts + 1)))[0]
        assert output.token_ids == list(range(33, 33 + 1 + 4 * (drafts + 1)))
        assert steps == [1] + [drafts + 1] * 4


def test_what_a_request_asks_for_holds_within_a_step(wanted: Any, cases: Any) -> None:
    """Stop tokens and lengths inside a run of accepted drafts, tokens forbidden at first, log-probabilities."""
    folder, outputs, _ = wanted("deepseek_v32")
    prompts = cases[0][3:]
    plain = [outputs[key] for key in list(outputs)[3:]]
    stops = [i for i in range(VOCAB) if i % 3 == 0]
    params = [
        replace(GREEDY, seed=0, stop_token_ids=[plain[0][10]]),
        replace(SAMPLED, seed=4, max_tokens=6, logprobs=3),
        replace(GREEDY, seed=0, min_tokens=9, stop_token_ids=stops, logprobs=0),
        replace(SAMPLED, seed=6, min_tokens=5, stop_token_ids=stops),
    ]
    expected = engine_of(folder, 0).generate(prompts, params)
    assert [o.finish_reason for o in expected] == ["stop", "length", "stop", "stop"]
    keys = [(tuple(prompt), one.seed) for prompt, one in zip(prompts, params, strict=True)]
    llm = engine_of(folder, 5)
    script = Script({key: o.token_ids for key, o in zip(keys, expected, strict=True)}, 5)
    script.follow(llm)
    found = llm.generate(prompts, params)
    assert max(script.accepted) >= 2
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for ours, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    "given, error, complaint",
    [
        ({"method": "medusa"}, ValueError, "method must be one of mtp, not 'medusa'"),
        ({"num_speculative_tokens": 0}, ValueError, "num_speculative_tokens must be an integer from 1 to 7, not 0"),
        ({"num_speculative_tokens": 8}, ValueError, "num_speculative_tokens must be an integer from 1 to 7, not 8"),
        ({"num_speculative_token": 2}, TypeError, "did you mean 'num_speculative_tokens'"),
        ([1], TypeError, "speculative_config must be a dict"),
    ],
)
def test_what_is_no_configuration(given: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        LLM("no such folder", speculative_config=given)


def test_a_checkpoint_without_the_module(drafting_oracle: Callable[..., Any], tmp_path: Path) -> None:
    folder = drafting_oracle("deepseek_v32", index_topk=16).folder
    with pytest.raises(ValueError, match=r"takes 1 MTP module\(s\), the model has 0"):
        engine_of(folder, 1, hf_overrides={"num_nextn_predict_layers": 0})
    with pytest.raises(ValueError, match="with num_hidden_layers 1 of 2 the MTP module would draft for another model"):
        engine_of(folder, 1, hf_overrides={"num_hidden_layers": 1})
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".layers.2." not in k}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="does not hold layer 2"):
        engine_of(tmp_path, 1)
