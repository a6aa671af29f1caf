"""Sends the load of the serving benchmark to a server with the OpenAI API, as ``vllm bench serve`` does.

A time begins when the request is sent and counts network, HTTP and tokenizing. Tokens are counted by the server's
``usage``. Two first requests tell how many tokens a word has, so that prompts have the asked lengths on average.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import httpx

from dsa_engine.commands.bench.serving.answer import ENDPOINTS, Server, error_text
from dsa_engine.commands.bench.serving.load import WORDS, Conversation, arrivals, conversations, warmup
from dsa_engine.commands.bench.serving.result import NOT_SENT
from dsa_engine.system.progress import progress_bar

_TIMEOUT = httpx.Timeout(6 * 3600.0, connect=60.0)  # a prompt of a million tokens may wait for hours
_SHORT = 8  # words of the first of the two prompts that calibrate


async def send_load(args: argparse.Namespace) -> tuple[Traffic, dict[str, Any]]:
    """Sends all requests, and waits for their answers.

    The key of the environment's ``OPENAI_API_KEY`` is sent, if there is one.

    Args:
        args: the options of ``command.add_arguments``.

    Returns:
        what was sent and answered; and the server, for the report.

    Raises:
        ValueError: the server cannot be reached, or refuses a first request; nothing has been measured.
    """
    base = args.base_url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must be such as http://127.0.0.1:8000, not {args.base_url!r}")
    url = base + "/" + (args.endpoint or ENDPOINTS[args.backend]).lstrip("/")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, headers=headers) as client:
        model = args.model or await _first_model(client, base)
        server = Server(url, args.backend == "openai-chat", model, args.ignore_eos)
        tokens_a_word = await _tokens_a_word(client, server)
        traffic = Traffic(client, server, args)
        await traffic.run(1 / tokens_a_word)
    return traffic, {"url": url, "backend": args.backend, "model": model, "tokens_a_word": tokens_a_word}


class Traffic:
    """The requests of a load.

    Attributes:
        requests: in order of conversation and turn, these two numbers and the figures of :meth:`.Answer.to_json`.
        duration: seconds from the first request until all had ended.
        max_at_once: maximum number of requests at once.
    """

    def __init__(self, client: httpx.AsyncClient, server: Server, args: argparse.Namespace):
        self.requests: list[dict[str, Any]] = []
        self.duration = 0.0
        self.max_at_once = self._now = 0
        self._client, self._server, self._args = client, server, args
        self._salt = None if args.prefix_hits == "on" else secrets.token_hex(8)
        self._slots = asyncio.Semaphore(args.max_concurrency or 1_000_000_000)

    async def run(self, words_per_token: float) -> None:
        """Sends each conversation when it arrives, or as soon as ``--max-concurrency`` allows."""
        args = self._args
        for _ in range(args.num_warmups):
            await self._converse(-1, warmup(args, words_per_token), 0.0, lambda done: None)
        self.requests, self.max_at_once = [], 0
        load = conversations(args, words_per_token)
        count = sum(len(one.questions) for one in load)
        with progress_bar(count, "requests", "serving", not args.no_progress) as bar:
            begin = time.perf_counter()
            starts = [begin + arrival for arrival in arrivals(args, len(load))]
            await asyncio.gather(*(self._converse(i, load[i], starts[i], bar.update) for i in range(len(load))))
            self.duration = time.perf_counter() - begin
        self.requests.sort(key=lambda request: (request["conversation"], request["turn"]))

    async def _converse(
        self, number: int, conversation: Conversation, start: float, done: Callable[[int], object]
    ) -> None:
        """Sends the requests of a conversation from ``start`` on, one after the other, until one fails."""
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        async with self._slots:
            self._now += 1
            self.max_at_once = max(self.max_at_once, self._now)
            messages: list[str] = []
            error = None
            for turn, question in enumerate(conversation.questions):
                about = {"conversation": number, "turn": turn}
                if error is not None:  # its prompt would contain the answer that has failed
                    self.requests.append(about | {"input_len": 0, "output_len": 0, "error": NOT_SENT})
                    continue
                messages.append(question)
                salt = self._salt and f"{self._salt} {number} {turn}"
                body = self._server.body(messages, conversation.output_lens[turn], salt)
                answer = await self._server.ask(self._client, body)
                self.requests.append(about | answer.to_json())
                messages.append(answer.text)
                error = answer.error
                done(1)
            self._now -= 1


async def _first_model(client: httpx.AsyncClient, base: str) -> str:
    """The first model that the server lists."""
    try:
        response = await client.get(f"{base}/v1/models")
        if response.status_code != 200:
            raise ValueError(error_text(response.status_code, response.content))
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{base}/v1/models names no model ({type(error).__name__}: {error}); start a server there, such as "
            "dsa-engine serve, or give its --base-url"
        ) from error


async def _tokens_a_word(client: httpx.AsyncClient, server: Server) -> float:
    """Tokens of a word on average, by the difference of two prompts; what a chat's template adds is in both."""
    counts = []
    for words in (_SHORT, len(WORDS)):
        answer = await server.ask(client, server.body([" ".join(WORDS[:words])], 1, None))
        if answer.error is not None:
            raise ValueError(f"{server.url} refused a first request for the model {server.model!r}: {answer.error}")
        counts.append(answer.usage["prompt_tokens"])
    return max(counts[1] - counts[0], 1) / (len(WORDS) - _SHORT)
