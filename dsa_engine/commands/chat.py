"""``dsa-engine chat``: a conversation on a terminal, in the form that the model was trained with."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from dsa_engine.commands.arguments import add_engine_arguments, llm_from
from dsa_engine.commands.early import Early, leads
from dsa_engine.commands.sampling import add_chat_arguments, add_sampling_arguments, sampling_params
from dsa_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dsa_engine.llm import LLM
    from dsa_engine.text.conversations import MessageDelta

_HELP = "/new begins another conversation, /help says this; Ctrl-C stops an answer; Ctrl-D, /quit or /exit ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin every conversation with")
    add_chat_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run_chat(args: argparse.Namespace) -> None:
    """Reads lines, answers each, and keeps the conversation until the input ends: rank 0; the others follow."""
    sampling_params(args)  # checks them before anything is loaded
    if leads():
        greeting = [*_beginning(args), {"role": "user", "content": "Hello"}]
        Early(args).conversation_format().render(greeting, chat_template_kwargs=args.chat_template_kwargs)
    llm = llm_from(args)
    if not llm.engine.mesh.is_front:
        llm.follow()
        return
    with llm:
        _converse(llm, args)


def _converse(llm: LLM, args: argparse.Namespace) -> None:
    params = sampling_params(args, llm.default_sampling)
    params.skip_special_tokens = not llm.conversation_format.needs_special_tokens
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401 (gives input() line editing and a history)
        print(f"{_HELP}.", file=sys.stderr)
    conversation = _beginning(args)
    while (text := _line(asks)) is not None:
        if text in ("/exit", "/quit"):
            return
        if text == "/help":
            print(f"{_HELP}.", file=sys.stderr)
        elif text == "/new":
            conversation = _beginning(args)
        elif text:
            asked = [*conversation, {"role": "user", "content": text}]
            answer = _answer(llm, asked, params, args)
            if answer is not None:
                conversation = [*asked, answer]


def _beginning(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _line(asks: bool) -> str | None:
    while True:
        try:
            return input("> " if asks else "").strip()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is no text in {error.encoding}: {error.reason}") from error
        except KeyboardInterrupt:
            if not asks:
                raise
            print(f"\n{_HELP}.", file=sys.stderr)


def _answer(
    llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, args: argparse.Namespace
) -> dict[str, Any] | None:
    """Prints the answer as it comes and returns its message; None after an error: the question is dropped too."""
    from dsa_engine.text.conversations.deltas import message_of

    form = llm.conversation_format
    shown: list[MessageDelta] = []
    ended = False
    try:
        prompt = form.render(messages, chat_template_kwargs=args.chat_template_kwargs)
        reader = form.reader(prompt)
        stream: Any = llm.stream(llm.tokenizer.encode(prompt, add_special_tokens=False), params)
        try:
            with closing(stream) as pieces:
                for piece in pieces:
                    _show(reader.push(piece.text), shown)
                    ended = piece.finish_reason == "stop"
                    if piece.error:
                        print(f"\nerror: {piece.error}", file=sys.stderr)
                        return None
        except KeyboardInterrupt:
            print(" [stopped]", end="")
    except ValueError as error:  # the conversation is too long, or its form refuses it
        print(f"error: {error}; /new begins another conversation", file=sys.stderr)
        return None
    _show(reader.finish(ended), shown)
    print(flush=True)
    return message_of(shown)


def _show(deltas: list[MessageDelta], shown: list[MessageDelta]) -> None:
    """Prints parts of an answer, with tags around its thought, and appends them to ``shown``."""
    for delta in deltas:
        thinks = delta.kind == "reasoning"
        if thinks != bool(shown and shown[-1].kind == "reasoning"):
            print("<think>" if thinks else "</think>")
        print(delta.text, end="", flush=True)
        shown.append(delta)
