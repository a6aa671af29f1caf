"""``/v1/completions``: the form of its requests and answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dsa_engine.config.checks import is_integer, shown
from dsa_engine.outputs import CompletionOutput, RequestOutput, StreamPiece
from dsa_engine.server.client import EngineClient
from dsa_engine.server.forms.form import Form
from dsa_engine.server.forms.parts import TextOffsets, completion_logprobs, prompt_logprobs, selection_of
from dsa_engine.server.forms.protocol import CompletionRequest


class CompletionForm(Form):
    """One request to ``/v1/completions``."""

    def __init__(self, llm: EngineClient, asked: CompletionRequest, model: str):
        super().__init__(asked)
        self._asked = asked
        given, more = asked.model_extra or {}, {}
        self._nothing = asked.echo and given.get("max_tokens") == 0
        if self._nothing:  # only the prompt is wanted; the engine computes one token, which is dropped
            more["max_tokens"] = 1
        if asked.echo and asked.stream and (self._nothing or given.get("logprobs") is not None):
            raise ValueError("echo with max_tokens=0 or logprobs is not streamed; leave one of them out")
        if asked.echo and "logprobs" in given and "prompt_logprobs" not in given:
            more["prompt_logprobs"] = given["logprobs"]
        prompts = _prompts_of(asked.prompt)
        self.params = asked.sampling(llm.default_sampling, len(prompts), **more)
        salt = {} if asked.cache_salt is None else {"cache_salt": asked.cache_salt}
        self.prompts = [self._encoded(llm, prompt) | salt for prompt in prompts]
        self._texts = [prompt.get("prompt") for prompt in self.prompts]
        if asked.echo:
            self._texts = [
                llm.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False) if text is None else text
                for text, prompt in zip(self._texts, self.prompts)
            ]
        self.chunk_head = {
            "id": f"cmpl-{asked.request_name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()  # outputs with a chunk

    def _encoded(self, llm: EngineClient, prompt: str | list[int]) -> dict[str, Any]:
        """A prompt as the engine takes it, which encodes a text itself, unless it begins in another way."""
        asked, length = self._asked, llm.facts.limits.max_model_len
        cuts = asked.truncate_prompt_tokens is not None
        if isinstance(prompt, list):
            return {"prompt_token_ids": asked.cut(prompt, length)}
        if asked.add_special_tokens and not cuts:
            return {"prompt": prompt}
        ids = asked.cut(llm.encode_prompt(prompt, asked.add_special_tokens), length)
        return {"prompt_token_ids": ids} | ({} if cuts else {"prompt": prompt})

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._choice(number * self.params.n + output.index, one, output, self._texts[number])
            for number, one in enumerate(outputs)
            for output in one.outputs
        ]
        return self.chunk_head | {"choices": choices}

    def _choice(self, index: int, one: RequestOutput, output: CompletionOutput, prompt: str | None) -> dict[str, Any]:
        text, tokens, logprobs = output.text, list(output.token_ids), output.logprobs
        if self._nothing:
            text, tokens, logprobs = "", [], None if logprobs is None else []
        scores: list[Any] | None = logprobs
        shown_tokens = tokens
        if self._asked.echo:
            text = (prompt or "") + text
            if logprobs is not None:
                scores, shown_tokens = [*(one.prompt_logprobs or ()), *logprobs], one.prompt_token_ids + tokens
        as_ids, offsets = self._asked.return_tokens_as_token_ids, TextOffsets()
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if scores is None else completion_logprobs(shown_tokens, scores, offsets, as_ids),
            "finish_reason": "length" if self._nothing else output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_logprobs": None if one.prompt_logprobs is None else prompt_logprobs(one.prompt_logprobs),
        }
        ids = {"token_ids": tokens, "prompt_token_ids": one.prompt_token_ids}
        return choice | selection_of(output.selection) | (ids if self._asked.return_token_ids else {})

    def chunks(self, piece: StreamPiece) -> list[dict[str, Any]]:
        ids, first = self._asked.return_token_ids, piece.index not in self._begun
        self._begun.add(piece.index)
        if self._asked.echo and first:
            piece = replace(piece, text=(self._texts[piece.index // self.params.n] or "") + piece.text)
        if not (piece.text or piece.finish_reason or piece.logprobs or ids):
            return []
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if piece.logprobs is not None:
            offsets = self._offsets.setdefault(piece.index, TextOffsets())
            as_ids = self._asked.return_tokens_as_token_ids
            choice["logprobs"] = completion_logprobs(piece.token_ids, piece.logprobs, offsets, as_ids)
        if ids:
            prompt = self.prompt_ids[piece.index // self.params.n]
            choice |= {"token_ids": piece.token_ids, "prompt_token_ids": list(prompt) if first else None}
        return [{"choices": [choice]}]


def _prompts_of(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("prompt is empty; give a text, token ids, or a list of these")
    if is_integer(prompt[0]):
        return [prompt]
    for one in prompt:
        if not isinstance(one, (str, list)):
            raise ValueError(f"prompt must be a text, token ids, or a list of these; {shown(one)} is none")
    return prompt
