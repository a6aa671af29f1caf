"""Callers of an ``LLM`` at once: threads, and an event loop full of tasks, with requests that are left at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import Any

from dsa_engine import LLM, SamplingParams

Kind = dict[str, Any]  # a request's prompt and params, and the tokens and text that it gets alone
Found = tuple[int, list[int], str, str]  # the number of a kind, tokens, text, and how the request ended


def make_kinds(llm: LLM, count: int, longest: int) -> list[Kind]:
    rng, made = random.Random(5), []
    for number in range(count):
        params: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 5, 12, 25]),
            "ignore_eos": rng.random() < 0.8,
            "temperature": rng.choice([0.0, 0.8]),
            "seed": number,
            "stop": rng.choice([None, None, ["e"], ["ab", "qu"]]),
        }
        prompt = [rng.randrange(4, 320) for _ in range(rng.choice([1, 3, 8, 24, longest]))]
        output = llm.generate([prompt], SamplingParams(**params))[0]
        made.append({"prompt": prompt, "params": params, "tokens": output.token_ids, "text": output.text})
    return made


def of_a_thread(llm: LLM, kinds: list[Kind], rng: random.Random) -> Found:
    number, tokens, text = rng.randrange(len(kinds)), list[int](), ""
    given = kinds[number]["prompt"], SamplingParams(**kinds[number]["params"])
    time.sleep(rng.random() * 0.02)
    if rng.random() < 0.4:
        output = llm.generate([given[0]], given[1], use_tqdm=False)[0]
        return number, output.token_ids, output.text, "generated"
    with closing(llm.stream(*given)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            tokens, text = tokens + piece.token_ids, text + piece.text
            if piece.finish_reason is None and rng.random() < 0.05:
                return number, tokens, text, "left"
    return number, tokens, text, "streamed"


async def of_a_task(llm: LLM, kinds: list[Kind], rng: random.Random) -> Found:
    number, tokens, text = rng.randrange(len(kinds)), list[int](), ""
    given = kinds[number]["prompt"], SamplingParams(**kinds[number]["params"])
    await asyncio.sleep(rng.random() * 0.5)
    if rng.random() < 0.4:
        output = (await llm.agenerate([given[0]], given[1]))[0]
        return number, output.token_ids, output.text, "generated"
    async with aclosing(llm.astream(*given)) as pieces:
        async for piece in pieces:
            tokens, text = tokens + piece.token_ids, text + piece.text
            if piece.finish_reason is None and rng.random() < 0.05:
                return number, tokens, text, "left"
    return number, tokens, text, "streamed"


def run_callers(llm: LLM, kinds: list[Kind], requests: int, tasks: int, threads: int) -> tuple[list[Found], int]:
    """Runs requests of threads and, beside them, of tasks, some of which are cancelled; what they found, and the number
    of cancelled ones."""

    def work(number: int) -> list[Found]:
        rng = random.Random(number)
        return [of_a_thread(llm, kinds, rng) for _ in range(requests // threads)]

    async def everything() -> list[Any]:
        rng = random.Random(7)
        running = [asyncio.create_task(of_a_task(llm, kinds, random.Random(100 + n))) for n in range(tasks)]
        while not all(task.done() for task in running):
            await asyncio.sleep(0.02)
            if rng.random() < 0.4:
                rng.choice(running).cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1, "a task is left"
        return ended

    with ThreadPoolExecutor(threads + 1) as pool:
        event_loop = pool.submit(asyncio.run, everything())
        answers = [one for done in [pool.submit(work, n) for n in range(threads)] for one in done.result()]
        ended = event_loop.result()
    answers += [one for one in ended if not isinstance(one, asyncio.CancelledError)]
    llm.wait_idle()
    return answers, sum(isinstance(one, asyncio.CancelledError) for one in ended)


def check_found(answers: Iterable[Found], kinds: list[Kind]) -> None:
    """Each request has got the tokens and text of one alone, or their beginning if it was left."""
    for number, tokens, text, how in answers:
        wanted = kinds[number]
        assert tokens == wanted["tokens"][: len(tokens)] and wanted["text"].startswith(text)
        assert how == "left" or (tokens, text) == (wanted["tokens"], wanted["text"])
