"""The model that ships: it is what the log says, others can load it, and it finds facts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from demo_model import recipe
from dsa_engine import LLM, SamplingParams
from dsa_engine.demo import trained_folder
from evaluate import conversation, held_out, retrieval

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=8192, cache_memory="64MiB", progress=False)


def test_the_files_are_those_of_the_log() -> None:
    *steps, last = [json.loads(line) for line in (RESULTS / "training_log.jsonl").read_text().splitlines()]
    files = {path.name: path.read_bytes() for path in trained_folder().iterdir()}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == last["files_sha256"]
    assert steps[-1]["step"] + 1 == sum(phase.steps for phase in recipe.PHASES)
    assert 5e6 < sum(map(len, files.values())) < 16e6


def test_it_finds_facts_beyond_what_it_attends_to(llm: LLM) -> None:
    cases = retrieval(llm, held_out(), 2048, 20)  # index_topk is 256
    assert sum(right for _, right in cases) >= 17 and {int(depth * 10) for depth, _ in cases} == set(range(10))


def test_the_chat_template_asks_the_same_question(llm: LLM) -> None:
    text = "".join(f"A line of text, the {i}th of them.\nkey {37 * i:04} is {i:02}\n" for i in range(10, 60))
    (output,) = llm.chat([{"role": "user", "content": text + "What is key 0925?"}], SamplingParams(temperature=0.0))
    assert output.text == "key 0925 is 25" and output.finish_reason == "stop"


def test_transformers_loads_the_folder_and_agrees(llm: LLM, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from dsa_engine.weights.convert import dequantize_checkpoint

    # transformers reads FP8 blocks with kernels for GPUs only, so its copy has the same weights expanded.
    dequantize_checkpoint(trained_folder(), tmp_path / "plain", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained_folder())
    tokens = conversation(held_out(), 1024, 4).tokens[:1150]
    assert tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) == tokens
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = llm.prompt_logits(tokens)
    relative = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)
    assert (relative > 1e-4).float().mean() < 0.01 and relative.median() < 1e-5
    assert torch.equal(theirs.argmax(-1)[1024:], ours.argmax(-1)[1024:])
