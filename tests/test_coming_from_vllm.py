"""docs/COMING_FROM_VLLM.md says what is true: names that are the same are there, those that are not have an answer."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import dsa_engine
from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.config.vllm_options import _ANSWERS, advice
from dsa_engine.model.kv_cache import cache_dtype
from dsa_engine.options import EngineOptions
from dsa_engine.outputs import CompletionOutput, RequestOutput

PAGE = Path(__file__).resolve().parents[1] / "docs" / "COMING_FROM_VLLM.md"
OPTIONS = {f.name for f in fields(EngineOptions)}


def section(title: str) -> dict[str, str]:
    """The rows of the first table under a heading: first cell to second."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].lstrip()
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", text.partition("\n\n")[0], re.M)
    return dict(rows[1:])


def names(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]\w*)`", cell)


def test_what_is_the_same() -> None:
    same = section("The same names")
    listed = set(names(same["options of `LLM`"]))
    assert len(listed) > 15 and listed <= OPTIONS
    parameters = {f.name for f in fields(SamplingParams) if f.init}
    assert set(names(same["`SamplingParams`"])) == parameters - {"selection"}  # not vLLM's
    outputs = {*dir(RequestOutput), *(f.name for cls in (RequestOutput, CompletionOutput) for f in fields(cls))}
    assert len(names(same["outputs"])) > 10 and set(names(same["outputs"])) <= outputs
    for name in names(same["methods of `LLM`"]):
        assert callable(getattr(LLM, name))


def test_what_is_not_there_has_an_answer() -> None:
    listed = {name for title in ("Other names", "Not available") for cell in section(title) for name in names(cell)}
    there = {"prompt_logprobs", "speculative_config", "throughput"}  # a part of a command, the last
    assert len(listed) > 15
    assert [name for name in listed - there if not advice(name)] == []
    own = OPTIONS | {f.name for f in fields(ParallelConfig)} | {f.name for f in fields(SamplingParams)}
    assert not own & _ANSWERS.keys()


def test_the_recipe_of_the_released_model() -> None:
    """The options with which vLLM's recipes start DeepSeek-V3.2, each accepted or answered."""
    options = EngineOptions(
        "no such folder",
        kv_cache_dtype="fp8",
        speculative_config={"method": "deepseek_mtp", "num_speculative_tokens": 2},
        tensor_parallel_size=1,
        enable_expert_parallel=True,
        enable_eplb=False,
        reasoning_parser=None,
        tokenizer_mode="auto",
        enable_auto_tool_choice=True,
    )  # type: ignore[call-arg]
    assert options.speculation and options.speculation.num_speculative_tokens == 2
    assert SamplingParams(best_of=None, use_beam_search=False) == SamplingParams()  # type: ignore[call-arg]
    for name, value, instead in (
        ("tokenizer_mode", "mistral", "the model folder"),
        ("tool_call_parser", "deepseek_v32", "chat()"),
        ("enable_eplb", True, "redundant_experts=N"),
        ("all2all_backend", "deepep_low_latency", "moe_dispatch=…"),
    ):
        with pytest.raises(TypeError, match=f"'{name}'; .*{re.escape(instead)}"):
            EngineOptions("no such folder", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'guided_decoding'; use structured_outputs="):
        SamplingParams(guided_decoding={"choice": ["a"]})  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "module, name, instead",
    [
        ("", "AsyncLLM", "llm.astream"),
        ("", "EngineArgs", "EngineOptions"),
        ("", "PoolingParams", "only generate"),
        ("", "LoRARequest", "merge the adapter"),
        (".sampling_params", "GuidedDecodingParams", "StructuredOutputsParams"),
        (".sampling_params", "BeamSearchParams", "cumulative_logprob"),
        (".lora.request", "LoRARequest", "merge the adapter"),
        (".engine.arg_utils", "AsyncEngineArgs", "EngineOptions"),
        (".v1.engine.async_llm", "AsyncLLM", "llm.astream"),
    ],
)
def test_an_import_of_what_is_not_there_has_an_answer(module: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=f"^(dsa_engine.* has no {name}|there is no module .*): .*{instead}"):
        exec(f"from dsa_engine{module} import {name}")


@pytest.mark.parametrize("name", ["no_such", "NoSuch", "priority", "sleep", "__wrapped__"])
def test_a_name_of_nothing_is_no_error_of_imports(name: str) -> None:
    assert not hasattr(dsa_engine, name) and not hasattr(dsa_engine.sampling_params, name)


def test_the_first_example(demo_cache: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(compile(block.replace('LLM("demo")', 'LLM(model="demo", device="cpu")'), str(PAGE), "exec"), {})


def test_a_request_keeps_what_it_was_given(demo_cache: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    llm = LLM("demo-random", device="cpu", max_model_len=100, progress=False)
    pieces = []
    for piece in llm.stream([5, 6, 7], params):
        params.max_tokens = 50
        pieces.append(piece)
    assert sum(len(piece.token_ids) for piece in pieces) <= 3 and pieces[-1].finish_reason


def test_habits(demo_cache: Path) -> None:
    """Arguments, fields and imports of vLLM's programs that have one meaning here."""
    from dsa_engine.inputs import TextPrompt, TokensPrompt

    with LLM("demo-random", device="cpu", max_model_len=100, progress=False, seed=None, max_num_seqs=None) as llm:
        assert llm.engine.options.seed == 0 and llm.engine.options.max_num_seqs == 64
        greedy = SamplingParams(temperature=0.0, max_tokens=2, seed=None, top_k=None)  # type: ignore[arg-type]
        (plain,) = llm.generate([[5, 6, 7]], greedy)
        for output in (
            *llm.generate(prompt_token_ids=[5, 6, 7], sampling_params=greedy, lora_request=None, priority=None),
            *llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7], cache_salt=None), greedy),
        ):
            assert output.prompt_token_ids == [5, 6, 7] and output.token_ids == plain.token_ids
        (text,) = llm.generate(TextPrompt(prompt="ab"), greedy)
        assert text.prompt == "ab" and text.num_cached_tokens == text.metrics.num_cached_tokens == 0
        message = [{"role": "user", "content": "ab"}]
        template = "{{ messages[0]['content'] }}"
        (said,) = llm.chat(
            message, greedy, chat_template=template, lora_request=None, chat_template_content_format="auto"
        )
        assert said.token_ids == text.token_ids

        every = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
        (output,) = llm.generate([[5, 6, 7]], every)
        assert output.logprobs and output.prompt_logprobs and output.prompt_logprobs[1]
        assert len(output.logprobs[0]) == len(output.prompt_logprobs[1]) == llm.engine.config.vocab_size

        for wrong, instead in (
            ({"lora_request": object()}, "merge the adapter"),
            ({"prompt_token_ids": [5]}, "not both prompts and prompt_token_ids"),
            ({"no_such": 1}, "no argument 'no_such'"),
        ):
            with pytest.raises(TypeError, match=instead):
                llm.generate([[5, 6, 7]], greedy, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="1 prompts, but 2 priorities"):
            llm.generate([[5, 6, 7]], greedy, priority=[1, 2])
        (late,) = llm.generate([[5, 6, 7]], greedy, priority=[1])
        assert late.token_ids == plain.token_ids
        for name, instead in (("embed", "only generate"), ("llm_engine", "use llm.engine"), ("no_such", "'no_such'$")):
            with pytest.raises(AttributeError, match=instead):
                getattr(llm, name)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_names_of_the_fp8_cache(name: str) -> None:
    options = EngineOptions("no such folder", kv_cache_dtype=name)  # type: ignore[arg-type]
    assert cache_dtype(options.kv_cache_dtype, torch.bfloat16) == torch.float8_e4m3fn
