"""A tiny server with the OpenAI API in a thread: it answers with "word" and knows what a real one counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PAGE = 4  # words


class OpenAIServer(ThreadingHTTPServer):
    """Has two tokens for a word, three for a chat's template, and a prefix cache in pages of 4 words.

    Attributes:
        bodies: the requests so far, with their "path" and "authorization".
        fault: what is wrong with the next answers of prompts of more than ``fault_words`` words; "": nothing.
        at_once: maximum number of requests so far that were answered at the same time.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.fault, self.fault_words = "", 200
        self.now = self.at_once = 0
        self.lock = threading.Lock()
        self._pages: set[tuple[Any, ...]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def cached_words(self, salt: str | None, words: list[str]) -> int:
        """Number of the first words that earlier prompts with this salt have, all but the last; stores the prompt."""
        pages = [(salt, *words[:end]) for end in range(_PAGE, len(words) + 1, _PAGE)]
        hits = 0
        while hits < (len(words) - 1) // _PAGE and pages[hits] in self._pages:
            hits += 1
        self._pages.update(pages)
        return hits * _PAGE


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "tiny"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, about = self.server, {"path": self.path, "authorization": self.headers["Authorization"]}
        with server.lock:
            server.bodies.append(body | about)
            server.now += 1
            server.at_once = max(server.at_once, server.now)
        try:
            self._answer(body)
        finally:
            with server.lock:
                server.now -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        chat, server = self.path.endswith("chat/completions"), self.server
        texts = [message["content"] for message in body["messages"]] if chat else [body["prompt"]]
        words = [word for text in texts for word in text.split()]
        fault = server.fault if len(words) > server.fault_words else ""
        if fault == "refused":
            return self._whole(429, {"error": {"message": "too many requests", "type": "rate_limit"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with server.lock:
            cached = server.cached_words(body.get("cache_salt"), words)
        tokens = body["max_completion_tokens" if chat else "max_tokens"]
        for data in self._events(chat, 2 * len(words) + 3 * chat, 2 * cached, tokens, fault):
            self.wfile.write(data.encode())
            self.wfile.flush()

    def _events(self, chat: bool, prompt: int, cached: int, tokens: int, fault: str) -> Iterator[str]:
        def event(text: str, finish: str | None = None, **delta: str) -> str:
            said: dict[str, Any] = {"delta": delta | {"content": text}} if chat else {"text": text}
            return f"data: {json.dumps({'choices': [said | {'index': 0, 'finish_reason': finish}]})}\n\n"

        yield ": a comment\n\n"
        if chat:
            yield event("", role="assistant")
        for number in range(tokens - (fault == "silent end")):
            yield event(" word")
            if fault == "cut":
                return
            if fault == "event" and number:
                yield f"data: {json.dumps({'error': {'message': 'a rank has died'}})}\n\n"
                return
            if fault == "garbage":
                yield "data: {no JSON\n\n"
        yield event("", "length")
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        if fault != "no details":
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if fault != "no usage":
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _whole(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def openai_server() -> Iterator[OpenAIServer]:
    """A server that runs until the end of the block."""
    with OpenAIServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
