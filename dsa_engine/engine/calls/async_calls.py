"""What every call does first: prompts, in any of their forms, become checked requests; and calls in an event loop."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dsa_engine.config.checks import is_integer, shown
from dsa_engine.config.vllm_options import advice
from dsa_engine.engine.calls.call import Call, MessageQueue
from dsa_engine.engine.requests.limits import MAX_PRIORITY, Add, Limits, new_requests
from dsa_engine.inputs import Prompt
from dsa_engine.outputs import RequestOutput, StreamPiece
from dsa_engine.sampling_params import HAS_BUDGET, SamplingParams
from dsa_engine.text.tokenizer import Tokenizer

_FORMS = (
    "a prompt is a text or a list of integer token ids (an integer array, {'prompt': text} and "
    "{'prompt_token_ids': ids} will do)"
)


class ParsedPrompt(NamedTuple):
    """A prompt's text or its token ids; beside token ids, the text is only reported. Requests with different cache
    salts share no cached pages."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


class PreparedPrompt(NamedTuple):
    """One checked prompt of a call, with a message for each of its outputs."""

    text: str | None  # the prompt's
    adds: list[Add]
    tokenizer: Tokenizer | None  # makes the text of the outputs; None if they have none


@dataclass(eq=False, repr=False)
class AsyncCalls:
    """Prompts go in, outputs come out, from an engine in this process or in another one."""

    _calls: MessageQueue
    _limits: Limits
    folder: Path
    _trust_remote_code: bool
    default_sampling: dict[str, Any]
    _stream_interval: int  # tokens of a piece of a stream, after the first
    _tokenizer: Tokenizer | None = field(default=None, init=False)
    _loading: threading.Lock = field(default_factory=threading.Lock, init=False)  # held while the tokenizer is loaded

    async def agenerate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: int | Seq[int] | None = None,
    ) -> list[RequestOutput]:
        """Does what :meth:`generate` does, in an event loop. Requests of all tasks and threads run together. If a task
        is cancelled, its requests end."""
        self._calls.check()
        return await self.outputs_of(await asyncio.to_thread(self.prepare, prompts, sampling_params, priority))

    async def outputs_of(self, prepared: Seq[PreparedPrompt]) -> list[RequestOutput]:
        """The outputs of prompts of :meth:`prepare`, which begin now; raises the error of a step of one of them."""
        with self._begin(prepared, asynchronous=True) as call:
            running = len(call.replies)
            while running:
                running -= len(await call.all_async())
            return outputs_of(prepared, call)

    async def pieces_of(self, prepared: Seq[PreparedPrompt]) -> AsyncGenerator[list[StreamPiece], None]:
        """The pieces of the outputs of prompts of :meth:`prepare`: each time all that have come. ``piece.index`` says
        which output: number ``i * n + j`` is the j-th of prompt i. The requests begin with the first piece that is
        awaited, and end when the iterator is closed."""
        with self._begin(prepared, streams=True, asynchronous=True) as call:
            running = len(call.replies)
            while running:
                pieces = await call.all_async()
                for piece in pieces:
                    running -= piece.finish_reason is not None
                yield pieces

    def _begin(self, prepared: Seq[PreparedPrompt], streams: bool = False, asynchronous: bool = False) -> Call:
        """With ``streams`` the call gets pieces, otherwise None at the end of each request."""
        call = Call(self._calls, asynchronous)
        adds = [(add, one.tokenizer) for one in prepared for add in one.adds]
        call.begin(adds, self._stream_interval if streams else None)
        return call

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at first use; raises ``ValueError`` if the folder has none."""
        if self._tokenizer is None:
            with self._loading:
                self._tokenizer = self._tokenizer or Tokenizer(self.folder, self._trust_remote_code)
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls without any: those of the folder's ``generation_config.json``, unless the option
        ``generation_config`` says otherwise."""
        return SamplingParams(**self.default_sampling)

    @cached_property
    def has_tokenizer(self) -> bool:
        return Tokenizer.lies_in(self.folder)

    def _encode(self, prompt: ParsedPrompt) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if not prompt.text:
            raise ValueError("the prompt is empty; give some text or token ids")
        return self.encode_prompt(prompt.text)

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, see :meth:`.tokenizer.Tokenizer.encode`; raises ``ValueError`` also for a text that is
        surely longer than ``max_model_len``."""
        return self.tokenizer.encode(text, add_special_tokens, self._limits.max_model_len)

    def prepare(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        priority: int | Seq[int] | None = None,
    ) -> list[PreparedPrompt]:
        """Checks prompts and makes messages of them, in any thread; raises what :meth:`generate` raises."""
        many = parse_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(many)
        elif not isinstance(sampling_params, (list, tuple)):
            raise TypeError(f"sampling parameters must be a SamplingParams or a list of them, not {sampling_params!r}")
        else:
            params = list(sampling_params)
            if len(params) != len(many):
                raise ValueError(
                    f"{len(many)} prompts, but {len(params)} sampling parameters; give one, or one for each"
                )
        priorities: list[Any] = list(priority) if isinstance(priority, (list, tuple)) else [priority or 0] * len(many)
        if len(priorities) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(priorities)} priorities; give one, or one for each")
        prepared = []
        for number, (prompt, p, first) in enumerate(zip(many, params, priorities, strict=True)):
            with of_many(number, len(many)):
                prepared.append(self._prepare(prompt, p, first))
        return prepared

    def _prepare(self, prompt: ParsedPrompt, params: SamplingParams, priority: int) -> PreparedPrompt:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling parameters must be a SamplingParams, not {params!r}")
        if not is_integer(priority) or abs(priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {shown(priority)}"
            )
        # Some parameters need a tokenizer: if there is none, self.tokenizer raises before anything runs.
        texts = bool(params.stop_strings or params.bad_words or params.structured_outputs or params.asks & HAS_BUDGET)
        texts = texts or self.has_tokenizer
        tokenizer = self.tokenizer if texts else None
        adds = new_requests(self._encode(prompt), params, tokenizer, self._limits, prompt.cache_salt)
        for add in adds:
            add.priority = priority
        return PreparedPrompt(prompt.text, adds, tokenizer)

    def _prepare_stream(self, prompt: Prompt, sampling_params: SamplingParams | None, priority: int) -> PreparedPrompt:
        params = sampling_params or self.get_default_sampling_params()
        prepared = self._prepare(only_prompt(prompt), params, priority)
        if params.n > 1 or params.prompt_logprobs is not None:
            raise ValueError(
                "a stream has one output and no prompt_logprobs; use generate() for them, or leave them out"
            )
        return prepared

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for a name that does not exist, such as a method of vLLM's LLM."""
            instead = advice(name)
            raise AttributeError(f"{type(self).__name__} has no {name!r}" + (f"; {instead}" if instead else ""))


def outputs_of(prepared: Seq[PreparedPrompt], call: Call) -> list[RequestOutput]:
    """Of all prompts of a call, whose requests have ended."""
    remaining, outputs = iter(call.replies), []
    for one in prepared:
        own = list(islice(remaining, len(one.adds)))
        prompt_logprobs = own[0].prompt_logprobs()
        outputs.append(
            RequestOutput(
                request_id=str(own[0].add.id),
                prompt=one.text,
                prompt_token_ids=list(own[0].add.prompt_ids),
                outputs=[reply.completion(index) for index, reply in enumerate(own)],
                prompt_logprobs=prompt_logprobs,
            )
        )
    return outputs


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """All prompts; a single prompt becomes a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [_parsed(prompts)]
    prompts = _plain(prompts)
    if not isinstance(prompts, Seq) or isinstance(prompts, bytes) or _is_id(next(iter(prompts), None)):
        return [_parsed(prompts)]
    parsed = []
    for number, prompt in enumerate(prompts):
        with of_many(number, len(prompts)):
            parsed.append(_parsed(prompt))
    return parsed


def either(prompts: Prompt | Seq[Prompt] | None, token_ids: Seq[int] | Seq[Seq[int]] | None) -> Prompt | Seq[Prompt]:
    """The one that is given; raises ``TypeError`` if none or both are."""
    given = [one for one in (prompts, token_ids) if one is not None]
    if len(given) != 1:
        raise TypeError(f"{_FORMS}, not {'both prompts and prompt_token_ids' if given else None}")
    return given[0]


def only_prompt(prompt: Prompt) -> ParsedPrompt:
    """The prompt of a call that takes only one."""
    parsed = parse_prompts([prompt] if isinstance(prompt, (list, tuple)) else prompt)
    if len(parsed) != 1:
        raise TypeError(f"give one prompt, not {len(parsed)}")
    return parsed[0]


@contextmanager
def of_many(number: int, count: int) -> Iterator[None]:
    """Adds to an error the number of the prompt, if there are several."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if count > 1 and error.args and isinstance(error.args[0], str):
            error.args = (f"prompts[{number}]: {error.args[0]}", *error.args[1:])
        raise


def _parsed(prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids(prompt))
    prompt = {key: value for key, value in prompt.items() if value is not None}
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"} or (text is None and ids is None):
        raise TypeError(f"{_FORMS}, not a dictionary with the keys {', '.join(map(shown, prompt)) or '(none)'}")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the prompt in a dictionary must be a text, not {shown(text)}")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise TypeError(f"cache_salt must be a text that is not empty, not {shown(salt)}")
    return ParsedPrompt(text, None if ids is None else _token_ids(ids), salt)


def _token_ids(given: Any) -> list[int]:
    ids = _plain(given)
    if not isinstance(ids, Seq) or isinstance(ids, (bytes, str)):
        raise TypeError(f"{_FORMS}, not {shown(given)}")
    if all(type(i) is int for i in ids):
        return list(ids)
    if not all(_is_id(i) for i in ids):
        raise TypeError(f"{_FORMS}, not {shown(given)}")
    return [operator.index(i) for i in ids]


def _plain(value: Any) -> Any:
    """The list of an array of NumPy or PyTorch; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "__array__") else value


def _is_id(value: Any) -> bool:
    """Whether ``value`` is an integer, of NumPy and PyTorch too."""
    if is_integer(value):
        return True
    scalar = _plain(value)
    return scalar is not value and is_integer(scalar)
