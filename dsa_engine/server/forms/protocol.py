"""What a request may say: models of the bodies that FastAPI reads, and the sampling parameters among their fields."""

from __future__ import annotations

import difflib
import logging
import uuid
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dsa_engine.config.checks import shown
from dsa_engine.config.vllm_options import answer
from dsa_engine.engine.requests.limits import MAX_PRIORITY
from dsa_engine.errors import ContextLengthError
from dsa_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_SAMPLING = {f.name for f in fields(SamplingParams) if f.init}
_MAX_LOGGED_NAMES = 100  # that are not known
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_OUTPUTS = 512  # in one request
MAX_SELECTION = 16  # tokens of a request with selections, each 2 MB of JSON for a large model
MAX_LOGPROBS = 20  # for a token, as OpenAI's API and vLLM have it
# A short body with these fields alone is parsed in an instant: no grammar, and no template of its own.
QUICK = {
    "frequency_penalty", "ignore_eos", "logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n",
    "presence_penalty", "prompt", "seed", "stop", "stream", "stream_options", "temperature", "top_k", "top_p", "user",
}  # fmt: skip
_ignored: set[str] = set()


class StreamOptions(BaseModel):
    """What a stream contains besides the output; continuous usage: every chunk has the usage so far,
    if ``include_usage`` is asked for too."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class RequestBody(BaseModel):
    """A body. A field whose value is null has its default; unknown fields are ignored, with a line in the log."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def further(self, known: set[str]) -> dict[str, Any]:
        """The given fields whose names are ``known``; ``ValueError`` for one that asks for what does not exist here."""
        given = self.model_extra or {}
        for name in given.keys() - known - _WITHOUT_EFFECT:
            if instead := _advice(name, given[name]):
                raise ValueError(f"{name} is not possible here; {instead}")
            if instead is None:
                _ignore(name, known | type(self).model_fields.keys())
        return {name: value for name, value in given.items() if name in known}


class GenerationBody(RequestBody):
    """What both endpoints that generate share; sampling parameters are further fields."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024
    )  # only requests with the same one share cached pages
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower ones first
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # of log-probabilities
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # as SGLang has it, like the next two
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    custom_params: dict[str, Any] = {}  # as SGLang has it: {"thinking_budget": …}
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # the last ones; -1: as many as there is room for

    @cached_property
    def request_name(self) -> str:
        """What the answer's id ends with: ``request_id``, which may be the header X-Request-Id, or a new name."""
        given = (self.model_extra or {}).get("request_id")
        return given[:128] if isinstance(given, str) and given.isprintable() and given else uuid.uuid4().hex

    @property
    def max_output(self) -> tuple[str, Any]:
        """Name and value of the parameter that has the maximum number of tokens of an output; None: it is not given."""
        return "max_tokens", (self.model_extra or {}).get("max_tokens")

    def cut(self, tokens: list[int], max_model_len: int) -> list[int]:
        """The tokens of a prompt that ``truncate_prompt_tokens`` leaves."""
        count = self.truncate_prompt_tokens
        if count is None:
            return tokens
        if count == -1:
            count = max_model_len - (self.max_output[1] or 1)
        if count < 1:
            raise ValueError(
                f"truncate_prompt_tokens must leave a token, or be -1 for all that there is room for: {count}"
            )
        return tokens[-count:]

    def check_room(self, prompt_tokens: int, max_model_len: int) -> None:
        """Raises ``ValueError`` if the request asks for more tokens than the model's length has room for."""
        name, asked = self.max_output
        if asked is not None and prompt_tokens + asked > max_model_len:
            raise ContextLengthError.of(
                max_model_len,
                f"{name} is {asked} and the prompt has {prompt_tokens} tokens, {prompt_tokens + asked} in all; ask for "
                f"at most {max_model_len - prompt_tokens}, or leave {name} out",
            )

    @model_validator(mode="after")
    def _streams(self) -> GenerationBody:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options need stream; set stream to true, or leave them out")
        return self

    def sampling(self, defaults: dict[str, Any], prompts: int = 1, **more: Any) -> SamplingParams:
        """The sampling parameters; ``defaults`` are those of requests without them, ``more`` replace both."""
        given = self.further(_SAMPLING) | more
        given |= self._form(given.get("structured_outputs"))
        if (budget := self.custom_params.get("thinking_budget")) is not None:
            given["thinking_token_budget"] = budget
        if isinstance(bias := given.get("logit_bias"), dict):  # keys are texts in JSON
            given["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
        params = SamplingParams(**(defaults | given))
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (asked := getattr(params, name) or 0) <= MAX_LOGPROBS:  # -1: the vocabulary's
                raise ValueError(f"{name} must be at most {MAX_LOGPROBS} in a request, not {asked}")
        if params.selection and (self.stream or params.stop_strings):
            raise ValueError("selection comes with a whole output that no stop string ends; leave out stream and stop")
        if (asked := prompts * params.n * params.selection) > MAX_SELECTION:
            raise ValueError(f"selection asks for {asked} tokens in all, of at most {MAX_SELECTION}; ask for fewer")
        if prompts * params.n > MAX_OUTPUTS:
            raise ValueError(
                f"n is {params.n}, for each of {prompts} prompts, and a request has at most {MAX_OUTPUTS} outputs; "
                "send several requests"
            )
        return params

    def _form(self, given: Any) -> dict[str, Any]:
        """``structured_outputs`` by whichever parameter has the form of the output; none if none has it."""
        guided = [(name, getattr(self, f"guided_{name}")) for name in ("json", "regex", "choice", "grammar")]
        guided += [("regex", self.regex), ("grammar", self.ebnf), ("json", self.json_schema)]
        forms = [{name: value} for name, value in guided if value is not None]
        forms += [given] if given else []
        if (asked := self.response_format) is not None and asked.get("type") != "text":
            about = asked.get("json_schema")
            schema = about.get("schema") if isinstance(about, dict) else None
            if asked.get("type") not in ("json_object", "json_schema"):
                raise ValueError(
                    f"response_format must have the type text, json_object or json_schema, not {shown(asked)}"
                )
            if asked["type"] == "json_schema" and not isinstance(schema, dict):
                raise ValueError(f'response_format needs {{"json_schema": {{"schema": {{…}}}}}}, not {shown(asked)}')
            forms.append({"json_object": True} if asked["type"] == "json_object" else {"json": schema})
        if len(forms) > 1:
            raise ValueError(
                "response_format, structured_outputs, guided_…, regex, ebnf and json_schema say the form of the "
                "output; give one only"
            )
        return {"structured_outputs": forms[0]} if forms else {}


class CompletionRequest(GenerationBody):
    """The body of a request to ``/v1/completions``; ``prompt``: a text, token ids, or a list of these."""

    prompt: str | list[Any] = ""
    echo: bool = False
    add_special_tokens: bool = True


class Conversation(RequestBody):
    """How a conversation becomes a prompt, see :meth:`.conversations.ConversationFormat.render`."""

    messages: list[dict[str, Any]] = Field([], max_length=10_000)
    tools: list[dict[str, Any]] = Field([], max_length=512)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: bool | dict[str, Any] | None = None  # also {"type": "enabled" or "disabled", "budget_tokens": …}
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def rendering(self) -> dict[str, Any]:
        """Arguments of :meth:`.conversations.ConversationFormat.render`."""
        continues = self.continue_final_message
        return {
            "messages": self.messages,
            "chat_template_kwargs": self.template_variables,
            "add_generation_prompt": self.add_generation_prompt and not continues,
            "continue_final_message": continues,
        }

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Further variables of the chat template. An effort asks a model that can do without thoughts for them, and
        "none" for none, unless ``chat_template_kwargs``, or ``thinking`` or ``enable_thinking``, say which.

        Raises:
            ValueError: ``thinking`` is of another form.
        """
        given, effort, thinks = self.chat_template_kwargs or {}, self.reasoning_effort, self.enable_thinking
        if isinstance(thinking := self.thinking, dict):
            if thinking.get("type") not in ("enabled", "disabled"):
                raise ValueError(f'thinking must be true, false or {{"type": "enabled" or "disabled"}}, not {thinking}')
            thinking = thinking["type"] == "enabled"
        thinks = thinking if thinks is None else thinks
        thinks = effort != "none" if thinks is None and effort is not None else thinks
        says = {"thinking", "enable_thinking"} & given.keys() or thinks is None
        variables = {} if says else dict.fromkeys(("thinking", "enable_thinking"), thinks)
        return variables | ({} if effort is None else {"reasoning_effort": effort}) | given or None


class ChatRequest(GenerationBody, Conversation):
    """The body of a request to ``/v1/chat/completions``, and what bodies of other endpoints are read as."""

    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=1)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    max_output_name: ClassVar[str] = "max_completion_tokens"

    @property
    def max_output(self) -> tuple[str, Any]:
        given = self.max_completion_tokens
        return super().max_output if given is None else (self.max_output_name, given)

    @property
    def chat(self) -> ChatRequest:
        return self


class TokenizeRequest(Conversation):
    """The body of a request to ``/tokenize``: a text, or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool | None = None  # None: of a text
    return_token_strs: bool = False


class AbortBody(RequestBody):
    """The body of a request to ``/abort_requests``: names of requests; none: all."""

    request_ids: list[str] = []


class DetokenizeRequest(RequestBody):
    """The body of a request to ``/detokenize``."""

    tokens: list[int] = []
    return_token_strs: bool = False


_NO_MEDIA = "the model reads and writes text only"
_NOTHING_STORED = "nothing is stored: send the whole conversation"
_TOOLS = "give tools, and tool_choice"

# name: (what to do instead, the values that ask for what is done anyway)
_ANSWERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "previous_response_id": (_NOTHING_STORED, ()),
    "conversation": (_NOTHING_STORED, ()),
    "background": ("a response is answered at once", (False,)),
    "truncation": ("use truncate_prompt_tokens", ("disabled",)),
    "suffix": ("text is only continued; put what comes before into the prompt", ("",)),
    "functions": (_TOOLS, ([],)),
    "function_call": (_TOOLS, ("auto", "none")),
    "modalities": (_NO_MEDIA, (["text"],)),
    "audio": (_NO_MEDIA, ()),
    "mcp_servers": ("the server calls no tools; give them as tools, and call them in the client", ([],)),
    "output_format": ("use output_config, or response_format", ()),
    "web_search_options": ("there is no search; put what the model should know into the messages", ()),
    "documents": ("put the documents into the messages", ([],)),
    "prompt_embeds": ("give the prompt as a text or token ids", ()),
    "kv_transfer_params": ("caches are not sent between servers", ({},)),
    "stop_regex": ("use stop, or stop_token_ids", ()),
    "truncation_side": ("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "guided_whitespace_pattern": ("structured_outputs has disable_any_whitespace", ()),
    "separate_reasoning": ("use include_reasoning, or a server with --reasoning-parser none", (True,)),
}
# Parameters for accounts, bills and routing at a provider; they never change an output here.
_WITHOUT_EFFECT = {
    "betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "max_tool_calls",
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier",
    "service_tier", "speed", "store", "user", "user_profile_id", "verbosity", "workspace_id",
}  # fmt: skip


def _advice(name: str, value: Any) -> str | None:
    """What to do instead of a parameter; "" if it asks for what is done anyway; None if it is unknown."""
    if name not in _ANSWERS:
        return answer(name, value)
    text, neutral = _ANSWERS[name]
    return "" if any(type(value) is type(one) and value == one for one in neutral) else text


def _ignore(name: str, known: set[str]) -> None:
    name = name[:80]
    if name in _ignored or len(_ignored) >= _MAX_LOGGED_NAMES:
        return
    _ignored.add(name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did its client mean {near[0]!r}?" if near else ""
    logger.warning("requests have the unknown parameter %s, which is ignored%s", shown(name), hint)
