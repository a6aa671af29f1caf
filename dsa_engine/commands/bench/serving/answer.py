"""One request to an OpenAI server: what is sent, and what its stream says, when."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

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
            messages: texts of the user and of the model alternately; the last is the user's.
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

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        """Sends a request and reads the stream; never raises for what a server may do."""
        answer = Answer()
        try:
            async with client.stream("POST", self.url, json=body) as response:
                if response.status_code != 200:
                    answer.error = error_text(response.status_code, await response.aread())
                    return answer
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        answer.take(json.loads(data), time.perf_counter())
            answer.end()
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            answer.error = f"{type(error).__name__}: {error}".removesuffix(": ")
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            answer.error = f"the stream is not that of the OpenAI API: {type(error).__name__}: {error}"
        return answer


@dataclass
class Answer:
    """The answer to one request. Times are of ``time.perf_counter``.

    Attributes:
        begin: when it was sent.
        token_times: when events with tokens came.
        last: when the last event of the answer came, which may have no text but its last token.
        text: what the model said, without its thoughts.
        usage: the server's count of tokens; empty if it sent none.
        error: why there is no whole answer; None if there is.
    """

    begin: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)
    last: float | None = None
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    _finished: bool = False

    def take(self, event: dict[str, Any], now: float) -> None:
        """Takes an event of the stream."""
        if event.get("error"):
            self.error = self.error or f"error in the stream: {_message(event['error'])}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            said = choice.get("delta") or choice
            text = said.get("content" if "delta" in choice else "text") or ""
            thought = said.get("reasoning_content") or said.get("reasoning") or said.get("tool_calls")
            ending = choice.get("finish_reason") is not None
            self.text += text
            self._finished = self._finished or ending
            # An event without text can hold a token, such as a part of a character. The one that announces a message
            # does not, and the one that ending it may.
            if text or thought or not ("role" in said or ending):
                self.token_times.append(now)
            if self.token_times or ending:
                self.last = now

    def end(self) -> None:
        """The stream has ended: says in ``error`` what is missing."""
        if self.error is None and not self._finished:
            self.error = "the stream ended before the answer did"
        elif self.error is None and not self.usage.get("prompt_tokens"):
            self.error = "the server sent no usage, so tokens cannot be counted; it must know include_usage"

    def to_json(self) -> dict[str, Any]:
        """Counts of tokens and, without an error, seconds: "ttft", "e2el", "tpot" (None for a single token), "itl"."""
        tokens = self.usage.get("completion_tokens") or 0
        counts = {
            "input_len": self.usage.get("prompt_tokens") or 0,
            "output_len": tokens,
            "num_cached_tokens": (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "error": self.error,
        }
        if self.error is not None or self.last is None:
            return counts
        first = self.token_times[0] if self.token_times else self.last
        return counts | {
            "ttft": first - self.begin,
            "e2el": self.last - self.begin,
            "tpot": (self.last - first) / (tokens - 1) if tokens > 1 else None,
            "itl": [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)],
        }


def error_text(status: int, body: bytes) -> str:
    """The words of a response that is not 200: the status, and the message of an error in OpenAI's form."""
    try:
        message = _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace")
    return f"HTTP {status}: {message.strip()[:300]}"


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
