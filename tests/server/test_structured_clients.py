"""Structured output through the clients that agents use: ``parse`` of openai, and langchain-openai, which sends tools,
``tool_choice``, ``strict`` and ``parallel_tool_calls`` by itself."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from dsa_engine import LLM

HELLO: Any = [{"role": "user", "content": "Which weather?"}]


class Weather(BaseModel):
    """The weather of a place."""

    unit: Literal["C", "F"]
    degrees: int = Field(ge=-40, le=60)
    wind: Literal["calm", "storm"] | None


class Answer(BaseModel):
    days: list[Weather] = Field(min_length=1, max_length=2)


@pytest.mark.slow
def test_clients(serve: Any, llm: LLM) -> None:
    langchain = pytest.importorskip("langchain_openai")
    tools = pytest.importorskip("langchain_core.tools")
    messages = pytest.importorskip("langchain_core.messages")
    server = serve(llm, tool_call_parser="deepseek_v31", served_model_name=["demo"])
    where: dict[str, Any] = {"base_url": f"{server.base_url}/v1", "api_key": "none", "max_retries": 0}

    parsed = OpenAI(**where).chat.completions.parse(
        model="demo", messages=HELLO, response_format=Answer, temperature=1.0, seed=1, max_tokens=600
    )
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer) and 1 <= len(answer.days) <= 2

    chat = langchain.ChatOpenAI(model="demo", temperature=1.0, seed=3, max_tokens=600, **where)
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            weather = chat.with_structured_output(Weather, method=method, strict=strict).invoke("Which weather?")
            assert isinstance(weather, Weather), method

    @tools.tool
    def temperature(unit: Literal["C", "F"]) -> str:
        """The temperature now."""
        return f"12 °{unit}"

    # A loop as agents have it: the model must call, the result goes back, and then it answers.
    conversation: list[Any] = [messages.HumanMessage("How warm is it?")]
    asked = chat.bind_tools([temperature], tool_choice="required").invoke(conversation)
    assert asked.tool_calls and all(call["name"] == "temperature" for call in asked.tool_calls)
    conversation += [asked, *(temperature.invoke(call) for call in asked.tool_calls)]
    assert conversation[-1].content in ("12 °C", "12 °F")
    named = chat.bind_tools([temperature], tool_choice="temperature", parallel_tool_calls=False)
    assert len(named.invoke(conversation).tool_calls) == 1
    pieces = list(named.stream(conversation))
    (call,) = sum(pieces[1:], pieces[0]).tool_calls
    assert call["name"] == "temperature" and call["args"]["unit"] in ("C", "F")
    assert chat.bind_tools([temperature]).invoke(conversation, max_tokens=5).content is not None
