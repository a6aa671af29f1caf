"""One server of two processes: what must hold whichever of them has a connection."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.server.http import url_of
from dsa_engine.server.messages import NewRequest
from dsa_engine.server.options import ServerOptions, bind
from dsa_engine.server.process import HttpProcesses, Relay

LONG = {"prompt": [5, 6], "max_tokens": 190, "ignore_eos": True}
TEXT = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(2000, max_num_seqs=8)


@pytest.fixture(scope="module")
def served() -> Counter[int]:
    """How many requests each of the two processes has had."""
    return Counter()


@pytest.fixture(scope="module")
def url(tiny: LLM, served: Counter[int]) -> Iterator[str]:
    """Where a server listens that takes ten requests at once; at the end it ends in order."""

    class CountingRelay(Relay):
        def _take(self, messages: list[Any]) -> None:
            served[id(self)] += sum(isinstance(message, NewRequest) for message in messages)
            super()._take(messages)

    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    options = ServerOptions(api_server_count=2, max_waiting_requests=2, served_model_name=["tiny"])
    http = HttpProcesses([CountingRelay(tiny), CountingRelay(tiny)], options, bound)
    for _ in range(20):
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 200
    yield url
    http.stop()
    assert http.wait() == 0
    tiny.wait_idle()
    assert tiny.engine.scheduler.free_pages == [tiny.engine.cache.pages]


def at_once(calls: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(calls) as pool:
        return list(pool.map(work, range(calls)))


def until_idle(llm: LLM) -> None:
    until = time.monotonic() + 20
    while llm.engine.scheduler.has_work:
        assert time.monotonic() < until, "a request whose client has left runs on"
        time.sleep(0.01)


def total(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))


def test_answers_streams_and_stop_strings(url: str, tiny: LLM, served: Counter[int]) -> None:
    prompts = [[number + 5, 7] for number in range(8)]
    text = tiny.generate([prompts[0]], SamplingParams(**TEXT))[0].text
    stop = [text[len(text) // 2 :][:2]]
    kinds = [TEXT, TEXT | {"stop": stop}]
    wanted = {
        (which, number): output.outputs[0]
        for which, params in enumerate(kinds)
        for number, output in enumerate(tiny.generate(prompts, SamplingParams(**params)))
    }
    assert {one.finish_reason for one in wanted.values()} == {"stop", "length"}

    def ask(number: int) -> tuple[str, str]:
        body = kinds[number % 2] | {"prompt": prompts[number % 8], "stream": number >= 8}
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if number < 8:
            choices = response.json()["choices"]
        else:
            *events, done = [line[6:] for line in response.text.split("\n\n") if line]
            assert done == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    for _ in range(3):
        for first in (0, 8):
            answers = at_once(8, lambda number, first=first: ask(first + number))
            for number, answer in enumerate(answers):
                output = wanted[number % 2, number]
                assert answer == (output.text, output.finish_reason)
    assert len(served) == 2 and sum(served.values()) == 48, "each process has had some"


def test_clients_that_leave(url: str, tiny: LLM) -> None:
    before = total(url, 'request_success_total{engine="0",finished_reason="abort"')

    def leave(number: int) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as response:
            next(response.iter_raw())

    at_once(8, leave)
    until_idle(tiny)
    assert total(url, 'request_success_total{engine="0",finished_reason="abort"') == before + 8


def test_limit_and_metrics_are_those_of_both(url: str, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight run and two wait, however the connections are spread; any process gives the counts of both."""
    step = tiny.engine.step
    monkeypatch.setattr(tiny.engine, "step", lambda: (time.sleep(0.02), step())[1])
    before = total(url, "generation_tokens_total")
    responses = at_once(24, lambda _: httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 20}))
    counts = Counter(one.status_code for one in responses)
    assert counts.keys() == {200, 429} and 10 <= counts[200] <= 14  # those of one process may answer sooner
    assert {total(url, "generation_tokens_total") - before for _ in range(8)} == {20 * counts[200]}
