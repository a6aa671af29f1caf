"""The application: routes, the page, the key, and the readiness of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from dsa_engine.config.checks import shown
from dsa_engine.server.admission import Admission
from dsa_engine.server.body import BodyReader
from dsa_engine.server.errors import ApiError, add_handlers, bad_request, failed
from dsa_engine.server.forms.chat import ChatForm
from dsa_engine.server.forms.completions import CompletionForm
from dsa_engine.server.forms.tokens import detokenize, tokenize
from dsa_engine.server.generation import Form, Generation
from dsa_engine.server.key import KeyCheck
from dsa_engine.server.metrics import Metrics
from dsa_engine.server.options import ServerOptions, read_template
from dsa_engine.server.remote.client import EngineClient
from dsa_engine.system.sizes import parse_bytes
from dsa_engine.text.conversations import conversation_format
from dsa_engine.version import __version__

PAGE = Path(__file__).parent / "page"
_REVALIDATED = {"Cache-Control": "no-cache"}  # a browser asks whether its copy is that of this version


class Server:
    """What the routes share.

    Args:
        llm: the engine.
        options: the server's.

    Raises:
        ValueError: a parser or the chat template is not possible.
    """

    def __init__(self, llm: EngineClient, options: ServerOptions):
        facts = llm.facts
        self.llm, self.options = llm, options
        self.names = options.served_model_name or [facts.model]
        self.created = int(time.time())
        self.admission = Admission(facts.max_num_seqs + options.max_waiting_requests, options.request_timeout)
        self.bodies = BodyReader(parse_bytes(options.max_body_size, "max_body_size"), options.body_timeout)
        self.metrics = Metrics(facts.pid, self.names[0])
        parsers = {"reasoning_parser": options.reasoning_parser, "tool_call_parser": options.tool_call_parser}
        self.conversation = None
        if llm.has_tokenizer:
            self.conversation = conversation_format(llm.folder, facts.config, **parsers, tokenizer=llm.tokenizer)
        self.chat_template = read_template(options.chat_template)

    def alive(self) -> ApiError | None:
        """None while the engine runs; otherwise the error that ended it."""
        try:
            self.llm.check()
        except BaseException as error:
            known = failed(error)
            if known.status == 503:
                return known
            return ApiError(503, f"the engine has ended: {type(error).__name__}: {error}")
        return None

    def model(self, body: dict[str, Any]) -> str:
        """The name of the model that a request asks for; raises :class:`ApiError` if it is not here."""
        name = body.get("model", self.names[0])
        if not isinstance(name, str):
            raise ValueError(f"model must be a text, not {shown(name)}")
        if name not in self.names:
            here = ", ".join(self.names)
            raise ApiError(404, f"the model {shown(name)} is not here; there is {here}", "model", "model_not_found")
        return name

    def chat(self, body: dict[str, Any]) -> ChatForm:
        """Parses a request to /v1/chat/completions."""
        if self.conversation is None:
            raise ValueError("the model's folder has no tokenizer; use /v1/completions with token ids")
        return ChatForm(self.llm, self.conversation, body, self.model(body), self.chat_template)

    def completion(self, body: dict[str, Any]) -> CompletionForm:
        """Parses a request to /v1/completions."""
        return CompletionForm(self.llm, body, self.model(body))

    async def generate(self, request: Request, parse: Callable[[dict[str, Any]], Form]) -> Response:
        """Answers a request that generates."""
        with self.admission.entering():  # refused before the body is read
            form = await self.parsed(request, parse)
        return Generation(self.llm, form, self.admission, self.metrics)

    async def parsed(self, request: Request, parse: Callable[[dict[str, Any]], Any]) -> Any:
        """What ``parse`` makes of a request's body, in a thread: encoding a long text takes a second."""
        async with self.bodies.read(request) as body:
            if body.get("chat_template") is not None and not self.options.trust_request_chat_template:
                words = "chat_template is taken from requests only by a server with --trust-request-chat-template"
                raise ApiError(400, words, "chat_template")
            try:
                return await asyncio.to_thread(parse, body)
            except (ValueError, TypeError) as error:
                raise bad_request(error, body) from error


def make_app(server: Server) -> FastAPI:
    """The application."""
    app = FastAPI(title="dsa_engine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_handlers(app)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(server, name) for name in server.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model_card(server, server.model({"model": name}))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await server.generate(request, server.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await server.generate(request, server.chat)

    @app.post("/tokenize")
    async def to_tokens(request: Request) -> dict[str, Any]:
        return await server.parsed(
            request, lambda body: tokenize(server.llm, server.conversation, body, server.chat_template)
        )

    @app.post("/detokenize")
    async def to_text(request: Request) -> dict[str, Any]:
        return await server.parsed(request, lambda body: detokenize(server.llm, body))

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        error = server.alive()
        return Response() if error is None else error.response

    @app.get("/ready")
    async def ready() -> Response:
        error = server.alive()
        if error is None and server.admission.draining:
            error = ApiError(503, "the server is shutting down")
        return Response() if error is None else error.response

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        state = await server.llm.state() if server.alive() is None else None
        return Response(server.metrics.text(state), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_page(app)
    if server.options.api_key is not None:
        app.add_middleware(KeyCheck, key=server.options.api_key)
    return app


def _model_card(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "dsa_engine",
        "root": server.llm.facts.model,
        "parent": None,
        "max_model_len": server.llm.facts.max_model_len,
    }


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_REVALIDATED)
        return response


def _add_page(app: FastAPI) -> None:
    """Serves the page, if it is installed: index.html at "/", the files beside it under "/page/"."""
    if (PAGE / "index.html").is_file():

        @app.get("/", include_in_schema=False)
        async def page() -> FileResponse:
            return FileResponse(PAGE / "index.html", headers=_REVALIDATED)

        app.mount("/page", _PageFiles(directory=PAGE))
