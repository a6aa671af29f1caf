"""Options exist once: LLM's signature and help, and the command line, are those of the dataclasses."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.cli import COMMANDS
from dsa_engine.commands.arguments import HelpFormatter, add_engine_arguments, argument_parser, engine_options, run
from dsa_engine.options import EngineOptions


def parsed(*words: str) -> argparse.Namespace:
    parser = argument_parser("A script.")
    add_engine_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("options, shown_by", [(EngineOptions, LLM), (ParallelConfig, ParallelConfig)])
def test_signature_and_help_list_every_option(options: type, shown_by: type) -> None:
    parameters = inspect.signature(shown_by).parameters
    listed = f"{shown_by.__doc__}{shown_by.__init__.__doc__}"
    for f in fields(options):
        assert f"    {f.name}: " in listed
        assert callable(f.default_factory) or parameters[f.name].default == f.default


def test_the_command_line_has_the_defaults() -> None:
    assert EngineOptions(**engine_options(parsed())) == EngineOptions()


@pytest.mark.parametrize(
    "words, name, value",
    [
        (("--max-model-len", "100"), "max_model_len", 100),
        (("--max-prefill-share", "0.25"), "max_prefill_share", 0.25),
        (("--cache-memory", "4GiB"), "cache_memory", "4GiB"),
        (("--hf-overrides", '{"num_hidden_layers": 2}'), "hf_overrides", {"num_hidden_layers": 2}),
        (("--enforce-eager",), "enforce_eager", True),
        (("--no-async-scheduling",), "async_scheduling", False),
        (("--cudagraph-capture-sizes", "1,8"), "cudagraph_capture_sizes", [1, 8]),
        (("--cudagraph-capture-sizes", "none"), "cudagraph_capture_sizes", []),
        (("--load-format", "dummy"), "load_format", "dummy"),
    ],
)
def test_an_argument_is_an_option(words: tuple[str, ...], name: str, value: Any) -> None:
    changed = engine_options(parsed(*words))
    assert changed[name] == value and changed == engine_options(parsed()) | {name: value}


def test_parallel_arguments() -> None:
    words = ("--cp-size", "2", "--moe-dispatch", "by_node", "--decode-dispatch", "auto", "--timeout", "5")
    options = {"moe_dispatch": "by_node", "decode_dispatch": "auto", "timeout": 5.0}
    assert engine_options(parsed(*words))["parallel"] == ParallelConfig(cp_size=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_every_default_once(name: str) -> None:
    parser, formatter = argument_parser("A command."), HelpFormatter("x")
    COMMANDS[name].add_arguments(parser)
    for action in parser._actions:
        if action.option_strings and "help" not in action.dest and not action.required:
            text = formatter._get_help_string(action) or ""
            assert len(re.findall("default:", text, re.IGNORECASE)) == 1, (action.option_strings, text)


def test_the_rank_that_deepspeed_gives_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher puts it first; anywhere else, or with another rank's number, it is an unknown option."""
    parser = argument_parser("A script.")
    parser.add_argument("--json")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("RANK", raising=False)
    assert vars(parser.parse_args(["--local_rank=1", "--json", "x"])) == {"json": "x"}
    for words in (["--json", "x", "--local_rank=1"], ["--local_rank=2"]):
        with pytest.raises(ValueError, match="unrecognized arguments: --local_rank"):
            parser.parse_args(words)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--max-num-seq", "x"), "--max-num-seqs: invalid int value: 'x'; see "),
        (("--load-format", "x"), "--load-format: invalid choice: 'x' "),
        (("--max-len", "5"), "--max-len 5; did you mean --max-model-len?; see "),
        (("--zzz",), "--zzz; see "),
        (("--tensor-parallel-size=2",), "--tensor-parallel-size=2; start the program with torchrun"),
        (("-tp", "8", "--uds", "x"), "-tp 8; start the program with torchrun --nproc-per-node N: all ranks serve one"),
        (("-tp", "8", "--uds", "x"), ", and --uds x; put a proxy before the server; see "),
        (("--no-enable-prefix-cashing",), "--no-enable-prefix-cashing; did you mean --no-enable-prefix-caching?"),
        (("--enable-prefix-cashing", "7"), "--enable-prefix-cashing 7; see "),  # no option of this name takes a value
        (("--max-num-sequences", "--seed", "1"), "--max-num-sequences; see "),
        (("--enable-log-requests",), "--enable-log-requests; requests are not logged"),
        (("--hf-overrides", "{}", "--hf-overrides.a", "1"), "--hf-overrides is given whole and by keys"),
    ],
)
def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(lambda: print(parsed(*words)))
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and captured.err.count("\n") == 1


def test_a_command_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    """What is done anyway is left out, with one line in the log; names and objects may have vLLM's forms."""
    done = "-tp 1 --enable-chunked-prefill --enable_expert_parallel --enable-auto-tool-choice --disable-log-requests "
    done += "--no-enable-log-requests --block-size=64 --tokenizer-mode deepseek_v32"
    dotted = "--hf_overrides.rope_parameters.factor 4 --hf-overrides.rope_parameters.kind=yarn --max_num_seqs 3"
    caplog.set_level("INFO", logger="dsa_engine")
    parser = argument_parser("A command.")
    add_engine_arguments(parser)
    parser.add_argument("tag", nargs="?")
    args = parser.parse_args([*done.split(), "folder", *dotted.split()])
    options = engine_options(args)
    assert (args.tag, options["max_num_seqs"]) == ("folder", 3)
    assert options["hf_overrides"] == {"rope_parameters": {"factor": 4, "kind": "yarn"}}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"left out, as it is done anyway: {done}"


def test_parameters_are_assigned() -> None:
    params = SamplingParams(temperature=0.0, stop="x")
    params.max_tokens, params.stop = 3, ["a", "b"]
    expected = SamplingParams(temperature=0.0, max_tokens=3, stop=["a", "b"])
    assert params == expected and params.stop_strings == ("a", "b")
    with pytest.raises(ValueError, match="top_p must be"):
        params.top_p = 2.0
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        params.max_token = 2  # type: ignore[attr-defined]
    assert params == expected


def test_none_stands_for_what_is_made_anew() -> None:
    assert EngineOptions(hf_overrides=None, parallel=None) == EngineOptions()  # type: ignore[arg-type]
