"""The forms of thoughts and tool calls, by the names that vLLM has for them, and which of them a template has."""

from __future__ import annotations

from dsa_engine.text.conversations.deepseek_v32 import TAG
from dsa_engine.text.conversations.reader import THINK_END, Thought
from dsa_engine.text.conversations.tool_calls import CallForm, JsonCalls, PairedCalls, TaggedCalls

# How an answer begins, where its prompt does not say it; deepseek_v3 is also for V3.1 and V3.2, whose prompts do.
REASONING_PARSERS = {
    "deepseek_r1": Thought.OPEN,
    "deepseek_v3": Thought.POSSIBLE,
    "glm45": Thought.POSSIBLE,
    "glm47": Thought.POSSIBLE,
    "none": Thought.NONE,
}

# deepseek_v3 is also for R1, deepseek_v31 for V3.2-Exp, glm47 for GLM-5.
TOOL_CALL_PARSERS: dict[str, CallForm | None] = {
    "deepseek_v3": JsonCalls(fenced=True),
    "deepseek_v31": JsonCalls(),
    "deepseek_v32": TaggedCalls(),
    "glm45": PairedCalls(),
    "glm47": PairedCalls(),
    "none": None,
}


def tool_call_parser_of(template: str) -> str:
    """The parser for the tool calls that a chat template writes."""
    if TAG in template:
        return "deepseek_v32"
    if "<arg_key>" in template:
        return "glm47"
    if "<｜tool▁sep｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return "none"


def reasoning_parser_of(template: str) -> str:
    """The parser for the thoughts that a chat template writes."""
    if THINK_END not in template:
        return "none"
    return {"deepseek_v3": "deepseek_r1", "glm47": "glm45"}.get(tool_call_parser_of(template), "deepseek_v3")
