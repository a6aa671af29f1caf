"""What the forms of all endpoints have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from dsa_engine.outputs import RequestOutput, StreamPiece
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.errors import ApiError
from dsa_engine.server.forms.protocol import GenerationBody

to_json = msgspec.json.Encoder().encode


class Form(ABC):
    """What a request asks for, and how its endpoint writes outputs."""

    end_of_stream = b"data: [DONE]\n\n"

    prompts: list[dict[str, Any]]  # what the engine gets
    params: SamplingParams  # the same for all prompts
    prompt_ids: list[Sequence[int]]  # token ids of the prompts, set before the answer
    chunk_head: dict[str, Any]  # what all chunks of a stream begin with

    def __init__(self, asked: GenerationBody):
        self.asked = asked

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer, without its usage."""

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The usage of what :meth:`whole` or :meth:`chunks` has read; ``counts``: see :func:`.parts.usage`."""
        return counts

    @abstractmethod
    def chunks(self, piece: StreamPiece) -> list[dict[str, Any]]:
        """The chunks of a stream that a piece makes, without head and usage; none if it has nothing to show."""

    def last(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks after the last piece."""
        options = self.asked.stream_options
        return [{"choices": [], "usage": self.usage(usage)}] if options and options.include_usage else []

    @cached_property
    def _begin(self) -> bytes:
        return b"data: %b," % to_json(self.chunk_head)[:-1]  # encoded once, as it is most of a chunk

    def event(self, chunk: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._begin, to_json(chunk)[1:])

    def failed(self, error: ApiError) -> bytes:
        """The event of an error after the first piece."""
        return b"data: %b\n\n" % to_json(error.body())
