"""One request to an OpenAI server: what is sent, and what its stream says, when."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from dsa_engine.commands.bench.serving.result import latencies

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Server:
    """An OpenAI server.

    Attributes:
        url: the address of its completions or chat completions.
        chat: which of the two.
        model: the name of the model.
        ignore_eos: whether requests say so; not every server knows the parameter.
    """

    url: str
    chat: bool
    model: str
    ignore_eos: bool

    def body(self, messages: list[str], output_len: int, salt: str | None) -> dict[str, Any]:
        """The JSON of a request, as ``vllm bench serve`` sends it.

        Args:
            messages: texts of the user and of the model in turn; the last is the user's.
            salt: ``cache_salt``; None: not sent.
        """
        body: dict[str, Any] = {"model": self.model, "temperature": 0.0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.chat:
            roles = [("user", "assistant")[number % 2] for number in range(len(messages))]
            body["messages"] = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]
            body["max_completion_tokens"] = output_len
        else:
            # An answer follows its question at once, as the tokens that the server has cached.
            spaced = [text if number == 0 or number % 2 else f" {text}" for number, text in enumerate(messages)]
            body |= {"prompt": "".join(spaced), "max_tokens": output_len}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body if salt is None else body | {"cache_salt": salt}


@dataclass
class Answer:
    """The answer to one request.

    Attributes:
        begin: time at which it was sent.
        token_times: times of the events with tokens.
        silent_end: time of the event that ended the answer, if it has no text.
        text: what the model said, without its thoughts.
        usage: the server's count of tokens; None if it sent none.
        finished: whether the stream came to its end.
        error: why there is no whole answer; None if there is.
    """

    begin: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)
    silent_end: float | None = None
    text: str = ""
    usage: dict[str, Any] | None = None
    finished: bool = False
    error: str | None = None

    async def read(self, client: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> Answer:
        """Sends the request and reads the stream; never raises for what a server may do."""
        self.begin = time.perf_counter()
        try:
            async with client.stream("POST", server.url, json=body) as response:
                if response.status_code != 200:
                    self.error = error_text(response.status_code, await response.aread())
                else:
                    await self._read(response.aiter_lines())
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            self.error = f"{type(error).__name__}: {error}".removesuffix(": ")
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            self.error = f"the stream is not that of the OpenAI API: {type(error).__name__}: {error}"
        if self.error is None:
            self.error = self._missing()
        return self

    def to_json(self) -> dict[str, Any]:
        """Counts and times, as :class:`.result.ServingResult` has them for a request."""
        usage = self.usage or {}
        tokens = usage.get("completion_tokens") or 0
        counts = {
            "input_len": usage.get("prompt_tokens") or 0,
            "output_len": tokens,
            "num_cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "error": self.error,
        }
        if self.error is not None:
            return counts
        silent = [self.silent_end] if self.silent_end is not None and len(self.token_times) < tokens else []
        return counts | latencies(self.begin, self.token_times + silent, tokens)

    async def _read(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            if not line.startswith("data:"):
                continue  # a comment, which keeps the connection alive, or an empty line
            data = line[5:].strip()
            if data == "[DONE]":
                self.finished = True
                return
            self._take(json.loads(data), time.perf_counter())
            if self.error is not None:
                return

    def _take(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            self.error = f"error in the stream: {_message(event['error'])}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            said = choice.get("delta") or choice
            text = said.get("content" if "delta" in choice else "text") or ""
            self.text += text
            self.finished = self.finished or choice.get("finish_reason") is not None
            thought = said.get("reasoning_content") or said.get("reasoning") or said.get("tool_calls")
            # An event without text can hold a token, such as a special one or a part of a character. The one that
            # announces a message does not; of the one that ends it only the number of tokens tells.
            if text or thought or not ("role" in said or choice.get("finish_reason")):
                self.token_times.append(now)
            elif choice.get("finish_reason"):
                self.silent_end = now

    def _missing(self) -> str | None:
        if not self.finished:
            return "the stream ended before the answer did"
        if not self.usage or not self.usage.get("prompt_tokens"):
            return "the server sent no usage, so tokens cannot be counted; it must know stream_options.include_usage"
        if not self.token_times and (self.silent_end is None or not self.usage.get("completion_tokens")):
            return "the answer has no token"
        return None


def error_text(status: int, body: bytes) -> str:
    """The words of a response that is not 200: the status, and the message of an error in OpenAI's form."""
    try:
        message = _message(json.loads(body).get("error"))
    except (ValueError, AttributeError):
        message = body.decode("utf-8", "replace")
    return f"HTTP {status}: {message.strip()[:300]}".removesuffix(": ")


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error or "")
