"""What a request may say: the parameters of each endpoint, and the sampling parameters among them."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from dsa_engine.config.checks import check_text, integer, list_of, shown
from dsa_engine.config.fields import (
    BOOL,
    JSON_OBJECT,
    STR,
    Kind,
    Options,
    documented,
    instance_of,
    option,
    options_of,
)
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.forms.not_supported import advice

logger = logging.getLogger(__name__)
P = TypeVar("P", bound="RequestParameters")
_MOST_NAMES = 100  # that are logged
_ignored: set[str] = set()
_SAMPLING = {f.name for f, _ in options_of(SamplingParams)}


def _ignore(name: str, known: set[str]) -> None:
    """Logs a parameter that nobody knows, once, as servers of the field ignore them."""
    if name in _ignored or len(_ignored) >= _MOST_NAMES:
        return
    _ignored.add(name)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did its client mean {near[0]!r}?" if near else ""
    logger.warning("requests have the unknown parameter %s, which is ignored%s", shown(name), hint)


def _check_salt(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty, not {shown(value)}")
    check_text(name, value)


def _check_prompt(name: str, value: Any) -> None:
    if not isinstance(value, (str, list)):
        raise ValueError(f"{name} must be a text, a list of token ids, or a list of these, not {shown(value)}")


@documented
@dataclass
class StreamOptions(Options):
    """What a stream contains besides the output."""

    include_usage: bool = option(BOOL, False, "a last chunk has the usage.")
    continuous_usage_stats: bool = option(BOOL, False, "every chunk has the usage so far.")


class RequestParameters(Options):
    """The parameters of an endpoint that are not sampling parameters."""

    samples: ClassVar[bool] = True  # whether there are sampling parameters too

    @classmethod
    def parse(cls: type[P], body: dict[str, Any]) -> tuple[P, dict[str, Any]]:
        """The parameters in the body of a request, and its sampling parameters.

        Raises:
            ValueError, TypeError: a parameter is not known, or not possible.
        """
        own = {f.name for f, _ in options_of(cls)}
        sampling = (_SAMPLING if cls.samples else set()) - own
        for name in body.keys() - own - sampling:
            if instead := advice(name, body[name]):
                raise ValueError(f"{name} is not possible here; {instead}")
            if instead is None:
                _ignore(name, own | sampling)
        given = {name: value for name, value in body.items() if name in own}
        return cls(**given), {name: value for name, value in body.items() if name in sampling}


@documented
@dataclass
class CompletionParameters(RequestParameters):
    """The parameters of ``/v1/completions``, besides those of :class:`SamplingParams`."""

    prompt: Any = option(Kind(_check_prompt), "", "a text, token ids, or a list of these.")
    model: str | None = option(STR, None, "the model's name, as /v1/models lists it.")
    stream: bool = option(BOOL, False, "send the output as it comes, as server-sent events.")
    stream_options: dict[str, Any] = option(JSON_OBJECT, dict, "include_usage, continuous_usage_stats.")
    echo: bool = option(BOOL, False, "the text begins with the prompt.")
    cache_salt: str | None = option(Kind(_check_salt), None, "only requests with the same one share cached pages.")
    return_token_ids: bool = option(BOOL, False, "return the token ids of prompt and output too.")
    add_special_tokens: bool = option(BOOL, True, "begin the prompt's tokens as every text begins (BOS).")


@documented
@dataclass
class ChatParameters(RequestParameters):
    """The parameters of ``/v1/chat/completions``, besides those of :class:`SamplingParams`."""

    messages: Any = option(Kind(list_of(instance_of(dict), "messages")), list, "the conversation.")
    model: str | None = option(STR, None, "the model's name, as /v1/models lists it.")
    stream: bool = option(BOOL, False, "send the message as it comes, as server-sent events.")
    stream_options: dict[str, Any] = option(JSON_OBJECT, dict, "include_usage, continuous_usage_stats.")
    logprobs: bool = option(BOOL, False, "return the log-probability of each token.")
    top_logprobs: int | None = option(Kind(integer(0)), None, "and of so many most likely tokens.")
    max_completion_tokens: int | None = option(Kind(integer(1)), None, "maximum number of generated tokens.")
    tools: Any = option(Kind(list_of(instance_of(dict), "tools")), list, "functions that the model may call.")
    tool_choice: Any = option(Kind(lambda name, value: None), None, "auto or none.")
    parallel_tool_calls: bool = option(BOOL, True, "whether an answer may have several calls.")
    response_format: dict[str, Any] | None = option(
        JSON_OBJECT, None, "the form of the answer, of which the model is told if its conversations have words for it."
    )
    include_reasoning: bool = option(BOOL, True, "return the thought too.")
    cache_salt: str | None = option(Kind(_check_salt), None, "only requests with the same one share cached pages.")
    return_token_ids: bool = option(BOOL, False, "return the token ids of prompt and output too.")
    chat_template: str | None = option(STR, None, "a template to use instead of the model's.")
    chat_template_kwargs: dict[str, Any] = option(JSON_OBJECT, dict, "further variables of the template.")
    add_generation_prompt: bool = option(BOOL, True, "end the prompt where the answer begins.")
    continue_final_message: bool = option(BOOL, False, "go on with the last message.")


def sampling_params(given: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a request: the ``given`` ones, and ``defaults`` for others; keys of ``logit_bias``,
    which are texts in JSON, become token ids.

    Raises:
        ValueError, TypeError: see :class:`SamplingParams`.
    """
    bias = given.get("logit_bias")
    if isinstance(bias, dict):
        given = given | {"logit_bias": {_token_id(key): value for key, value in bias.items()}}
    return SamplingParams(**(defaults | given))


def _token_id(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else key


def stream_options(asked: CompletionParameters | ChatParameters) -> StreamOptions:
    """The options of a stream; raises ``ValueError`` or ``TypeError`` if they are not possible."""
    if asked.stream_options and not asked.stream:
        raise ValueError("stream_options need stream; set stream to true, or leave them out")
    return StreamOptions(**asked.stream_options)
