"""Command-line options of the scripts and the ``dsa-engine`` command, and how both end on an error."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from dsa_engine.config.checks import shown
from dsa_engine.config.fields import options_of
from dsa_engine.config.overrides import merge_overrides
from dsa_engine.config.vllm_options import advice, answer, is_switch
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.failure import report_failures
from dsa_engine.parallel.launch_environment import several_processes
from dsa_engine.system.interrupts import exit_interrupted
from dsa_engine.system.logs import set_up_logging
from dsa_engine.system.output_files import drop_stdout, keep_stdout, restore_stdout

if TYPE_CHECKING:
    from dsa_engine.llm import LLM


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and adds the default to an option's help unless it is there."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if action.help is None or "default:" in action.help.lower() or not action.option_strings:
            return action.help
        if default is argparse.SUPPRESS:
            return action.help
        words = "none" if default is None else "off" if default is False else default
        words = ",".join(map(str, default)) if isinstance(default, list) else words
        return f"{action.help} (default: {words})".replace("%", "%%")


class Rare(str):
    """The help of an option that only ``--help-all`` shows."""


class _HelpAll(argparse._HelpAction):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        assert isinstance(parser, Parser)
        parser.shows_all = True
        super().__call__(parser, *rest)


class Parser(argparse.ArgumentParser):
    """Reports a wrong option or command in one line, with the one that may have been meant."""

    add_when_parsing: Callable[[argparse.ArgumentParser], None] | None = None  # adds the options of a subcommand
    shows_all = False  # the help has all options, not only those that matter for a start

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **{"formatter_class": HelpFormatter} | named)
        self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        rare = {} if self.shows_all else {one: one.help for one in self._actions if isinstance(one.help, Rare)}
        for action in rare:
            action.help = argparse.SUPPRESS
        shown = super().format_help()
        for action, text in rare.items():
            action.help = text
        return shown + (f"\n{len(rare)} more options: {self.prog} --help-all\n" if rare else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(value, action.choices, n=1)
            instead = f"did you mean {near[0]}?" if near else f"commands are {', '.join(action.choices)}"
            self.error(f"there is no command {value!r}; {instead}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")  # as any other wrong option: see `run`

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also called for a subcommand, which so suggests its own options.

        The deepspeed launcher puts ``--local_rank=N`` before a script's arguments. It repeats LOCAL_RANK of the
        environment and is dropped.
        """
        if self.add_when_parsing is not None:
            self.add_when_parsing(self)
            self.add_when_parsing = None
        args = sys.argv[1:] if args is None else list(args)
        if "LOCAL_RANK" in os.environ and args and args[0] == f"--local_rank={os.environ['LOCAL_RANK']}":
            del args[0]
        args = args if self._subparsers else self._translated(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if str(getattr(parsed, "json", None)) == "-":
            keep_stdout()
        if unknown:
            at = next((at for at, word in enumerate(unknown) if word.startswith("--")), 0)
            valued = "=" in unknown[at] or any(not word.startswith("-") for word in unknown[at + 1 : at + 2])
            alike = [flag for flag, action in self._option_string_actions.items() if (action.nargs != 0) == valued]
            near = difflib.get_close_matches(unknown[at].partition("=")[0], alike, n=1, cutoff=0.7)
            instead = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{instead}")
        return parsed, unknown

    def _translated(self, args: Sequence[str]) -> list[str]:
        """The words of a vLLM command as this parser takes them: hyphens for underscores, JSON for
        ``--option.key value``, and without what is done anyway, of which a line in the log tells."""
        words, taken, dropped, refused = deque(args), list[str](), list[str](), list[str]()
        objects: dict[str, dict[str, Any]] = {}
        while words:
            word = words.popleft()
            flag, equals, text = word.partition("=")
            flag, _, keys = flag.partition(".")
            name, own, off = flag.lstrip("-").replace("-", "_"), flag.replace("_", "-"), flag[:5] in ("--no-", "--no_")
            name, known = name.removeprefix("no_"), own in self._option_string_actions
            if not flag.startswith("-") or (not keys if known else advice(name) is None):
                taken.append(own + equals + text if known else word)
                continue
            if not (equals or off or is_switch(name)) and words and not words[0].startswith("-"):
                text = words.popleft()
                word = f"{word} {text}"
            value: Any = not off and (text or True)
            with suppress(ValueError):
                value = json.loads(text)
            if known:
                for key in reversed(keys.split(".")):
                    value = {key: value}
                objects[own] = merge_overrides(objects.get(own, {}), value)
            elif instead := answer(name, value):
                refused.append(f"{word}; {instead}")
            else:
                dropped.append(word)
        if refused:
            self.error(f"unrecognized arguments: {', and '.join(refused)}")
        if dropped:
            logging.getLogger(__name__).info("left out, as it is done anyway: %s", " ".join(dropped))
        if both := objects.keys() & {word.partition("=")[0] for word in taken}:
            self.error(f"{both.pop()} is given whole and by keys; give it in one way")
        return taken + [word for own, value in objects.items() for word in (own, json.dumps(value))]


def argument_parser(description: str | None) -> Parser:
    """The parser of a script."""
    return Parser(description=description)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :class:`dsa_engine.LLM`; :func:`llm_from` reads them."""
    add_options(parser, EngineOptions)
    add_options(parser, ParallelConfig)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``, the option of every script that writes its result."""
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :class:`LLM` that the arguments describe."""
    return options_from(args, EngineOptions) | {"parallel": ParallelConfig(**options_from(args, ParallelConfig))}


def llm_from(args: argparse.Namespace, **changes: Any) -> LLM:
    """The :class:`LLM` that the arguments describe; ``changes`` replace options."""
    from dsa_engine.llm import LLM  # it imports torch, which --help does not need

    return LLM(**(engine_options(args) | changes))


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Adds the options of a dataclass in their groups; :func:`options_from` reads them."""
    group: argparse._ActionsContainer = parser
    for f, hint in options_of(options):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        how = _argument(hint)
        if how is not None:
            about = f.metadata["doc"].rstrip(".").replace(":class:", "").replace("`", "")
            how = {"default": f.default, "help": about} | how
            if f.metadata["metavar"]:
                how["metavar"] = f.metadata["metavar"]
            action = group.add_argument(_flag(f.name), **how)
            if not f.metadata["common"]:
                action.help = Rare(action.help)


def options_from(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The options that :func:`add_options` has added, by name."""
    values: dict[str, Any] = {}
    for f, hint in options_of(options):
        if _argument(hint) is not None:
            given = getattr(args, f.name)
            values[f.name] = json_object(given, _flag(f.name)) if get_origin(hint) is dict else given
    return values


def _argument(hint: Any) -> dict[str, Any] | None:
    """What ``add_argument`` is told of an option's type; None: the option has no argument."""
    origin, kinds = get_origin(hint), [kind for kind in get_args(hint) if kind is not NoneType]
    if origin is Annotated:
        return _argument(kinds[0])
    if origin in (Union, UnionType):
        return _argument(kinds[0]) if len(kinds) == 1 else {"type": str}
    if origin is Literal:
        return {"choices": kinds}
    if origin is dict:
        return {"default": "{}", "metavar": "JSON"}  # kept as written, for the report
    if origin is list:
        return {"nargs": "+"} if kinds[0] is str else {"type": lambda text: [] if text == "none" else lengths(text)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return None if is_dataclass(hint) else {"type": hint}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def reported(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a run for its report: those that have a value, without the paths of results."""
    written = ("json", "plot", "profile", "dump_logits", "command")  # command: the subcommand of dsa-engine
    return {name: value for name, value in vars(args).items() if value is not None and name not in written}


def lengths(text: str) -> list[int]:
    """The numbers of tokens in a text such as "8192,32768"."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"give positive numbers separated by commas, such as 8192,32768, not {text!r}")
    return values


def json_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object from the command line; ``ValueError`` names the option."""
    like = 'such as {"num_hidden_layers": 4}'
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not valid JSON ({error}): {shown(text)}; give {like}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object {like}, not {shown(text)}")
    return value


def read_text(path: str) -> str:
    """The text of a file; ``ValueError`` if it cannot be read, is empty or holds something else than text in UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file {path} is no text in UTF-8: {error.reason} at byte {error.start:,}") from error
    except OSError as error:
        raise ValueError(f"cannot read the file {path}: {error.strerror}") from error
    if not text or "\0" in text:
        raise ValueError(f"the file {path} {'holds zero bytes' if text else 'is empty'}; give one with a text")
    return text


def run(main: Callable[[], None]) -> None:
    """Runs a script; an error that a user can correct ends it with one line and exit status 2, Ctrl-C with one line and
    130, a reader that has closed standard output (``| head``) silently with 141, as after SIGPIPE."""
    correctable = (ValueError, TypeError, OSError)
    several = several_processes()
    report_failures(brief=correctable)
    try:
        set_up_logging()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
        main()
        print(end="", flush=True)  # also without a standard output
    except BrokenPipeError:
        drop_stdout()
        sys.exit(141)
    except (*correctable, KeyboardInterrupt) as error:
        if several:
            raise  # one line for the whole run, see parallel/failure.py
        interrupted = isinstance(error, KeyboardInterrupt)
        print("interrupted" if interrupted else f"error: {error}", file=sys.stderr)
        exit_interrupted() if interrupted else sys.exit(2)
    finally:
        restore_stdout()
