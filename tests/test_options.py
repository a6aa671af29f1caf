"""Options exist once: LLM's signature and help, and the command line, are those of the dataclasses."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import fields
from typing import Any

import pytest

from dsa_engine import LLM, ParallelConfig
from dsa_engine.arguments import add_engine_arguments, argument_parser, engine_options, parallel_from
from dsa_engine.options import EngineOptions


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
        (("--load-format", "dummy"), "load_format", "dummy"),
        (("--quantization", "dequantize"), "quantization", "dequantize"),
    ],
)
def test_an_argument_is_an_option(words: tuple[str, ...], name: str, value: Any) -> None:
    changed = engine_options(parsed(*words))
    assert changed[name] == value and changed == engine_options(parsed()) | {name: value}


def test_parallel_arguments() -> None:
    words = ("--cp-size", "2", "--decode-dispatch", "all_to_all", "--timeout", "5")
    assert parallel_from(parsed(*words)) == ParallelConfig(cp_size=2, decode_dispatch="all_to_all", timeout=5.0)


def test_help_says_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    for line in (
        "--page-size PAGE_SIZE tokens per cache page (default: 64)",
        "--seed SEED of dummy weights and of requests without a seed of their own (default: 0)",
        "--max-model-len MAX_MODEL_LEN default: the model's",
        "--timeout SECONDS for a collective (default: 600.0)",
    ):
        assert line in text, text


def test_none_stands_for_what_is_made_anew() -> None:
    assert EngineOptions(hf_overrides=None, parallel=None) == EngineOptions()
