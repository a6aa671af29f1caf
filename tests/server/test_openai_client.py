"""The examples of the ``openai`` client, unchanged but for address and model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from dsa_engine import LLM, SamplingParams

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get current temperature for a given location.",
            "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
        },
    }
]


@pytest.fixture
def client(server: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def test_chat(client: OpenAI, llm: LLM) -> None:
    (wanted,) = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=9))
    completion = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=9)
    assert completion.choices[0].message.content == wanted.text
    assert completion.usage is not None and completion.usage.completion_tokens == 9
    assert completion.usage.prompt_tokens_details is not None
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    assert text == wanted.text and usage is not None and usage.total_tokens == len(wanted.prompt_token_ids) + 9


def test_completions(client: OpenAI, llm: LLM) -> None:
    (wanted,) = llm.generate(["Once upon"], SamplingParams(temperature=0, max_tokens=9))
    given: Any = {"model": "demo", "prompt": "Once upon", "temperature": 0, "max_tokens": 9, "logprobs": 1}
    choice = client.completions.create(**given, extra_body={"top_k": 5, "ignore_eos": False}).choices[0]
    assert choice.text == wanted.text and choice.logprobs is not None
    assert "".join(part.choices[0].text for part in client.completions.create(**given, stream=True)) == wanted.text


def test_tools(client: OpenAI) -> None:
    """A random model calls nothing; that calls are read is in test_chat.py."""
    given: Any = {"model": "demo", "messages": HELLO, "tools": TOOLS, "max_tokens": 3, "temperature": 0}
    completion = client.chat.completions.create(**given, tool_choice="auto")
    assert completion.choices[0].message.tool_calls is None
    with client.chat.completions.stream(**given) as stream:
        assert [event.type for event in stream][-1] == "content.done"
    called: Any = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "14 °C"},
    ]
    template = "{{ tools }}{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }};{% endfor %}"
    completion = client.chat.completions.create(
        **given | {"messages": called}, extra_body={"chat_template": template, "return_token_ids": True}
    )
    assert completion.choices[0].finish_reason in ("stop", "length")


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not here"):
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="the type text, json_object or json_schema") as caught:
        client.chat.completions.create(model="demo", messages=HELLO, response_format={"type": "yaml"})  # type: ignore
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    assert [model.id for model in client.models.list()] == ["demo", "other"]
    for call in (
        lambda: client.embeddings.create(model="demo", input="a"),
        lambda: client.moderations.create(model="demo", input="a"),
    ):
        with pytest.raises(openai.NotFoundError, match="there are /v1/chat/completions"):
            call()


def test_many_tasks_and_cancellation(server: Any, llm: LLM) -> None:
    async def main() -> None:
        client = AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)

        async def ask(number: int) -> str:
            given: Any = {"model": "demo", "prompt": [number + 5, 7, 9], "max_tokens": 6, "temperature": 0}
            return (await client.completions.create(**given)).choices[0].text

        texts = await asyncio.gather(*[ask(number) for number in range(12)])
        params = SamplingParams(temperature=0, max_tokens=6)
        wanted = [out.text for out in llm.generate([[number + 5, 7, 9] for number in range(12)], params)]
        assert texts == wanted

        long: Any = {"model": "demo", "prompt": [5, 6], "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
        whole = asyncio.create_task(client.completions.create(**long))
        await _until(lambda: llm.engine.scheduler.has_work)
        whole.cancel()
        await _until(lambda: not llm.engine.scheduler.has_work)
        stream = await client.completions.create(**long, stream=True)
        async for _ in stream:
            break
        assert llm.engine.scheduler.has_work
        await stream.close()
        await _until(lambda: not llm.engine.scheduler.has_work)
        await client.close()

    steps = llm.loop.steps
    asyncio.run(main())
    assert llm.loop.steps - steps < 1000, "requests whose client has left ran on"
    assert 'finished_reason="abort",model_name="demo"} 2.0' in server.get("/metrics").text


async def _until(holds: Any) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        await asyncio.sleep(0.002)
