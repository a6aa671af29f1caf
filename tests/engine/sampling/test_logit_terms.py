"""Changes of logits by parameters, against the definitions, row by row, with drafts and placeholders."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.chain import changed
from dsa_engine.engine.sampling.logits_processors import LogitsProcessors
from dsa_engine.engine.steps.plan import Wanted

VOCAB, EOS = 23, 1


def defined(logits: list[float], prompt: list[int], output: list[int], request: Request) -> list[float]:
    """The logits of one row, from the definitions."""
    p, row = request.params, list(logits)
    if p.allowed_token_ids is not None:
        row = [x if i in p.allowed_token_ids else -math.inf for i, x in enumerate(row)]
    for *begin, last in request.bad_words:
        if not begin or output[-len(begin) :] == begin:
            row[last] = -math.inf
    if len(output) < p.min_tokens:
        for i in (EOS, *(p.stop_token_ids or ())):
            row[i] = -math.inf
    for i, bias in (p.logit_bias or {}).items():
        row[i] += bias
    for i in {*prompt, *output}:
        row[i] = row[i] / p.repetition_penalty if row[i] > 0 else row[i] * p.repetition_penalty
    for i, count in Counter(output).items():
        row[i] -= p.frequency_penalty * count + p.presence_penalty
    return row


def random_params(rng: random.Random) -> SamplingParams:
    keys: dict[str, Any] = {
        "presence_penalty": rng.choice([0, 0, -1.5, 0.4]),
        "frequency_penalty": rng.choice([0, 0, 1.25, -0.3]),
        "repetition_penalty": rng.choice([1, 1, 1.7, 0.6]),
        "min_tokens": rng.choice([0, 3, 7]),
        "max_tokens": 50,
        "stop_token_ids": rng.choice([None, [2, 3]]),
    }
    if rng.random() < 0.4:
        keys["allowed_token_ids"] = rng.sample(range(VOCAB), 12)
    if rng.random() < 0.4:
        keys["logit_bias"] = {i: rng.uniform(-3, 3) for i in rng.sample(range(VOCAB), 4)}
    return SamplingParams(**keys)


def random_request(number: int, rng: random.Random) -> Request:
    words = [[rng.randrange(4) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(rng.choice([0, 5]))]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
    return Request(number, prompt, random_params(rng), bad_words=words)


@pytest.mark.parametrize("seed", range(6))
def test_rows_against_the_definition(seed: int) -> None:
    """Twelve steps: drafts are rejected, placeholders are read late, requests end and begin, a step is repeated."""
    rng = random.Random(seed)
    terms = LogitsProcessors((EOS,))
    requests = [random_request(number, rng) for number in range(5)]
    sampled, real = None, {r: list[int]() for r in requests}
    for step in range(12):
        wanted, expected, logits = list[Wanted](), [], []
        for request in rng.sample(requests, 4):
            drafts = [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 3]))]
            if not request.placeholders:
                request.drafts = drafts
            else:
                drafts = []
            for ahead in range(len(drafts) + 1):
                output = (real[request] + drafts)[: len(real[request]) + ahead]
                wanted.append(Wanted(request, len(request.prompt) + len(output), len(wanted)))
                logits.append([rng.uniform(-4, 4) for _ in range(VOCAB)])
                expected.append(defined(logits[-1], request.prompt, output, request))
        actual = torch.tensor(logits)
        actual = changed(actual, terms.inputs(wanted, actual, sampled))
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        if step == 4:  # a step that is launched once more
            actual = torch.tensor(logits)
            actual = changed(actual, terms.inputs(wanted, actual, sampled))
            torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        # The sampled tokens are read at once, or after the next step.
        sampled = torch.randint(0, 4, (len(requests),), generator=torch.Generator().manual_seed(step))
        for number, request in enumerate(requests):
            request.drafts = []
            if request.placeholders:
                request.output, request.placeholders = list(real[request]), []
            real[request].append(int(sampled[number]))
            if rng.random() < 0.5:
                request.placeholders = [number]
            else:
                request.output = list(real[request])
        if step == 6:
            requests[0].finish_reason = "length"
            requests[0] = random_request(99, rng)
            real[requests[0]] = []


@pytest.fixture(scope="module")
def shared(demo_cache: Path) -> LLM:
    return LLM("demo-random", device="cpu", max_model_len=256, cache_memory="8MiB", page_size=8, progress=False)


PROMPT = [9, 30, 31, 32] * 3
SHAPES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "frequency and presence": {"frequency_penalty": 0.8, "presence_penalty": 1.2},
    "bias and allowed": {"allowed_token_ids": [*range(40, 60), 70], "logit_bias": {70: 3.0, 41: -100.0}},
    "bad words": {"bad_words": ["a", "th", "xyz", "qu"], "frequency_penalty": 0.1},
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_follows_the_definition(llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool) -> None:
    """Every token is the best one after those before it, by the model's logits and the definitions."""
    monkeypatch.setattr(llm.engine, "async_scheduling", ahead)
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, **SHAPES[name])
    other = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, repetition_penalty=3.0)
    output = llm.generate([PROMPT[:5], PROMPT], [other, params])[1]
    words = [ids for word in params.bad_words or () for ids in llm.tokenizer.word_ids(word)]
    request = Request(0, PROMPT, params, bad_words=words)
    plain = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True))[0]
    assert output.token_ids != plain.token_ids
    logits = llm.prompt_logits(PROMPT + output.token_ids)[len(PROMPT) - 1 : -1]
    for at, (token, row) in enumerate(zip(output.token_ids, logits.tolist(), strict=True)):
        shaped = defined(row, PROMPT, output.token_ids[:at], request)
        assert shaped[token] >= max(shaped) - 1e-3
        if name == "bias and allowed":
            assert token in {*range(40, 60), 70} - {41}


def test_bad_words_do_not_come(llm: LLM) -> None:
    letters = llm.tokenizer.encode("abc", add_special_tokens=False)
    keys: dict[str, Any] = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "allowed_token_ids": letters}
    text = llm.generate("some text", SamplingParams(**keys))[0].text
    assert len(text) == 40 and set(text) == set("abc")
    for word in (text[5:7], text[8:11], text[20]):
        without_word = llm.generate("some text", SamplingParams(**keys, bad_words=["zz", word]))[0].text
        at = text.index(word)
        assert word not in without_word and without_word.startswith(text[: at + len(word) - 1])


def test_tokens_that_the_model_does_not_have(llm: LLM) -> None:
    for keys in ({"allowed_token_ids": [3, 320]}, {"logit_bias": {320: 1.0}}):
        with pytest.raises(ValueError, match="has token id 320; the vocabulary has ids 0 … 319"):
            llm.generate([PROMPT], SamplingParams(**keys))  # type: ignore[arg-type]


def test_several_outputs_of_a_prompt(llm: LLM) -> None:
    """The i-th has the seed + i; without a seed each has another one."""
    keys: dict[str, Any] = {"temperature": 1.2, "max_tokens": 12, "ignore_eos": True, "frequency_penalty": 0.5}
    first, second = llm.generate(["a prompt", "another"], SamplingParams(n=3, seed=5, **keys))
    for output, prompt in ((first, "a prompt"), (second, "another")):
        alone = [llm.generate(prompt, SamplingParams(seed=5 + i, **keys))[0] for i in range(3)]
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in alone]
        assert [one.index for one in output.outputs] == [0, 1, 2] and output.token_ids == alone[0].token_ids
        assert output.prompt == prompt
    (free,) = llm.generate("a prompt", SamplingParams(n=3, **keys))
    assert len({tuple(one.token_ids) for one in free.outputs}) == 3
    with pytest.raises(ValueError, match="a stream has one output"):
        next(llm.stream("a prompt", SamplingParams(n=2)))


def test_no_limit_but_the_models(llm: LLM) -> None:
    output = llm.generate([[5] * 200], SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0))[0]
    assert (len(output.token_ids), output.finish_reason) == (56, "length")
