"""How a request ends and what text it then has: stop strings and tokens, limits, special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.sampling.chain import Parameters, seed_key

TEXT = "def selection(tokens):\n    return sorted(tokens)[:256]\n" * 8
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def force(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Makes every request "draw" these tokens from the position that is its seed, the last of them for ever."""
    seeds = {seed_key(seed): seed for seed in range(100)}

    def forced(logits: torch.Tensor, parameters: Parameters, positions: torch.Tensor, *how: int) -> torch.Tensor:
        firsts = [seeds.get(key, 0) for key in parameters.key.tolist()]
        indices = [position - first for position, first in zip(positions.tolist(), firsts, strict=True)]
        return torch.tensor([tokens[min(index, len(tokens) - 1)] for index in indices])

    monkeypatch.setattr("dsa_engine.engine.sampling.chain.draw", forced)


def test_stop_string(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = llm.tokenizer.encode("one, two, three, four")[1:]
    seed = len(llm.tokenizer.encode("p"))  # where the forced tokens begin
    force(monkeypatch, tokens)
    for stop, text, length in ((", th", "one, two", 12), ("two", "one, ", 8), ("one", "", 3), ("zzz", None, 20)):
        params = SamplingParams(max_tokens=20, stop=["never", stop], seed=seed)
        output = llm.generate("p", params)[0]
        assert len(output.token_ids) == length and output.token_ids == tokens[:length]
        if text is None:
            assert (output.text, output.finish_reason) == ("one, two, three, fou", "length")
        else:
            assert (output.text, output.finish_reason) == (text, "stop")
        pieces = list(llm.stream("p", params))
        assert "".join(map(str, pieces)) == output.text
        assert [t for p in pieces for t in p.token_ids] == output.token_ids
        assert [p.finish_reason for p in pieces] == [None] * (length - 1) + [output.finish_reason]


def test_end_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [70, 71, 1, 72, 73]  # the demo's end-of-sentence token is 1
    force(monkeypatch, tokens)
    seed = len(llm.tokenizer.encode("p"))
    ended, ignored = llm.generate(
        ["p", "p"], [SamplingParams(max_tokens=5, seed=seed, ignore_eos=ignore) for ignore in (False, True)]
    )
    assert (ended.token_ids, ended.finish_reason) == (tokens[:3], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")
    assert ended.text == llm.tokenizer.decode(tokens[:2])  # special tokens are no text


def test_end_at_the_last_allowed_token_is_a_stop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, [70, 1])
    seed = len(llm.tokenizer.encode("p"))
    assert llm.generate("p", SamplingParams(max_tokens=2, seed=seed))[0].finish_reason == "stop"


def test_stop_token_ids(llm: LLM) -> None:
    plain = llm.generate(TEXT, GREEDY)[0].token_ids
    wanted = plain[4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[wanted])
    output = llm.generate(TEXT, params)[0]
    assert (output.token_ids, output.finish_reason) == (plain[: plain.index(wanted) + 1], "stop")


def test_min_tokens_forbids_end_and_stop_tokens(llm: LLM) -> None:
    plain = llm.generate(TEXT, GREEDY)[0].token_ids
    stops = list(range(4, 320, 2)) + [plain[0]]
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=9, stop_token_ids=stops)
    output = llm.generate(TEXT, params)[0]
    assert len(output.token_ids) > 9 or output.finish_reason == "length"
    assert not set(output.token_ids[:9]) & {1, *stops}


def test_no_stop_string_before_min_tokens(llm: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    (free,) = llm.generate("def main():", SamplingParams(**params))
    early = free.text[0]
    (output,) = llm.generate("def main():", SamplingParams(**params, stop=[early], min_tokens=10))
    assert len(output.token_ids) > 10
    (cut,) = llm.generate("def main():", SamplingParams(**params, stop=[early]))
    assert cut.text == "" and cut.finish_reason == "stop"


def test_output_ends_at_max_model_len(demo_cache: Path) -> None:
    llm = LLM("demo-random", device="cpu", max_model_len=40, cache_memory="32MiB", progress=False)
    output = llm.generate(list(range(4, 34)), SamplingParams(max_tokens=100, min_tokens=90, ignore_eos=True))[0]
    assert (len(output.token_ids), output.finish_reason) == (10, "length")
    assert len(llm.generate(list(range(4, 43)), SamplingParams(max_tokens=100))[0].token_ids) == 1


def test_what_text_is_made(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop string output or cut, the text of a stop token, special tokens, no text at all."""
    tokens = [*llm.tokenizer.encode("one, two, three")[1:], 1]
    seed = len(llm.tokenizer.encode("p"))
    force(monkeypatch, tokens)
    comma, special = tokens[3], {"skip_special_tokens": False}
    cases: list[tuple[dict[str, Any], str, Any]] = [
        ({"stop": "two"}, "one, ", "two"),
        ({"stop": "two", "include_stop_str_in_output": True}, "one, two", "two"),
        ({"stop_token_ids": [comma]}, "one", comma),
        ({"stop_token_ids": [comma], "include_stop_str_in_output": True}, "one,", comma),
        ({}, "one, two, three", None),
        (special, "one, two, three", None),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "one, two, three<|end_of_sentence|>",
            None,
        ),
        ({"detokenize": False}, "", None),
    ]
    for keys, text, reason in cases:
        params = SamplingParams(max_tokens=20, seed=seed, logprobs=0, **keys)
        (output,) = llm.generate("p", params)[0].outputs
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", reason), keys
        assert output.token_ids == tokens[: len(output.token_ids)]
        assert output.logprobs is not None
        decoded = [next(iter(of.values())).decoded_token for of in output.logprobs]
        assert (decoded == [None] * len(decoded)) == (keys == {"detokenize": False})
        pieces = list(llm.stream("p", params))
        assert "".join(map(str, pieces)) == text and pieces[-1].stop_reason == reason
