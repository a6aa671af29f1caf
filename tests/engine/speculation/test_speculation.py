"""Speculative decoding: drafts equal those of the paper's equations, parameters of requests hold, bad input.

tests/distributed/engine/test_speculation.py shows that tokens are the same, whatever is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.samples import Samples
from dsa_engine.engine.requests.scheduler import Step
from dsa_engine.reference import dsa
from oracles import SMALL

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=22, ignore_eos=True, seed=3)
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 16},
    "glm_moe_dsa": {"index_topk": 16},
    "deepseek_v3": {},
}
GLM = ("full", "shared")  # its layers
SHARES = {"index_share_for_mtp_iteration": True}
OWN_TABLES = (("deepseek_v3", 1), ("glm_moe_dsa", 3))  # its modules have other embeddings and heads than the model
OPTIONS = SMALL | {"max_model_len": 128, "cache_memory": "4MiB"}


def engine_of(folder: Path, drafts: int, **options: Any) -> LLM:
    return LLM(
        folder, **OPTIONS | {"speculative_config": {"num_speculative_tokens": drafts} if drafts else {}} | options
    )


@pytest.mark.parametrize(
    "model_type, modules, own_tables, prompt_tokens, more",
    [
        *((name, modules, (name, modules) in OWN_TABLES, 74, {}) for name in MODELS for modules in (1, 3)),
        ("glm_moe_dsa", 1, False, 74, SHARES),
        ("glm_moe_dsa", 1, False, 9, SHARES),  # sees less than it could select
    ],
)
def test_drafts_are_those_of_the_equations(
    model_type: str,
    modules: int,
    own_tables: bool,
    prompt_tokens: int,
    more: dict[str, Any],
    drafting_oracle: Callable[..., Any],
    assert_same_logits: Callable[..., None],
    random_ids: Callable[..., list[int]],
) -> None:
    """Logits of every draft of a chain of 4, or of 3 modules, after prefill and after decode, against float64; and the
    drafts of ``reference/dsa.py``."""
    count = 4 if modules == 1 else modules
    keys = MODELS[model_type] | ({"indexer_types": [*GLM, *["full"] * modules]} if model_type == "glm_moe_dsa" else {})
    oracle = drafting_oracle(model_type, modules=modules, own_tables=own_tables, **keys, **more)
    llm = engine_of(oracle.folder, count, max_num_batched_tokens=24, enforce_eager=True)
    engine, prompt = llm.engine, random_ids(prompt_tokens)
    for module in engine.model.mtp:  # copies take no memory
        assert (module.embed is not None) == (module.head is not None) == own_tables
    rows: list[torch.Tensor] = []
    original = engine.model.logits

    def recording(hidden: torch.Tensor, padded_rows: int, head: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(original(hidden, padded_rows, head))
        return rows[-1]

    engine.model.logits = recording  # type: ignore[method-assign]
    request = engine.add(prompt, replace(GREEDY, max_tokens=12))
    while not request.output:
        engine.step()
    chains = []
    for _ in range(4):
        assert len(rows) == 1 + count and len(request.drafts) == count  # the model's rows, then a draft each
        chains.append((torch.cat(rows[1:]), oracle.drafts([*prompt, *request.output], count)))
        assert request.drafts == chains[-1][1].argmax(dim=-1).tolist()
        rows.clear()
        engine.step()
    ours, theirs = (torch.cat(part) for part in zip(*chains, strict=True))
    assert_same_logits(ours, theirs.float(), what="of drafts")
    if modules == 1:
        page, one = dsa.load(oracle.folder, torch.float32, pages=64, page_size=4), dsa.Request(0, prompt, 100)
        page.scheduler.num_drafts = count
        page.scheduler.requests.append(one)
        for _, expected in chains:
            page.step()
            assert one.drafts == expected.argmax(dim=-1).tolist()


def write_predictable(folder: Path, source: Path) -> None:
    """A model whose layers add nothing: the token after t is t + 1. Its modules add nothing either: they
    draft t + 1 after the token t."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight") and "layernorm" not in name:
            tensor.fill_(1.0)
    hidden = tensors["model.embed_tokens.weight"].shape[1]
    for name in [name for name in tensors if name.endswith("head.weight")]:
        tensors[name] = tensors["model.embed_tokens.weight"].roll(1, dims=0).contiguous()
    for name in [name for name in tensors if name.endswith("eh_proj.weight")]:
        tensors[name] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())


@pytest.fixture(scope="module")
def predictable(drafting_oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictable") / "model"
    write_predictable(folder, drafting_oracle("deepseek_v32", modules=3, index_topk=16).folder)
    return folder


@pytest.mark.parametrize("drafts, vanilla", [(1, False), (3, False), (7, False), (2, None), (3, True)])
def test_a_module_that_knows_is_always_right(drafts: int, vanilla: bool | None, predictable: Path) -> None:
    config = {"num_speculative_tokens": drafts, "use_mtp_vanilla": vanilla}
    llm = engine_of(predictable, 0, speculative_config=config)
    assert len(llm.engine.model.mtp) == (1 if vanilla is False else drafts)
    rows: list[int] = []
    original = llm.engine.scheduler.launched

    def launched(step: Step, samples: Samples | None = None, rows_by_form: Any = None) -> None:
        rows.append(sum(chunk.num_logits for chunk in step.chunks))
        original(step, samples, rows_by_form)

    llm.engine.scheduler.launched = launched  # type: ignore[method-assign]
    length = 1 + 4 * (drafts + 1)
    output = llm.generate([[30, 31, 32] * 9], replace(GREEDY, max_tokens=length))[0]
    assert output.token_ids == list(range(33, 33 + length))
    assert rows == [1] + [drafts + 1] * 4
    counts = output.metrics.speculation
    assert counts is not None and counts.acceptance_rates == [1.0] * drafts


@pytest.mark.parametrize("drafts, vanilla", [(5, False), (3, True)])
def test_what_a_request_asks_for_holds_within_a_step(drafts: int, vanilla: bool, predictable: Path) -> None:
    """Stop tokens and lengths within accepted drafts, min_tokens, log-probabilities."""
    params = [
        replace(GREEDY, stop_token_ids=[43]),
        replace(SAMPLED, max_tokens=6, logprobs=3),
        replace(GREEDY, min_tokens=9, stop_token_ids=[35, 36, 43]),
        replace(GREEDY, max_tokens=50, ignore_eos=False),  # token 1 ends it
        replace(GREEDY, max_tokens=1),
    ]
    prompts = [[30, 31, 32] * 9] * 3 + [[180] * 20, [30]]
    config = {"num_speculative_tokens": drafts, "use_mtp_vanilla": vanilla}
    expected, actual = (
        engine_of(predictable, 0, **options).generate(prompts, params)
        for options in ({}, {"speculative_config": config})
    )
    assert [o.finish_reason for o in expected] == ["stop", "length", "stop", "stop", "length"]
    lengths = [len(o.token_ids) for o in expected]
    assert lengths == [11, 6, lengths[2], lengths[3], 1] and lengths[2] > 9 and lengths[3] < 50
    for one, other in zip(actual, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert (one.logprobs is None) == (other.logprobs is None)
        for ours, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    "given, error, complaint",
    [
        ({"method": "medusa"}, ValueError, "method .* mtp, .* not 'medusa'"),
        ({"model": "draft"}, TypeError, "'model'; .* own MTP module"),
        ({"num_speculative_tokens": 0}, ValueError, "num_speculative_tokens .* 1 to 7, not 0"),
        ({"num_speculative_tokens": 8}, ValueError, "num_speculative_tokens .* 1 to 7, not 8"),
        ({"num_speculative_token": 2}, TypeError, "did you mean 'num_speculative_tokens'"),
        ({"use_mtp_vanilla": "yes"}, ValueError, "use_mtp_vanilla .* not 'yes'"),
        ([1], ValueError, r"speculative_config .* not \[1\]"),
    ],
)
def test_what_is_no_configuration(given: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        LLM("no such folder", speculative_config=given)


def test_a_checkpoint_without_the_module(drafting_oracle: Callable[..., Any], tmp_path: Path) -> None:
    folder = drafting_oracle("deepseek_v32", index_topk=16).folder
    with pytest.raises(ValueError, match="the model has no MTP module to draft with"):
        engine_of(folder, 1, hf_overrides={"num_nextn_predict_layers": 0})
    few = {"hf_overrides": {"num_nextn_predict_layers": 2}}
    with pytest.raises(ValueError, match="3 drafts take 3 MTP modules, the model has 2.*use_mtp_vanilla=False"):
        engine_of(folder, 3, **few)
    with pytest.raises(ValueError, match="layer 3 of .* is no MTP module"):
        engine_of(folder, 2, **few)
    with pytest.raises(ValueError, match="max_num_batched_tokens 1 is too small: 2 MTP modules"):
        engine_of(folder, 2, max_num_batched_tokens=1, **few)
    with pytest.raises(ValueError, match="layer 1 of .* is no MTP module"):
        engine_of(folder, 1, hf_overrides={"num_hidden_layers": 1})
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if ".layers.2." not in k}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="layer 2 of .* is no MTP module"):
        engine_of(tmp_path, 1)
