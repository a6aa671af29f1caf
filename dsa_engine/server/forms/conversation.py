"""One request to go on with a conversation: what chat completions, responses and messages have in common.

Each of these endpoints is a reader, which makes a :class:`.protocol.ChatRequest` of its body, and a writer of an answer
and of its events. What is between them is here.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any, ClassVar, Generic, TypeVar

from dsa_engine.config.checks import shown
from dsa_engine.outputs import CompletionOutput, StreamPiece
from dsa_engine.server.client import EngineClient
from dsa_engine.server.forms.form import Form
from dsa_engine.server.forms.parts import chat_logprobs
from dsa_engine.server.forms.protocol import ChatRequest, RequestBody
from dsa_engine.text.conversations import ConversationFormat, MessageDelta, MessageReader
from dsa_engine.text.conversations.reader import THINK_END

Given = TypeVar("Given", bound=RequestBody)


class ConversationForm(Form, Generic[Given]):
    """What a request with a conversation asks for. ``given``: its body; ``asked``: the chat request that asks for the
    same; ``chat_template``: None for the model's."""

    prefix: ClassVar[str]  # of the answer's id

    def __init__(
        self,
        llm: EngineClient,
        conversation: ConversationFormat,
        given: Given,
        asked: ChatRequest,
        model: str,
        chat_template: str | None,
    ):
        super().__init__(asked)
        self._given, self._asked = given, asked
        self._tools, self._must_call = _tools(asked)
        self._several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, dict)
        self._think_end = conversation.tokenizer.tags.get(THINK_END)
        self.params = asked.sampling({"max_tokens": None} | llm.default_sampling, **self._sampling())
        if conversation.needs_special_tokens:
            self.params.skip_special_tokens = False
        self._conversation = conversation
        self._prompt_text = conversation.render(
            **asked.rendering, chat_template=chat_template, tools=self._tools, response_format=asked.response_format
        )
        self.params.structured_outputs = conversation.form_of(
            self._prompt_text, self.params.structured_outputs, self._must_call, self._several
        )
        ids = asked.cut(llm.encode_prompt(self._prompt_text, add_special_tokens=False), llm.facts.limits.max_model_len)
        prompt = {"prompt": self._prompt_text, "prompt_token_ids": ids}
        self.prompts = [prompt if asked.cache_salt is None else prompt | {"cache_salt": asked.cache_salt}]
        self._head = {"id": f"{self.prefix}{asked.request_name}", "created": int(time.time()), "model": model}
        self._readers: dict[int, MessageReader] = {}
        self._kinds: defaultdict[int, set[str]] = defaultdict(set)  # of what has come of each output
        self._in_thought: Counter[int] = Counter()  # tokens of each output before its answer

    def _sampling(self) -> dict[str, Any]:
        """The sampling parameters that conversations have under other names."""
        asked, budget = self._asked, None
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true, or leave it out")
        if isinstance(asked.thinking, dict) and self._think_end is not None:  # clients ask any model for a thought
            budget = asked.thinking.get("budget_tokens")
        logprobs = asked.top_logprobs or 0 if asked.logprobs else None
        given = {"max_tokens": asked.max_completion_tokens, "thinking_token_budget": budget, "logprobs": logprobs}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def _reasoning_tokens(self) -> int:
        return sum(self._in_thought[index] for index, kinds in self._kinds.items() if "reasoning" in kinds)

    def _read(self, output: CompletionOutput | StreamPiece) -> list[MessageDelta]:
        """What further text of an output adds to its message; counts the tokens of its thought."""
        index = output.index
        if index not in self._readers:
            how = self._tools, self._several, self._must_call
            self._readers[index] = self._conversation.reader(self._prompt_text, *how)
        reader = self._readers[index]
        deltas = reader.push(output.text)
        if output.finish_reason is not None:
            deltas += reader.finish(output.finish_reason == "stop")
        if not (kinds := self._kinds[index]) - {"reasoning"}:
            ids, end = list(output.token_ids), self._think_end
            self._in_thought[index] += ids.index(end) + 1 if end in ids else len(ids)
            kinds |= {"content"} if end in ids else set()
        kinds |= {delta.kind for delta in deltas}
        return deltas

    def _logprobs(self, output: CompletionOutput | StreamPiece) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        top, as_ids = self._asked.top_logprobs or 0, self._asked.return_tokens_as_token_ids
        return chat_logprobs(output.token_ids, output.logprobs, top, as_ids)

    def _finish_reason(self, output: CompletionOutput | StreamPiece) -> str | None:
        """Calls end an answer only if it is whole: "length" tells a client that the last call is cut."""
        called = "call" in self._kinds[output.index]
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


def _tools(asked: ChatRequest) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None]:
    """The tools that the model may call, None if there are none or ``tool_choice`` is "none"; and those of which it
    must call one, None if it need not."""
    choice, tools = asked.tool_choice, asked.tools
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice not in (None, "auto", "none", "required") and name is None:
        raise ValueError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}, not "
            f"{shown(choice)}"
        )
    if choice not in (None, "none") and not tools:
        raise ValueError("tool_choice needs tools; give some, or leave it out")
    names = [of.get("name") if isinstance(of := tool.get("function"), dict) else None for tool in tools]
    must_call = tools if choice == "required" else None
    if name is not None:
        must_call = [tool for tool, other in zip(tools, names, strict=True) if other == name]
        if not must_call:
            raise ValueError(f"tool_choice names {shown(name)}; the tools are {', '.join(map(str, names))}")
    return tools if tools and choice != "none" else None, must_call
