"""The serving benchmark over HTTP: any server with the OpenAI API, measured as ``vllm bench serve`` measures it.

A time begins when the request is sent and counts network, HTTP and tokenizing. Tokens are counted by the server's
``usage``. As the server's tokenizer is not at hand, prompts are random words. Two first requests tell how many tokens a
word has, so that prompts have the asked lengths on average.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from dsa_engine.commands.bench.serving.answers import ENDPOINTS, Answer, Server, error_text
from dsa_engine.commands.bench.serving.load import Conversation, ServingLoad
from dsa_engine.commands.bench.serving.result import ServingResult
from dsa_engine.commands.bench.serving.words import WORDS, text_of
from dsa_engine.system.progress import progress_bar

_TIMEOUT = httpx.Timeout(6 * 3600.0, connect=60.0)  # a prompt of a million tokens may wait for hours
_SHORT = 8  # words of the first of the two prompts that calibrate


def measure_server(
    base_url: str,
    backend: str,
    endpoint: str | None,
    model: str | None,
    load: ServingLoad,
    goals: Mapping[str, float] | None = None,
    warmup: int = 1,
    passes: tuple[bool, ...] = (True,),
    progress: bool = True,
) -> tuple[list[ServingResult], dict[str, Any]]:
    """Sends the requests of ``load`` to a server, once for each of ``passes``.

    The key of the environment's ``OPENAI_API_KEY`` is sent, if there is one.

    Args:
        base_url: such as ``http://127.0.0.1:8000``.
        backend: "openai" (completions) or "openai-chat".
        endpoint: the path; None: the usual one of the backend.
        model: the model's name; None: the first that the server lists.
        goals, warmup: see :func:`.in_process.measure_serving`.
        passes: whether requests may use what others have computed; False gives each its own ``cache_salt``. With
            several passes each has salts of its own, so that none finds what another has left.
        progress: whether to show it.

    Returns:
        the result of each pass, and what was measured, for the report.

    Raises:
        ValueError: the server cannot be reached, or refuses a first request; nothing has been measured.
    """
    base = base_url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must be such as http://127.0.0.1:8000, not {base_url!r}")
    url = base + "/" + (endpoint or ENDPOINTS[backend]).lstrip("/")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def measure() -> tuple[list[ServingResult], dict[str, Any]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, headers=headers) as client:
            name = model or await _first_model(client, base)
            server = Server(url, backend == "openai-chat", name, load.ignore_eos)
            per_token = 1 / await _tokens_a_word(client, server)
            run, results = secrets.token_hex(8), []
            for hits in passes:
                salt = f"{run} {hits}" if len(passes) > 1 else None
                traffic = _Traffic(client, server, load, per_token, hits, salt)
                results.append(await traffic.measure(dict(goals or {}), warmup, progress))
            about = {"url": url, "backend": backend, "model": name, "tokens_a_word": 1 / per_token}
            return results, about

    return asyncio.run(measure())


class _Traffic:
    """The requests of one pass. ``salt`` is that of all of them; None: they have none."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        server: Server,
        load: ServingLoad,
        per_token: float,
        hits: bool,
        salt: str | None,
    ):
        self._client, self._server, self._load = client, server, load
        self._per_token, self._hits = per_token, hits
        self._salt = salt or secrets.token_hex(8) if not hits else salt
        self._requests: list[dict[str, Any]] = []
        self._now = self._max_at_once = 0
        self._slots = asyncio.Semaphore(load.max_concurrency or 1_000_000_000)

    async def measure(self, goals: dict[str, float], warmup: int, progress: bool) -> ServingResult:
        load, words = self._load, len(WORDS)
        conversations = load.conversations(words, self._per_token)
        for _ in range(warmup):
            await self._converse(-1, load.warmup(words, self._per_token), 0.0, lambda done: None)
        self._requests, self._max_at_once = [], 0
        count, title = (
            sum(len(one.questions) for one in conversations),
            "serving" if self._hits else "serving without hits",
        )
        with progress_bar(count, "requests", title, progress) as bar:
            begin = time.perf_counter()
            starts = [begin + arrival for arrival in load.arrivals()]
            everything = zip(range(len(starts)), conversations, starts, strict=True)
            await asyncio.gather(*(self._converse(*one, bar.update) for one in everything))
            duration = time.perf_counter() - begin
        return ServingResult.of(load, duration, None, self._requests, self._max_at_once, goals)

    async def _converse(
        self, number: int, conversation: Conversation, start: float, done: Callable[[int], object]
    ) -> None:
        """Sends the requests of a conversation from ``start`` on, one after the other, until one fails."""
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        async with self._slots:
            self._now += 1
            self._max_at_once = max(self._max_at_once, self._now)
            messages: list[str] = []
            for turn, question in enumerate(conversation.questions):
                messages.append(text_of(question))
                salt = self._salt if self._hits else f"{self._salt} {number} {turn}"
                body = self._server.body(messages, conversation.output_lens[turn], salt)
                answer = await Answer().read(self._client, self._server, body)
                self._requests.append({"conversation": number, "turn": turn} | answer.to_json())
                done(1)
                if answer.error is not None:
                    break
                messages.append(answer.text)
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
            f"{base}/v1/models names no model ({type(error).__name__}: {error}); check --base-url, or give --model"
        ) from error


async def _tokens_a_word(client: httpx.AsyncClient, server: Server) -> float:
    """Tokens of a word on average, by the difference of two prompts; what a chat's template adds is in both."""
    counts = []
    for words in (_SHORT, len(WORDS)):
        answer = await Answer().read(client, server, server.body([" ".join(WORDS[:words])], 1, None))
        if answer.error is not None:
            raise ValueError(f"{server.url} refused a first request for the model {server.model!r}: {answer.error}")
        assert answer.usage is not None  # otherwise there is an error
        counts.append(answer.usage["prompt_tokens"])
    return max(counts[1] - counts[0], 1) / (len(WORDS) - _SHORT)
