"""The application: routes, the page, the key, and what the routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.requests import ClientDisconnect

from dsa_engine.config.checks import shown
from dsa_engine.engine.calls.async_calls import PreparedPrompt
from dsa_engine.server.client import EngineClient
from dsa_engine.server.errors import ApiError, BodyLimit, EngineError, HostCheck, KeyCheck, add_handlers, bad_request
from dsa_engine.server.forms.chat import ChatForm
from dsa_engine.server.forms.completions import CompletionForm
from dsa_engine.server.forms.form import Form, to_json
from dsa_engine.server.forms.messages import CountRequest, MessagesForm, MessagesRequest
from dsa_engine.server.forms.protocol import (
    QUICK,
    AbortBody,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    RequestBody,
    TokenizeRequest,
)
from dsa_engine.server.forms.responses import ResponsesForm, ResponsesRequest
from dsa_engine.server.generation import Admission, Generation
from dsa_engine.server.metrics import Metrics
from dsa_engine.server.options import ServerOptions, read_template
from dsa_engine.text.conversations import ConversationFormat, conversation_format
from dsa_engine.version import __version__

PAGE = Path(__file__).parent / "page"
# A browser asks whether its copy is that of this version, and shows it in no page of another site.
_PAGE_HEADERS = {"Cache-Control": "no-cache", "X-Frame-Options": "DENY"}
_LONG_BODY = 2**18  # bytes: text of about 64K tokens
_LONG_BODIES_AT_ONCE = 2
_FORMS: dict[type, Any] = {ChatRequest: ChatForm, ResponsesRequest: ResponsesForm}  # of bodies with a conversation
_FORMS |= dict.fromkeys((MessagesRequest, CountRequest), MessagesForm)
_SHORT_BODY = 2**10


class Server:
    """What the routes share; ``number`` and ``counts``: see :class:`.generation.Admission`."""

    def __init__(
        self, llm: EngineClient, options: ServerOptions, number: int = 0, counts: MutableSequence[int] | None = None
    ):
        facts = llm.facts
        self.llm, self.options, self.number = llm, options, number
        self.names = options.served_model_name or [facts.model]
        self.created = int(time.time())
        self.admission = Admission(facts.max_num_seqs + options.max_waiting_requests, number, counts)
        self.metrics = Metrics(facts, self.names[0])
        parsers = {"reasoning_parser": options.reasoning_parser, "tool_call_parser": options.tool_call_parser}
        self._conversation = None
        if llm.has_tokenizer:
            self._conversation = conversation_format(llm.folder, facts.model_type, **parsers, tokenizer=llm.tokenizer)
        self._chat_template = read_template(options.chat_template)
        self._long_bodies = ThreadPoolExecutor(_LONG_BODIES_AT_ONCE, "dsa_engine long bodies")

    def model(self, name: str | None) -> str:
        """The name of the model that a request asks for; raises :class:`ApiError` if it is not here."""
        if name is not None and name not in self.names:
            here = ", ".join(self.names)
            raise ApiError(404, f"the model {shown(name)} is not here; there is {here}", "model", "model_not_found")
        return name or self.names[0]

    def card(self, name: str) -> dict[str, Any]:
        """The entry of a model in the list of models."""
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "dsa_engine", "parent": None}
        return card | {"root": self.llm.facts.model, "max_model_len": self.llm.facts.limits.max_model_len}

    def form(self, asked: Any) -> Any:
        """The form of a request that generates, by its body's type; raises ``ValueError`` or ``TypeError``."""
        model = self.model(asked.model)
        if isinstance(asked, CompletionRequest):
            return CompletionForm(self.llm, asked, model)
        chat: ChatRequest = asked.chat
        return _FORMS[type(asked)](self.llm, self._format(), asked, chat, model, self._template(chat))

    def _format(self) -> ConversationFormat:
        if self._conversation is None:
            raise ValueError("the model's folder has no tokenizer; use /v1/completions with token ids")
        return self._conversation

    def _template(self, asked: Conversation) -> str | None:
        if asked.chat_template is not None and not self.options.trust_request_chat_template:
            words = "chat_template is taken from requests only by a server with --trust-request-chat-template"
            raise ApiError(400, words, "chat_template")
        return asked.chat_template or self._chat_template

    def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or of a conversation; raises ``ValueError`` or ``TypeError``."""
        asked.further(set())
        if (asked.prompt is None) == (not asked.messages):
            raise ValueError("give prompt, a text, or messages, a conversation")
        tokenizer = self.llm.tokenizer
        if asked.prompt is not None:
            ids = self.llm.encode_prompt(asked.prompt, asked.add_special_tokens is not False)
        else:
            text = self._format().render(
                **asked.rendering, chat_template=self._template(asked), tools=asked.tools or None
            )
            ids = self.llm.encode_prompt(text, bool(asked.add_special_tokens))
        texts = tokenizer.hf.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        longest = self.llm.facts.limits.max_model_len
        return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}

    def detokenize(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids, and of each of them if it is wanted; raises ``ValueError``."""
        asked.further(set())
        vocab, longest = (limits := self.llm.facts.limits).vocab_size, limits.max_model_len
        if len(asked.tokens) > longest:
            raise ValueError(f"tokens has {len(asked.tokens)} ids, max_model_len is {longest}; send fewer")
        if wrong := next((token for token in asked.tokens if not 0 <= token < vocab), None):
            raise ValueError(f"tokens has {wrong}; the vocabulary has ids 0 … {vocab - 1}")
        tokenizer = self.llm.tokenizer
        texts = tokenizer.hf.convert_ids_to_tokens(asked.tokens) if asked.return_token_strs else None
        return {"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False), "token_strs": texts}

    def tokenizer_info(self) -> dict[str, Any]:
        """Special tokens and the chat template, by transformers' names; raises ``ValueError`` without a tokenizer."""
        hf = self.llm.tokenizer.hf
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        template = self._chat_template or hf.chat_template
        about = {name: getattr(hf, name) for name in names} | {"chat_template": template}
        return about | {"tokenizer_class": type(hf).__name__}

    async def generate(self, request: Request, asked: RequestBody) -> Response:
        self.llm.check()
        if (name := request.headers.get("x-request-id")) and asked.model_extra is not None:
            asked.model_extra.setdefault("request_id", name)

        def prepared(asked: RequestBody) -> tuple[Form, list[PreparedPrompt]]:
            form: Form = self.form(asked)
            if form.asked.stream and form.params.prompt_logprobs is not None:
                raise ValueError("prompt_logprobs are not streamed; leave them or stream out")
            prompts = self.llm.prepare(form.prompts, form.params, form.asked.priority)
            form.prompt_ids = [one.adds[0].prompt_ids for one in prompts]
            for ids in form.prompt_ids:
                form.asked.check_room(len(ids), self.llm.facts.limits.max_model_len)
            return form, prompts

        form, prompts = await self.parsed(request, asked, prepared)
        return Generation(self.llm, form, prompts, self.admission, self.metrics, self.options.request_timeout)

    async def parsed(self, request: Request, asked: RequestBody, parse: Callable[[Any], Any]) -> Any:
        """What ``parse`` makes of a request's body, in a thread unless it is short: encoding a text may take a second,
        and hundreds of bytes of memory for each of its own, so few long ones are encoded at once."""
        size = len(await request.body())
        executor = self._long_bodies if size > _LONG_BODY else None
        try:
            with self.admission.admit(1):
                if size <= _SHORT_BODY and asked.model_fields_set <= QUICK:
                    return parse(asked)
                return await asyncio.get_running_loop().run_in_executor(executor, parse, asked)
        except (ValueError, TypeError) as error:
            raise bad_request(error, asked.model_fields_set) from error


def make_app(server: Server, hosts: Collection[str] = ()) -> FastAPI:
    """The application. Open without a key is what load balancers ask, and the page, which asks its user for the key.
    ``hosts``: names that requests may give the server; none: any."""
    app = FastAPI(version=__version__, title="dsa_engine", docs_url=None, redoc_url=None)
    add_handlers(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(HostCheck, hosts=hosts)
    if origins := server.options.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    app.routes.extend(_api(server).routes)  # a router in the app would look for a route twice

    @app.get("/health")
    @app.get("/ping")
    @app.get("/ready")
    async def health() -> Response:
        server.llm.check()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    _add_page(app)
    return app


class _Route(APIRoute):
    """Calls functions of a request and its body past FastAPI, whose answers bodies with a fault get."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        by_fastapi, hints = super().get_route_handler(), get_type_hints(self.endpoint)
        if {**hints, "asked": None} != {"request": Request, "asked": None, "return": Response}:
            return by_fastapi

        async def handle(request: Request) -> Response:
            try:
                if request.headers.get("content-type") != "application/json":
                    raise ValueError
                asked = hints["asked"].model_validate(await request.json())
            except (ValueError, RecursionError, ClientDisconnect):
                return await by_fastapi(request)
            for one in self.dependencies:
                await one.dependency(request)  # type: ignore[misc]
            return await self.endpoint(request, asked)

        return handle


def _api(server: Server) -> APIRouter:
    key = server.options.api_key
    api = APIRouter(dependencies=[Depends(KeyCheck(key))] if key else [], route_class=_Route)

    # The first routes are found first, and these requests are the many.
    @api.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        return await server.generate(request, asked)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        return await server.generate(request, asked)

    @api.post("/v1/responses")
    async def responses(request: Request, asked: ResponsesRequest) -> Response:
        return await server.generate(request, asked)

    @api.post("/v1/messages")
    async def messages(request: Request, asked: MessagesRequest) -> Response:
        return await server.generate(request, asked)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.card(name) for name in server.names]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return server.card(server.model(name))

    @api.get("/server_info")
    @api.get("/get_server_info")
    @api.get("/model_info")
    @api.get("/get_model_info")
    async def about() -> dict[str, Any]:
        """What routers ask, by the names of SGLang and vLLM."""
        facts = server.llm.facts
        return {
            "model_path": facts.model,
            "tokenizer_path": facts.model,
            "served_model_name": server.names[0],
            "model_type": facts.model_type,
            "is_generation": True,
            "context_length": facts.limits.max_model_len,
            "max_running_requests": facts.max_num_seqs,
            "version": __version__,
        }

    @api.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": False}

    @api.get("/kv_event_sources")
    async def kv_event_sources() -> list[dict[str, Any]]:
        """Where routers subscribe to the events of the prefix cache."""
        where = server.llm.facts.kv_events
        return [where | {"data_parallel_rank": 0, "replay_endpoint": None}] if where else []

    @api.get("/load")
    @api.get("/get_load")
    async def load() -> dict[str, Any]:
        state = await server.llm.state()
        about = {"num_reqs": state.running, "num_waiting_reqs": state.waiting, "token_usage": state.cache_usage}
        return {"server_load": server.admission.outputs} | about

    @api.post("/v1/chat/completions/render")
    async def render(request: Request, asked: ChatRequest) -> Response:
        """The token ids that the prompt of a chat has."""
        (prompt,) = (await server.parsed(request, asked, server.form)).prompts
        return Response(to_json({"token_ids": prompt["prompt_token_ids"]}), media_type="application/json")

    @api.post("/abort_requests")
    async def abort_requests(asked: AbortBody) -> dict[str, Any]:
        """Ends requests of this HTTP process."""
        leaving = [client for client, name in server.admission.leaving.items() if name in (asked.request_ids or [name])]
        for client in leaving:
            client.cancel()
        return {"aborted": len(leaving)}

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, asked: CountRequest) -> dict[str, int]:
        return (await server.parsed(request, asked, server.form)).count

    @api.post("/tokenize")
    async def to_tokens(request: Request, asked: TokenizeRequest) -> Response:
        return Response(to_json(await server.parsed(request, asked, server.tokenize)), media_type="application/json")

    @api.post("/detokenize")
    async def to_text(request: Request, asked: DetokenizeRequest) -> Response:
        return Response(to_json(await server.parsed(request, asked, server.detokenize)), media_type="application/json")

    @api.get("/tokenizer_info")
    def tokenizer_info() -> dict[str, Any]:
        try:
            return server.tokenizer_info()
        except ValueError as error:
            raise bad_request(error) from error

    @api.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await server.llm.reset_prefix_cache()
        return Response()

    @api.get("/metrics")
    async def metrics() -> Response:
        try:
            state = await server.llm.state()
        except EngineError:  # it has ended
            state = None
        return Response(server.metrics.text(state), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


def _add_page(app: FastAPI) -> None:
    """Serves the page, if it is installed: index.html at "/", the files beside it under "/page/"."""
    if (PAGE / "index.html").is_file():

        @app.get("/", include_in_schema=False)
        async def page() -> FileResponse:
            return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

        app.mount("/page", _PageFiles(directory=PAGE))
