"""The ``dsa-engine`` command. It imports the options of all commands, and the code of the one that runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

from dsa_engine.system.interrupts import ending_at_once

with ending_at_once():
    from dsa_engine.arguments import Parser, argument_parser, run
    from dsa_engine.commands import chat, generate
    from dsa_engine.commands.options import (
        bench,
        cache,
        convert,
        doctor,
        env,
        experts,
        info,
        make_checkpoint,
        plan,
        route,
        serve,
    )
    from dsa_engine.version import __version__


class Command(NamedTuple):
    """A command: its line in the help, its options, and the function that takes them, as "module:function" in
    ``commands/``."""

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    function: str

    def load(self) -> Callable[[argparse.Namespace], None]:
        """Imports the function."""
        module, _, name = self.function.partition(":")
        with ending_at_once():
            return getattr(import_module(f"dsa_engine.commands.{module}"), name)


COMMANDS = {
    "generate": Command(
        "generate from a prompt and print the text as it comes", generate.add_arguments, "generate:run_generate"
    ),
    "chat": Command("a conversation on the terminal", chat.add_arguments, "chat:run_chat"),
    "serve": Command("OpenAI's API over HTTP, for any number of clients", serve.add_arguments, "serve:run_serve"),
    "route": Command(
        "one address in front of several servers: each request goes where its prefix is cached",
        route.add_arguments,
        "route:run_route",
    ),
    "info": Command(
        "parameters, bytes per dtype, cache bytes per token, and what fits", info.add_arguments, "info:run_info"
    ),
    "plan": Command(
        "best deployment on given devices, and its predicted TTFT, TPOT, rates and limits",
        plan.add_arguments,
        "planner.command:run_plan",
    ),
    "experts": Command(
        "loads of experts from a file as a heat map, and how even replicas make them",
        experts.add_arguments,
        "experts:run_experts",
    ),
    "make-checkpoint": Command(
        "random weights in the released layout, for any configuration",
        make_checkpoint.add_arguments,
        "make_checkpoint:run_make_checkpoint",
    ),
    "convert": Command(
        "a checkpoint in another format: FP8 to plain weights, or to FP8, INT8 or INT4 experts",
        convert.add_arguments,
        "convert:run_convert",
    ),
    "cache list": Command(
        "what a cache_folder holds: for each key model, formats, pages, bytes and last use",
        cache.add_list_arguments,
        "cache:run_list",
    ),
    "cache clear": Command(
        "delete the pages of a cache_folder, of all models or of one key",
        cache.add_clear_arguments,
        "cache:run_clear",
    ),
    "env": Command("versions, devices and paths, for a bug report", env.add_arguments, "env:run_env"),
    "doctor": Command(
        "check whether the engine runs correctly on this machine", doctor.add_arguments, "doctor.command:run_doctor"
    ),
    "bench prefill": Command(
        "a long prompt alone: time, tokens/s, memory and stages of each rank",
        bench.add_prefill_arguments,
        "bench.prefill_command:run_prefill",
    ),
    "bench ttft": Command(
        "time to first token, through the generate API, without prefix hits",
        partial(bench.add_latency_arguments, metric="ttft"),
        "bench.latency_command:run_ttft",
    ),
    "bench tpot": Command(
        "time per output token, through the generate API",
        partial(bench.add_latency_arguments, metric="tpot"),
        "bench.latency_command:run_tpot",
    ),
    "bench serve": Command(
        "requests that arrive over time, here or at a server: throughput, latencies, prefix hits",
        bench.add_serving_arguments,
        "bench.serving.command:run_serving",
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
        args.command.load()(args)

    run(parsed)


def script(name: str, description: str | None) -> None:
    """Runs one command as a script of its own.

    Args:
        name: a key of :data:`COMMANDS`.
        description: begins the script's help.
    """

    def parsed() -> None:
        parser = argument_parser(description)
        COMMANDS[name].add_arguments(parser)
        args = parser.parse_args()
        COMMANDS[name].load()(args)

    run(parsed)


def _parser() -> Parser:
    parser = Parser(prog="dsa-engine", description="Runs, measures and plans models with sparse attention.")
    parser.add_argument("--version", action="version", version=f"dsa_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    groups = {}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group and group not in groups:
            about = _GROUPS[group]
            parent = commands.add_parser(group, help=about, description=_sentence(about))
            groups[group] = parent.add_subparsers(required=True, metavar="WHAT")
        within = groups[group] if group else commands
        one = within.add_parser(last, help=command.about, description=_sentence(command.about))
        one.set_defaults(command=command)
        command.add_arguments(one)
    return parser


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


if __name__ == "__main__":
    main()
