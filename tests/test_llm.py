"""The generate API on the demo model, in one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.demo import demo_folder
from dsa_engine.engine.calls.jobs import prefill

TEXT = "def selection(tokens):\n    return sorted(tokens)[:256]\n" * 8
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def load(model: str | Path = "demo-random", **options: Any) -> LLM:
    return LLM(model, device="cpu", **{"max_model_len": 2048, "cache_memory": "32MiB", "progress": False} | options)


def test_greedy_follows_the_prompt_logits(llm: LLM) -> None:
    """Every token is the best one after those before it, by a prefill of all of them."""
    output = llm.generate(TEXT, GREEDY)[0]
    ids = output.prompt_token_ids + output.token_ids
    logits = llm.prompt_logits(ids)
    assert logits.shape == (len(ids), 320) and logits.dtype == torch.float32 and logits.device.type == "cpu"
    assert logits[len(output.prompt_token_ids) - 1 : -1].argmax(dim=-1).tolist() == output.token_ids
    assert torch.allclose(prefill(llm.engine, ids), logits[-1], atol=1e-4)
    assert torch.equal(llm.prompt_logits(TEXT), llm.prompt_logits(output.prompt_token_ids))


def test_a_seed_gives_the_same_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.9, max_tokens=16, seed=5, ignore_eos=True)
    alone = llm.generate(TEXT, params)[0].token_ids
    others = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = llm.generate([TEXT[:99], TEXT, "x"], [others, params, others])
    assert outputs[1].token_ids == alone
    changed = llm.generate(TEXT, SamplingParams(temperature=1.5, top_p=0.9, max_tokens=16, seed=6, ignore_eos=True))
    assert changed[0].token_ids != alone


def test_the_engine_seed_is_for_requests_without_their_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    first, second = ([o.token_ids for o in load(seed=3).generate(["a", "a"], params)] for _ in range(2))
    assert first == second and first[0] != first[1]
    assert [o.token_ids for o in load(seed=4).generate(["a", "a"], params)] != first


def test_metrics(llm: LLM) -> None:
    one, many = llm.generate([TEXT, TEXT], [SamplingParams(max_tokens=1), GREEDY])
    assert one.metrics.ttft_s > 0 and one.metrics.tpot_s is None
    assert many.metrics.ttft_s > 0 and many.metrics.tpot_s is not None and many.metrics.tpot_s > 0


def test_streams_side_by_side_and_a_batch_between(llm: LLM) -> None:
    """Steps are shared by all that runs; each caller gets its own tokens, however the iterators are advanced."""
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (9, 6, 5)]
    prompts = [TEXT[:50], TEXT[:300], "third"]
    expected = [llm.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    first, second = (llm.stream(p, q) for p, q in zip(prompts[:2], params[:2], strict=True))
    streamed: list[list[Any]] = [[next(first), next(first)], [next(second)]]
    third = llm.generate(prompts[2], params[2])[0]
    assert third.token_ids == expected[2].token_ids
    assert len(llm.prompt_logits("x")) == len(llm.tokenizer.encode("x"))  # after both streams have come to their ends
    for stream, pieces in ((second, streamed[1]), (first, streamed[0])):
        pieces += list(stream)
    for pieces, output in zip(streamed, expected[:2], strict=True):
        assert [t for p in pieces for t in p.token_ids] == output.token_ids
        assert "".join(p.text for p in pieces) == output.text
        assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}]
    ids = llm.conversation_format.token_ids(conversation)
    assert llm.tokenizer.decode(ids) == "SHello" and ids[-1] == 3
    one = llm.chat(conversation, GREEDY)[0]
    assert one.prompt_token_ids == ids and one.token_ids == llm.generate([ids], GREEDY)[0].token_ids
    assert one.message == {"role": "assistant", "content": one.text}
    several = llm.chat([conversation, [{"role": "user", "content": "Bye"}]], GREEDY)
    assert len(several) == 2 and several[0].token_ids == one.token_ids


def test_a_folder_without_tokenizer(demo_cache: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_folder(), tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    llm = load(tmp_path)
    ids = list(range(4, 90))
    output = llm.generate([ids], GREEDY)[0]
    assert output.text == "" and output.token_ids == load().generate([ids], GREEDY)[0].token_ids
    pieces = list(llm.stream(ids, GREEDY))
    assert {p.text for p in pieces} == {""} and [t for p in pieces for t in p.token_ids] == output.token_ids
    for call in (
        lambda: llm.generate("text", GREEDY),
        lambda: llm.generate([ids], SamplingParams(stop="x")),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(ValueError, match="has no tokenizer; give prompts as lists of token ids, and no stop"):
            call()
    assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]


def test_a_folder_without_chat_template(demo_cache: Path, tmp_path: Path) -> None:
    """With the released Python file beside it, conversations have DeepSeek-V3.2's own form."""
    shutil.copytree(demo_folder(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    llm, conversation = load(tmp_path), [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="has no chat template; use generate"):
        llm.chat(conversation)
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv32.py").write_text("TOOLS_SYSTEM_TEMPLATE = 'Tools: {tool_schemas}'")
    tools = [{"type": "function", "function": {"name": "f"}}]
    thinking, chatting = (
        llm.chat(conversation, GREEDY, chat_template_kwargs={"thinking": thinks}, tools=tools)[0]
        for thinks in (True, False)
    )
    prompt = '<｜begin▁of▁sentence｜>\n\nTools: {"name": "f"}<｜User｜>x<｜Assistant｜>'
    assert (thinking.prompt, chatting.prompt) == (f"{prompt}<think>", f"{prompt}</think>")
    text = llm.tokenizer.decode(thinking.token_ids, skip_special_tokens=False)
    assert thinking.message == {"role": "assistant", "content": "", "reasoning_content": text}
    text = llm.tokenizer.decode(chatting.token_ids, skip_special_tokens=False)
    assert chatting.outputs[0].message == {"role": "assistant", "content": text}


def test_dummy_weights_need_config_json_only(demo_cache: Path, tmp_path: Path) -> None:
    shutil.copy(demo_folder() / "config.json", tmp_path)
    first, second, other = (load(tmp_path, load_format="dummy", seed=s) for s in (1, 1, 2))
    logits = first.prompt_logits([5, 6, 7])
    assert bool(torch.isfinite(logits).all()) and float(logits.std()) > 0
    assert torch.equal(logits, second.prompt_logits([5, 6, 7]))
    assert not torch.equal(logits, other.prompt_logits([5, 6, 7]))
    assert first.engine.bytes_read == 0


def test_nothing_is_printed_when_no_terminal_is_there(demo_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(progress=True).generate(TEXT, GREEDY)
    captured = capfd.readouterr()
    assert captured.out == "" and "generating" not in captured.err and "loading" not in captured.err


def test_what_vllm_users_read(llm: LLM) -> None:
    """The fields of vLLM's outputs, beside the short ones."""
    stop = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=list(range(320)), logprobs=2)
    first, second = llm.generate(["some text", [5, 6]], [GREEDY, stop])
    assert (first.prompt, second.prompt, second.prompt_token_ids) == ("some text", None, [5, 6])
    assert first.finished and first.request_id != second.request_id and first.prompt_logprobs is None
    (one,), (two,) = first.outputs, second.outputs
    assert (one.index, one.text, one.token_ids) == (0, first.text, first.token_ids)
    assert (one.finish_reason, one.stop_reason, one.logprobs) == ("length", None, None)
    assert (two.finish_reason, two.stop_reason) == ("stop", two.token_ids[-1]) and len(two.token_ids) == 1
    assert two.logprobs is not None and two.cumulative_logprob == two.logprobs[0][two.token_ids[0]].logprob
    best = next(iter(two.logprobs[0].values()))
    assert (best.rank, best.decoded_token) == (1, llm.tokenizer.decode(two.token_ids))
    assert "rank=1" in repr(best)
    assert second.logprobs == two.logprobs and second.metrics is two.metrics and second.error is None


def test_prompts_of_every_form(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    ids = llm.tokenizer.encode("some text")
    forms: list[Any] = [
        *("some text", {"prompt": "some text"}, ids, tuple(ids), {"prompt_token_ids": ids}, numpy.array(ids)),
        *(torch.tensor(ids), numpy.array(ids, dtype=numpy.uint16), [numpy.int32(i) for i in ids]),
        *({"prompt_token_ids": torch.tensor(ids), "prompt": "for reading"}, list(torch.tensor(ids))),
    ]
    outputs = llm.generate(forms, GREEDY) + [llm.generate(form, GREEDY)[0] for form in forms]
    outputs += llm.generate(numpy.array([ids, ids]), GREEDY)
    assert {tuple(o.prompt_token_ids) for o in outputs} == {tuple(ids)}
    assert len({tuple(o.token_ids) for o in outputs}) == 1 and outputs[9].prompt == "for reading"
    assert llm.generate([]) == [] and llm.generate((), []) == []
    assert "".join(piece.text for piece in llm.stream({"prompt": "some text"}, GREEDY)) == outputs[0].text
    wrong: list[tuple[Any, str]] = [
        ([ids, {"text": "x"}], r"^prompts\[1\]: a prompt is a text or .*, not a dictionary with the keys 'text'"),
        ([ids, "x", {}], r"^prompts\[2\]: .* with the keys \(none\)"),
        ([ids, {"prompt": 5}], r"^prompts\[1\]: the prompt in a dictionary must be a text, not 5"),
        ([ids, {"prompt": "x", "multi_modal_data": {}}], r"^prompts\[1\]: .* the keys 'prompt', 'multi_modal_data'"),
        (numpy.array([0.5]), "a prompt is a text or a list of integer token ids"),
        ([ids, [True]], r"^prompts\[1\]: a prompt is a text or a list of integer token ids .*, not \[True\]"),
    ]
    for prompts, message in wrong:
        with pytest.raises(TypeError, match=message):
            llm.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match=r"^prompts\[2\]: token id 320 is out of range"):
        llm.generate([ids, "x", [5, 320]], GREEDY)


def test_chat_arguments(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    plain = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0]
    assert llm.chat(parts, GREEDY)[0].token_ids == plain.token_ids and plain.prompt is not None
    assert plain.prompt.endswith("Hello<|Assistant|>")
    begun = [*parts, {"role": "assistant", "content": "I"}]
    (output,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None and output.prompt.endswith("<|Assistant|>I")
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    (output,) = llm.chat(parts, GREEDY, chat_template="{{ a }}", chat_template_kwargs={"a": "xyz"})
    assert output.prompt == "xyz" and llm.get_tokenizer().decode(output.prompt_token_ids) == "xyz"
