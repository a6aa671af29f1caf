"""docs/COMING_FROM_VLLM.md says what is true: names that are the same are there, those that are not have an answer."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.config.fields import options_of
from dsa_engine.options import EngineOptions
from dsa_engine.outputs import CompletionOutput, RequestOutput
from dsa_engine.vllm_options import answer, draft_method_answer, method_answer, sampling_answer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "COMING_FROM_VLLM.md"


def section(title: str) -> dict[str, str]:
    """The rows of the first table under a heading: first cell to second."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].lstrip()
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", text.partition("\n\n")[0], re.M)
    return dict(rows[1:])


def names(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]\w*)`", cell)


def test_what_is_the_same() -> None:
    same = section("The same names")
    options = {name for f, about in options_of(EngineOptions) for name in (f.name, *about.aliases)}
    values = {"half", "float", "auto", "dummy", "fp8_ds_mla"}
    listed = set(names(same["options of `LLM`"])) - values
    assert len(listed) > 15 and listed <= options
    parameters = {f.name for f in fields(SamplingParams) if f.init}
    assert set(names(same["`SamplingParams`"])) == parameters
    outputs = {f.name for f in fields(RequestOutput)} | {f.name for f in fields(CompletionOutput)}
    assert len(names(same["outputs"])) > 10 and set(names(same["outputs"])) <= outputs
    for name in ("generate", "chat", "get_tokenizer", "stream", "astream", "agenerate", "prompt_logits"):
        assert callable(getattr(LLM, name))


def test_what_is_not_there_has_an_answer() -> None:
    listed = [name for title in ("Other names", "Not available") for cell in section(title) for name in names(cell)]
    # A sampling parameter and an option that are there, an argument of generate(), a part of a command.
    elsewhere = {"prompt_logprobs", "speculative_config", "lora_request", "throughput"}
    assert len(listed) > 15
    for name in set(listed) - elsewhere:
        advice = answer(name, object()) or sampling_answer(name, object())
        assert advice or method_answer(name) or draft_method_answer(name), name


def test_the_recipe_of_the_released_model() -> None:
    """The options with which vLLM's recipes start DeepSeek-V3.2, each accepted or answered."""
    options = EngineOptions(
        "no such folder",
        kv_cache_dtype="fp8_ds_mla",
        speculative_config={"method": "deepseek_mtp", "num_speculative_tokens": 2, "model": None},
        tensor_parallel_size=1,
        enable_expert_parallel=True,
        enable_eplb=False,
        enable_dbo=False,
        reasoning_parser=None,
        tokenizer_mode="deepseek_v32",
        enable_auto_tool_choice=True,
        all2all_backend=None,
    )  # type: ignore[call-arg]
    assert options.kv_cache_dtype == "fp8"
    assert options.speculation and options.speculation.num_speculative_tokens == 2
    for name, value, advice in (
        ("tokenizer_mode", "mistral", "DeepSeek-V3.2's own form"),
        ("reasoning_parser", "deepseek_v3", "outputs of chat() have a message"),
        ("tool_call_parser", "deepseek_v32", "chat(tools=…)"),
        ("enable_eplb", True, "redundant_experts=N, expert_loads=FILE"),
        ("all2all_backend", "deepep_low_latency", "moe_dispatch=…"),
    ):
        with pytest.raises(TypeError, match=f"there is no option '{name}'; .*{re.escape(advice)}"):
            EngineOptions("no such folder", **{name: value})
    for method in ("eagle", "eagle3", "ngram"):
        with pytest.raises(ValueError, match=f"method '{method}' is not supported: .*MTP module, use \"mtp\""):
            EngineOptions("no such folder", speculative_config={"method": method, "num_speculative_tokens": 2})


@pytest.mark.parametrize("name", ["EngineArgs", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"])
def test_classes_that_are_not_there(name: str) -> None:
    with pytest.raises(ImportError, match=f"^dsa_engine has no {name}: .*LLM.*COMING_FROM_VLLM.md$"):
        exec(f"from dsa_engine import {name}")


def test_the_first_example(demo_cache: Path) -> None:
    """As on the page, whose first block of code it is, with what other tutorials do besides."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(compile(block.replace('LLM("demo")', 'LLM(model="demo", device="cpu")'), str(PAGE), "exec"), {})


def test_parameters_are_assigned_as_in_examples_of_vllm(demo_cache: Path) -> None:
    params = SamplingParams(temperature=0.0, stop="x")
    params.max_tokens, params.stop = 3, ["a", "b"]
    expected = SamplingParams(temperature=0.0, max_tokens=3, stop=["a", "b"])
    assert params == expected and params.stop_strings == ("a", "b")
    with pytest.raises(ValueError, match="top_p must be"):
        params.top_p = 2.0
    with pytest.raises(TypeError, match="there is no option 'max_token'; did you mean 'max_tokens'"):
        params.max_token = 2  # type: ignore[attr-defined]
    assert params == expected
    params.stop = None
    llm = LLM("demo-random", device="cpu", max_model_len=100, progress=False)
    pieces = []
    for piece in llm.stream([5, 6, 7], params):
        params.max_tokens = 50  # the request keeps what it was given
        pieces.append(piece)
    assert sum(len(piece.token_ids) for piece in pieces) <= 3 and pieces[-1].finish_reason
