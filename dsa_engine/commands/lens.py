"""``dsa-engine lens``: what each word of an answer about a document looked at, as one HTML file without a server."""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_engine.commands.arguments import add_engine_arguments, llm_from, read_text
from dsa_engine.commands.early import Early, leads
from dsa_engine.commands.sampling import add_chat_arguments, add_sampling_arguments, sampling_params
from dsa_engine.system.output_files import check_outputs, write_text

if TYPE_CHECKING:
    from dsa_engine.outputs import RequestOutput
    from dsa_engine.text.tokenizer import Tokenizer

_PAGE = Path(__file__).parents[1] / "server" / "page"
_STYLES = ("base", "page", "prose", "lens")
_SCRIPTS = ("elements", "prose", "conversation", "document", "lens", "pane", "server", "recorded", "page")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-file", metavar="PATH", required=True, help="the document, a text")
    parser.add_argument("--question", required=True, help="what is asked about it")
    parser.add_argument("--output", metavar="PATH", default="lens.html", help="the file to write; default: lens.html")
    parser.add_argument(
        "--selection",
        type=int,
        metavar="N",
        default=32,
        help="first tokens of the answer that are looked at, up to 256; default: 32. One of DeepSeek-V3.2 takes 2 MB",
    )
    add_chat_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run_lens(args: argparse.Namespace) -> None:
    """Asks, prints the answer and writes the file. With several ranks, rank 0 does this and the others follow."""
    params = replace(sampling_params(args), selection=args.selection)  # checked before anything is loaded
    if not args.selection:
        raise ValueError("--selection must be at least 1, not 0")
    ids, document = list[int](), ""
    if leads():
        check_outputs(args.output)
        early, document = Early(args), read_text(args.prompt_file)
        messages = [{"role": "user", "content": f"{document.rstrip()}\n{args.question}"}]
        ids = early.conversation_format().token_ids(messages, chat_template_kwargs=args.chat_template_kwargs)
        early.check(ids, room=1)
    llm = llm_from(args)
    if not llm.engine.mesh.is_front:
        llm.follow()
        return
    with llm:
        params = replace(sampling_params(args, llm.default_sampling), selection=args.selection)
        (output,) = llm.generate([ids], params)
        if output.selection is None:
            raise RuntimeError(f"there is no answer to look at: {output.error}")
        asked = (document.rstrip(), args.question, Path(args.prompt_file).name)
        write_text(args.output, lens_page(output, llm.tokenizer, *asked))
    print(f"{output.text.strip()}\n{args.output} has what each word looked at; open it in a browser", file=sys.stderr)


def lens_page(output: RequestOutput, tokenizer: Tokenizer, document: str, question: str, title: str) -> str:
    """The server's page in one file, with an output that has a selection in the place of a server."""
    from dsa_engine.server.forms.parts import selection_of

    ids = output.prompt_token_ids + output.token_ids[: len(output.token_ids) - (output.finish_reason == "stop")]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    document = document if document in text else text  # a tokenizer may change a text
    start, characters = (len(part.encode("utf-16-le")) // 2 for part in (text[: text.index(document)], document))
    data = {"text": text, "tokens": [*map(tokenizer.token_text, ids)], "prompt": len(output.prompt_token_ids)}
    data |= {"start": start, "end": start + characters, "question": question, "name": title}
    recorded = json.dumps(data | selection_of(output.selection), separators=(",", ":")).replace("<", "\\u003c")
    page, style, script = (
        "".join((_PAGE / name).read_text(encoding="utf-8") for name in names)
        for names in (["index.html"], (f"{name}.css" for name in _STYLES), (f"{name}.js" for name in _SCRIPTS))
    )
    script = re.sub(r"^(import .*\n|export )", "", script, flags=re.MULTILINE)  # one file: its modules are one
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    page = re.sub(r"default-src [^\"]*", policy, re.sub(r" *<(link|script) .*\n", "", page))
    title_tag = f"<title>{html.escape(title)}</title>"
    page = page.replace("<title>dsa_engine</title>", title_tag).replace("<body>", '<body class="recorded">')
    page = page.replace("</head>", f"<style>\n{style}</style>\n</head>")
    scripts = (
        f'<script type="application/json" id="recorded">{recorded}</script>\n<script type="module">\n{script}</script>'
    )
    return page.replace("</body>", f"{scripts}\n</body>")
