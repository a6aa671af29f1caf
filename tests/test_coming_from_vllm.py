"""docs/COMING_FROM_VLLM.md says what is true: names that are the same are there, those that are not have an answer."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.options import EngineOptions
from dsa_engine.outputs import CompletionOutput, RequestOutput
from dsa_engine.vllm_options import _ANSWERS, advice

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
    assert set(names(same["`SamplingParams`"])) == parameters
    outputs = {f.name for f in fields(RequestOutput)} | {f.name for f in fields(CompletionOutput)}
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
    with pytest.raises(TypeError, match="'guided_decoding'; .*allowed_token_ids"):
        SamplingParams(guided_decoding={"choice": ["a"]})  # type: ignore[call-arg]


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
