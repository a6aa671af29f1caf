"""Conversations, and model folders with a tokenizer and nothing else, for the tests of prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dsa_engine.text.conversations.deepseek_v32 import TOKENS
from dsa_engine.text.conversations.released_texts import FILE

Message = dict[str, Any]

# The constants of the released file, with words of our own. Nothing else of the file may be run or matter.
RELEASED = '''
raise SystemExit("the file is run")
TOOLS_SYSTEM_TEMPLATE = """## Functions {{of}} <{dsml_token}function_calls> {thinking_start_token}…{thinking_end_token}
{tool_schemas}
"""
response_format_template: str = (
    "## Form\\n\\n"
    "{schema}"
)
'''


def write_v32_folder(folder: Path) -> Path:
    """A folder of DeepSeek-V3.2 without weights: a tokenizer of bytes and the special tokens, and the released file."""
    write_folder(folder)
    (folder / FILE).parent.mkdir()
    (folder / FILE).write_text(RELEASED)
    return folder


def write_folder(
    folder: Path, chat_template: str | None = None, words: Sequence[str] = TOKENS, added: Sequence[str] = ()
) -> None:
    """A tokenizer of bytes. ``words``: special tokens; ``added``: further ones that are not special, as tags are in
    released tokenizers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate([*words, *added, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(words))
    backend.add_tokens(list(added))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": words[0], "eos_token": words[1]}
    config |= {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def says(role: str, content: str | None = None, thought: str | None = None, **more: Any) -> Message:
    return {"role": role, "content": content, **({"reasoning_content": thought} if thought else {}), **more}


def calls(*named: tuple[str, Any]) -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)} for name, given in named
    ]
    return {"tool_calls": [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)]}


WEATHER: Message = {"type": "function", "function": {"name": "weather", "parameters": {"ort": "ä", "n": [1, None]}}}
TIME: Message = {"type": "function", "function": {"name": "time", "description": 'a "b"\n'}}
CITY = calls(("weather", {"city": 'Köln "am" Rhein\n<', "days": 3, "of": ["ä", {"x": None}], "now": True}))
BOTH = calls(("weather", {"city": "Rom"}), ("time", "{}"))
FORM = {"type": "object", "properties": {"größe": {"type": "number"}}}
USER, OTHER = says("user", "Hello"), says("user", "And {then}?\n")

CONVERSATIONS: dict[str, list[Message]] = {
    "a question": [USER],
    "an empty question": [says("user", "")],
    "two questions": [USER, OTHER],
    "a system prompt": [says("system", "Be {brief}."), USER],
    "only a system prompt": [says("system", "Be brief.")],
    "a second system prompt": [says("system", "A"), USER, says("system", "B"), OTHER],
    "an answer": [USER, says("assistant", "Hi", "t")],
    "old answers": [USER, says("assistant", "Hi"), OTHER, says("assistant", "So."), USER],
    "old thoughts": [USER, says("assistant", "Hi", "a thought"), OTHER, says("assistant", "So.", "other"), USER],
    "tools": [says("system", "S", tools=[WEATHER, TIME]), USER],
    "a form": [says("system", "S", response_format=FORM), USER],
    "tools and a form": [says("system", "", tools=[TIME], response_format=FORM), USER],
    "a developer": [says("developer", "Search!")],
    "a developer with tools": [says("system", "S"), says("developer", "D", tools=[WEATHER], response_format=FORM)],
    "an old developer": [says("developer", "D", tools=[TIME]), says("assistant", "A", "t"), USER],
    "a developer after a user": [USER, says("assistant", "A", "t"), says("developer", "D")],
    "a call": [USER, says("assistant", None, "t", **CITY)],
    "a call without a thought": [USER, says("assistant", "Let me see.", **CITY)],
    "a result": [USER, says("assistant", "", "t", **CITY), says("tool", "12°")],
    "two results": [USER, says("assistant", "So:", "t", **BOTH), says("tool", "12°"), says("tool", "")],
    "one result of two": [USER, says("assistant", None, "t", **BOTH), says("tool", "12°")],
    "an answer after results": [
        USER,
        says("assistant", None, "t", **BOTH),
        *(says("tool", "12°"), says("tool", "now")),
        says("assistant", "It is 12°", "u"),
    ],
    "calls twice": [
        says("system", "S", tools=[WEATHER, TIME]),
        USER,
        says("assistant", None, "t", **CITY),
        says("tool", "12°"),
        says("assistant", "One more", "u", **BOTH),
        *(says("tool", "a"), says("tool", "b")),
    ],
    "old results": [
        USER,
        says("assistant", None, "t", **BOTH),
        *(says("tool", "12°"), says("tool", "now")),
        says("assistant", "It is", "u"),
        OTHER,
    ],
}
