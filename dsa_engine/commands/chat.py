"""``dsa-engine chat``: a conversation on a terminal, through the model's chat template."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from dsa_engine.arguments import add_engine_arguments, llm_from
from dsa_engine.commands.sampling import add_sampling_arguments, sampling_params
from dsa_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dsa_engine.llm import LLM

_HELP = "/new begins another conversation; Ctrl-C stops an answer, Ctrl-D (or /exit) ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin every conversation with")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run_chat(args: argparse.Namespace) -> None:
    """Reads lines, answers each, and keeps the conversation until the input ends. With several ranks, rank 0 does this
    and the others follow.

    Raises:
        ValueError: an option is not possible, or the model has no chat template.
    """
    sampling_params(args)  # checks them before anything is loaded
    llm = llm_from(args)
    if llm.engine.mesh.rank > 0:
        llm.follow()
        return
    with llm:
        _converse(llm, args)


def _converse(llm: LLM, args: argparse.Namespace) -> None:
    params = sampling_params(args, llm.default_sampling)
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    llm.tokenizer.chat([*beginning, {"role": "user", "content": "Hello"}])  # checks that there is a template
    asks = sys.stdin.isatty()
    if asks:
        print(f"{_HELP}.", file=sys.stderr)
    conversation = [*beginning]
    while (text := _line(asks)) is not None:
        if text == "/exit":
            return
        if text == "/new":
            conversation = [*beginning]
        elif text:
            asked = [*conversation, {"role": "user", "content": text}]
            answer = _answer(llm, asked, params)
            if answer is not None:
                conversation = [*asked, {"role": "assistant", "content": answer}]


def _line(asks: bool) -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            return input("> " if asks else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not asks:
                raise
            print(f"\n{_HELP}.", file=sys.stderr)


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Prints the answer as it comes and returns it; None after an error: the question is dropped too."""
    parts: list[str] = []
    try:
        stream: Any = llm.stream(llm.tokenizer.chat(messages), params)
        with closing(stream) as pieces:
            for piece in pieces:
                print(piece.text, end="", flush=True)
                parts.append(piece.text)
                if piece.error:
                    print(f"\nerror: {piece.error}", file=sys.stderr)
                    return None
    except ValueError as error:  # the conversation is too long, or the template refuses it
        print(f"error: {error}; /new begins another conversation", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print(flush=True)
    return "".join(parts)
