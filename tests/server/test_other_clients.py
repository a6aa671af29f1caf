"""Clients that are no dependency of the tests: lm-eval's two API models on a tiny task, and litellm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams

pytestmark = pytest.mark.slow
QUESTIONS = [
    {"question": "Once upon a", "choices": [" time", " house", " x"], "answer": 0},
    {"question": "The sky is", "choices": [" blue", " a very long answer"], "answer": 1},
]


def task(folder: Path, name: str, **how: Any) -> dict[str, Any]:
    """A task of lm-eval over the questions, from a file."""
    file = folder / "questions.json"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    return {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": "", **how,
    }  # fmt: skip


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``evaluate(model, url, task, **more)``: lm-eval's samples of a task, its metrics and requests its own."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    lm_eval, tasks = pytest.importorskip("lm_eval"), pytest.importorskip("lm_eval.tasks")

    def run(
        model: str, url: str, about: dict[str, Any], arguments: dict[str, Any], **more: Any
    ) -> list[dict[str, Any]]:
        given = {"model": "demo", "base_url": url, "max_retries": 1, "num_concurrent": 2} | arguments
        more |= {"task_manager": tasks.TaskManager(include_defaults=False), "bootstrap_iters": 0}  # it reads no others
        results = lm_eval.simple_evaluate(model, model_args=given, tasks=[about], **more)
        return results["samples"][about["task"]]

    return run


def test_lm_eval_completions(server: Any, llm: LLM, evaluate: Any, tmp_path: Path) -> None:
    """Log-likelihoods of choices are those of the engine, and texts of generation too."""
    url = f"{server.base_url}/v1/completions"
    arguments = {"tokenizer": str(llm.folder), "tokenizer_backend": "huggingface"}
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    about = task(tmp_path, "tiny_choice", **choices, metric_list=[{"metric": "acc"}])
    samples = evaluate("local-completions", url, about, arguments | {"batch_size": 4})
    assert len(samples) == 2
    for sample, question in zip(samples, QUESTIONS, strict=True):
        for choice, ((value, _),) in zip(question["choices"], sample["resps"], strict=True):  # type: ignore[call-overload]
            ids = llm.tokenizer.encode(question["question"] + choice, add_special_tokens=False)  # type: ignore[operator]
            begin = len(llm.tokenizer.encode(question["question"], add_special_tokens=False))  # type: ignore[arg-type]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            (one,) = llm.generate([ids], params)
            assert one.prompt_logprobs is not None
            wanted = sum(of[token] for of, token in zip(one.prompt_logprobs[begin:], ids[begin:]) if of)
            assert float(value) == pytest.approx(wanted, abs=1e-3)

    remote = evaluate("local-completions", url, about, {"tokenizer_backend": "remote", "batch_size": 4})
    values = [[float(value) for ((value, _),) in one["resps"]] for one in [*remote, *samples]]
    assert values[:2] == [pytest.approx(one, abs=1e-3) for one in values[2:]]

    generation = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    limits = {"generation_kwargs": {"max_gen_toks": 6, "until": ["\n\n"]}, "metric_list": [{"metric": "exact_match"}]}
    samples = evaluate("local-completions", url, task(tmp_path, "tiny_text", **generation, **limits), arguments)
    params = SamplingParams(temperature=0, max_tokens=6, stop=["\n\n"])
    for sample, question in zip(samples, QUESTIONS, strict=True):
        ids = llm.tokenizer.encode(question["question"], add_special_tokens=False)  # type: ignore[arg-type]
        assert sample["resps"] == [[llm.generate([ids], params)[0].text]]


def test_lm_eval_chat(server: Any, llm: LLM, evaluate: Any, tmp_path: Path) -> None:
    how = {"generation_kwargs": {"max_gen_toks": 6, "until": ["\n\n"]}, "metric_list": [{"metric": "exact_match"}]}
    about = task(tmp_path, "tiny_chat", output_type="generate_until", doc_to_target="{{choices[answer]}}", **how)
    url = f"{server.base_url}/v1/chat/completions"
    samples = evaluate("local-chat-completions", url, about, {}, apply_chat_template=True)
    params = SamplingParams(temperature=0, max_tokens=6, stop=["\n\n"])
    for sample, question in zip(samples, QUESTIONS, strict=True):
        (wanted,) = llm.chat([{"role": "user", "content": question["question"]}], params)  # type: ignore[arg-type]
        assert sample["resps"] == [[wanted.text]]


def test_litellm(server: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    messages: Any = [{"role": "user", "content": "Hello"}]
    (wanted,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))
    for provider in ("hosted_vllm", "openai"):
        given = {"model": f"{provider}/demo", "api_base": f"{server.base_url}/v1", "api_key": "none"}
        how = {"temperature": 0, "max_tokens": 6, "num_retries": 0}
        answer = litellm.completion(**given, **how, messages=messages)
        assert answer.choices[0].message.content == wanted.text and answer.usage.completion_tokens == 6
        stream = litellm.completion(**given, **how, messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted.text
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        answer = litellm.completion(**given, **how, messages=messages, tools=tools, tool_choice="auto")
        assert answer.choices[0].message.tool_calls is None
    (wanted,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))
    response = litellm.responses(**given, input="Hello", temperature=0, max_output_tokens=16)  # it asks for 16 or more
    assert response.output[0].content[0].text == wanted.text
    with pytest.raises(litellm.BadRequestError, match="max_tokens is 9999"):
        litellm.completion(**given, messages=messages, max_tokens=9999, num_retries=0)
