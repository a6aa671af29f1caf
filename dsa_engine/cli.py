"""The ``dsa-engine`` command. It imports the module of the command that runs, and torch only to run it."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib import import_module
from typing import Any, NamedTuple

from dsa_engine.commands.arguments import Parser, argument_parser, run
from dsa_engine.version import __version__

logger = logging.getLogger(__name__)


class Command(NamedTuple):
    """A command. Its function raises ``ValueError`` or ``OSError`` for what a user can correct, before anything is
    written or measured."""

    about: str  # its line in the help
    function: str  # "module:function" in ``commands/``, of the parsed options
    options: str | None = None  # adds them to a parser without importing torch; None: "add_arguments" of the module
    imports_torch: bool = True  # whether the function does

    def run(self, args: argparse.Namespace) -> None:
        """Imports and calls the function; says first that it imports torch, which takes seconds."""
        if self.imports_torch and "torch" not in sys.modules:
            logger.info("importing PyTorch")
        _imported(self.function)(args)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _imported(self.options or f"{self.function.partition(':')[0]}:add_arguments")(parser)


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(f"dsa_engine.commands.{module}"), function)


COMMANDS = {
    "generate": Command("generate from a prompt and print the text as it comes", "generate:run_generate"),
    "chat": Command("a conversation on the terminal", "chat:run_chat"),
    "lens": Command("what each word of an answer looked at in a document, as an HTML file", "lens:run_lens"),
    "serve": Command("the APIs of OpenAI and Anthropic over HTTP, for any number of clients", "serve:run_serve"),
    "info": Command("parameters, bytes per dtype, cache bytes per token, and what fits", "info:run_info"),
    "plan": Command(
        "best deployment on given devices, and its predicted TTFT, TPOT, rates and limits", "planner.command:run_plan"
    ),
    "make-checkpoint": Command(
        "random weights in the released layout, for any configuration", "make_checkpoint:run_make_checkpoint"
    ),
    "convert": Command(
        "a checkpoint in another format: FP8 to plain weights, or to FP8, INT8 or INT4 experts", "convert:run_convert"
    ),
    "cache list": Command(
        "what a cache_folder holds: for each key model, formats, pages, bytes and last use",
        "cache:run_list",
        "cache:add_list_arguments",
        imports_torch=False,
    ),
    "cache clear": Command(
        "delete the pages of a cache_folder, of all models or of one key",
        "cache:run_clear",
        "cache:add_clear_arguments",
        imports_torch=False,
    ),
    "env": Command("versions, devices and paths, for a bug report", "env:run_env"),
    "doctor": Command("check whether the engine runs correctly on this machine", "doctor.command:run_doctor"),
    "check": Command(
        "compare a checkpoint's layers, as the engine serves it, with plain float32; is sparsity on, and right",
        "check.command:run_check",
    ),
    "bench prefill": Command(
        "a long prompt alone: time, tokens/s, memory and stages of each rank",
        "bench.command:run_prefill",
        "bench.options:add_prefill_arguments",
    ),
    "bench ttft": Command(
        "time to first token, through the generate API, without prefix hits",
        "bench.command:run_ttft",
        "bench.options:add_ttft_arguments",
    ),
    "bench tpot": Command(
        "time per output token, through the generate API",
        "bench.command:run_tpot",
        "bench.options:add_tpot_arguments",
    ),
}
_GROUPS = {
    "bench": "measure prefill, time to first token, time per output token",
    "cache": "look at a cache_folder, the pages of prompts on the disk, or clear it",
}


def main(argv: list[str] | None = None) -> None:
    """Entry point of the installed command and of ``python -m dsa_engine``."""

    def parsed() -> None:
        args = _parser().parse_args(argv)
        args.command.run(args)

    run(parsed)


def script(name: str, description: str | None) -> None:
    """Runs one command, a key of :data:`COMMANDS`, as a script of its own."""

    def parsed() -> None:
        parser = argument_parser(description)
        COMMANDS[name].add_arguments(parser)
        args = parser.parse_args()
        COMMANDS[name].run(args)

    run(parsed)


def _parser() -> Parser:
    parser = Parser(prog="dsa-engine", description="Runs, measures and plans models with sparse attention.")
    parser.add_argument("--version", action="version", version=f"dsa_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    groups = {"": commands}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            about = _GROUPS[group]
            parent = commands.add_parser(group, help=about, description=_sentence(about))
            groups[group] = parent.add_subparsers(required=True, metavar="WHAT")
        one = groups[group].add_parser(last, help=command.about, description=_sentence(command.about))
        one.set_defaults(command=command)
        one.add_when_parsing = command.add_arguments
    return parser


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


if __name__ == "__main__":
    main()
