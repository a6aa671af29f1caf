"""``dsa-engine generate``: goes on from a prompt and prints the text as it comes."""

from __future__ import annotations

import argparse
import sys

from dsa_engine.commands.arguments import add_engine_arguments, llm_from, read_text
from dsa_engine.commands.early import Early, leads
from dsa_engine.commands.sampling import add_chat_arguments, add_sampling_arguments, sampling_params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to continue; '-' reads it from standard input")
    prompt.add_argument("--prompt-file", metavar="PATH", help="a file with the text to continue")
    prompt.add_argument(
        "--prompt-ids",
        type=_token_ids,
        metavar="IDS",
        help="token ids to continue, such as 0,51,17; without a tokenizer in the folder, ids are printed",
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message of a conversation")
    add_chat_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run_generate(args: argparse.Namespace) -> None:
    """Prints the pieces of the output on rank 0, which the others follow; exit status 1 after an error."""
    if args.chat and args.prompt_ids is not None:
        raise ValueError("--chat takes a text; give --prompt or --prompt-file with it, not --prompt-ids")
    if args.chat_template_kwargs is not None and not args.chat:
        raise ValueError("--chat-template-kwargs is for conversations; give --chat with it")
    sampling_params(args)  # checks them before anything is loaded
    prompt = _prompt(args) if leads() else []
    llm = llm_from(args)
    if not llm.engine.mesh.is_front:
        llm.follow()
        return
    params = sampling_params(args, llm.default_sampling)
    texts, error = llm.has_tokenizer, None
    with llm:
        for piece in llm.stream(prompt, params):
            shown = piece.text if texts else "".join(f"{token} " for token in piece.token_ids)
            print(shown, end="", flush=True)
            error = piece.error
    print()
    if error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _prompt(args: argparse.Namespace) -> list[int]:
    early = Early(args)
    ids = args.prompt_ids
    if ids is None:
        text = read_text(args.prompt_file) if args.prompt_file else _given_text(args)
        if args.chat:
            messages = [{"role": "user", "content": text}]
            ids = early.conversation_format().token_ids(messages, chat_template_kwargs=args.chat_template_kwargs)
        else:
            ids = early.tokenizer().encode(text)
    early.check(ids, room=1)
    return ids


def _given_text(args: argparse.Namespace) -> str:
    text = args.prompt
    if text == "-":
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is no text in {error.encoding}: {error.reason}") from error
    if not text:
        raise ValueError("the prompt is empty; give some text with --prompt, or --prompt-file or --prompt-ids")
    return text


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"give token ids separated by commas, such as 0,51,17, not {text!r}") from None
