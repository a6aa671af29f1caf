"""Options exist once: LLM's signature and help, and the command line, are those of the dataclasses."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import fields
from typing import Any

import pytest

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.arguments import add_engine_arguments, argument_parser, engine_options, parallel_from
from dsa_engine.options import EngineOptions
from dsa_engine.vllm_options import _ANSWERS, _METHODS, _SAMPLING_ANSWERS


def parsed(*words: str) -> argparse.Namespace:
    parser = argument_parser("A script.")
    add_engine_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("options, shown_by", [(EngineOptions, LLM), (ParallelConfig, ParallelConfig)])
def test_signature_and_help_list_every_option(options: type, shown_by: type) -> None:
    parameters = inspect.signature(shown_by).parameters
    for f in fields(options):
        default = f.default_factory() if callable(f.default_factory) else f.default
        assert parameters[f.name].default in (default, None if callable(f.default_factory) else default)
    listed = f"{shown_by.__doc__}{shown_by.__init__.__doc__}"
    assert all(f"    {f.name}: " in listed for f in fields(options) if "option" in f.metadata)


def test_the_command_line_has_the_defaults() -> None:
    args = parsed()
    assert engine_options(args) == {
        f.name: getattr(EngineOptions(), f.name) for f in fields(EngineOptions) if f.name != "parallel"
    } | {"parallel": ParallelConfig()}


@pytest.mark.parametrize(
    "words, name, value",
    [
        (("--max-model-len", "100"), "max_model_len", 100),
        (("--max-prefill-share", "0.25"), "max_prefill_share", 0.25),
        (("--cache-memory", "4GiB"), "cache_memory", "4GiB"),
        (("--hf-overrides", '{"num_hidden_layers": 2}'), "hf_overrides", {"num_hidden_layers": 2}),
        (("--enforce-eager",), "enforce_eager", True),
        (("--no-async-scheduling",), "async_scheduling", False),
        (("--no-progress",), "progress", False),
        (("--block-size", "16"), "page_size", 16),
        (("--gpu-memory-utilization", "0.5"), "gpu_memory_utilization", 0.5),
        (("--load-format", "dummy"), "load_format", "dummy"),
        (("--quantization", "dequantize"), "quantization", "dequantize"),
    ],
)
def test_an_argument_is_an_option(words: tuple[str, ...], name: str, value: Any) -> None:
    changed = engine_options(parsed(*words))
    assert changed[name] == value and changed == engine_options(parsed()) | {name: value}


def test_parallel_arguments() -> None:
    words = ("--cp-size", "2", "--moe-dispatch", "by_machine", "--decode-dispatch", "auto", "--timeout", "5")
    options = {"moe_dispatch": "by_machine", "decode_dispatch": "auto", "timeout": 5.0}
    assert parallel_from(parsed(*words)) == ParallelConfig(cp_size=2, **options)  # type: ignore[arg-type]


def test_help_says_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    for line in (
        "--page-size PAGE_SIZE, --block-size PAGE_SIZE tokens per cache page (default: 64)",
        "--seed SEED seed of dummy weights and of requests without a seed (default: 0)",
        "--max-model-len MAX_MODEL_LEN default: the model's",
        "--timeout SECONDS for a collective (default: 600.0)",
        "--enforce-eager no CUDA graphs in decode (default: off)",
    ):
        assert line in text, text
    parser = argument_parser("A script.")
    add_engine_arguments(parser)
    parser.add_argument("--json", help="write the result here")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "write the result here (default: none)" in " ".join(capsys.readouterr().out.split())


def test_the_rank_that_deepspeed_gives_is_no_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launcher puts it first; anywhere else, or with another rank's number, it is an unknown option."""
    parser = argument_parser("A script.")
    parser.add_argument("--json")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    assert vars(parser.parse_args(["--local_rank=1", "--json", "x"])) == {"json": "x"}
    for words in (["--json", "x", "--local_rank=1"], ["--local_rank=2"]):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(words)
        assert "error: unrecognized arguments: --local_rank=" in capsys.readouterr().err
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--local_rank=1"])


@pytest.mark.parametrize(
    "words, message",
    [
        (("--max-num-seq", "x"), "error: argument --max-num-seqs: invalid int value: 'x'; see "),
        (("--max-len", "5"), "error: unrecognized arguments: --max-len 5; did you mean --max-model-len?; see "),
        (("--zzz",), "error: unrecognized arguments: --zzz; see "),
        (
            ("--tensor-parallel-size=2",),
            "error: unrecognized arguments: --tensor-parallel-size=2; start the program with torchrun --nproc-per-node",
        ),
    ],
)
def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*words)
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.err.endswith(" --help\n") and captured.out == ""
    assert captured.err.count("\n") == 1


def test_other_names_of_an_option_and_what_vllm_calls_what_is_done_anyway() -> None:
    assert EngineOptions(block_size=16, kv_cache_memory_bytes=1 << 20) == EngineOptions(
        page_size=16, cache_memory=1 << 20
    )
    assert (
        EngineOptions(tensor_parallel_size=1, enable_chunked_prefill=True, tokenizer_mode="auto", enable_lora=False)
        == EngineOptions()
    )
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        EngineOptions(tensor_parallel_size=True)


def test_sampling_parameters_and_methods_of_vllm_have_answers() -> None:
    assert SamplingParams(best_of=None, extra_args={}, use_beam_search=False) == SamplingParams()
    with pytest.raises(TypeError, match="^there is no option .guided_decoding.; output is not constrained"):
        SamplingParams(guided_decoding={"choice": ["a"]})
    assert not {f.name for f in fields(SamplingParams)} & _SAMPLING_ANSWERS.keys()
    assert not [name for name in _METHODS if name in vars(LLM)]
    llm = LLM.__new__(LLM)  # nothing of it is needed to say what it has not
    with pytest.raises(AttributeError, match="^LLM has no 'embed': models here generate text$"):
        llm.embed("a")  # type: ignore[attr-defined]
    assert not hasattr(llm, "nothing_of_this_name")
    assert EngineOptions(dtype="half") == EngineOptions(dtype="float16")


def test_no_answer_is_about_an_option_that_exists() -> None:
    own = {f.name for f in fields(EngineOptions)} | {f.name for f in fields(ParallelConfig)}
    assert not own & _ANSWERS.keys()
    text = " ".join(answer for answer, _ in _ANSWERS.values())
    for name in ("cache_memory", "max_num_batched_tokens", "max_prefill_share", "enforce_eager", "cp_size"):
        assert name in text and name in own  # what is recommended exists


def test_none_stands_for_what_is_made_anew() -> None:
    assert EngineOptions(hf_overrides=None, parallel=None) == EngineOptions()
