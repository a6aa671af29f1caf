"""From prompts to requests, and from requests to outputs: what ``generate`` shares with its asynchronous form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dsa_engine.engine.call import Call
from dsa_engine.engine.request import Request
from dsa_engine.outputs import RequestOutput
from dsa_engine.prompts import ParsedPrompt, of_many
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Asked:
    """One prompt of a call."""

    prompt: ParsedPrompt
    params: SamplingParams
    tokens: list[int]  # of the prompt
    tokenizer: Tokenizer | None  # makes text of the output; None: nobody asks for it


def add_requests(call: Call, asked: Sequence[Asked]) -> None:
    """Brings the requests of all prompts, ``params.n`` for each, in order; raises what :meth:`Call.add` raises."""
    for number, one in enumerate(asked):
        with of_many(number, len(asked)):
            for params in one.params.of_each_output():
                call.add(one.tokens, params, one.tokenizer)


def outputs_of(asked: Sequence[Asked], requests: Sequence[Request]) -> list[RequestOutput]:
    """The outputs of all prompts, from the requests of :func:`add_requests`, all of which have ended."""
    each = iter(requests)
    return [_output(one.prompt, list(islice(each, one.params.n))) for one in asked]


def _output(prompt: ParsedPrompt, requests: list[Request]) -> RequestOutput:
    first = requests[0]
    return RequestOutput(
        request_id=str(first.id),
        prompt=prompt.text,
        prompt_token_ids=first.prompt,
        outputs=[request.completion(index) for index, request in enumerate(requests)],
        prompt_logprobs=first.decoded_prompt_logprobs(),
    )


def show_progress(bar: Any, requests: Sequence[Request]) -> None:
    """Brings a progress bar over requests up to date."""
    prompts = sum(len(r.prompt) for r in requests)
    computed = sum(min(r.num_computed_tokens, len(r.prompt)) for r in requests)
    preemptions = sum(r.preemptions for r in requests)
    said = f"prefilled {computed:,} of {prompts:,} tokens, generated {sum(len(r.output) for r in requests):,}"
    bar.set_postfix_str(said + (f", preempted {preemptions:,} times" if preemptions else ""), refresh=False)
    bar.update(sum(request.finish_reason is not None for request in requests) - bar.n)
