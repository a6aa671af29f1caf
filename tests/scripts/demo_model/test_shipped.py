"""The model that ships: it is what the log says, others can load it, and it finds facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from demo_model import recipe
from demo_model.attention import Mode
from demo_model.evaluation.cases import conversation
from demo_model.evaluation.quality import held_out, perplexity, retrieval, second_next, summary
from demo_model.evaluation.selection import selection
from demo_model.export import load_checkpoint
from demo_model.pictures import plot_retrieval
from demo_model.ship import digests
from dsa_engine import LLM, SamplingParams
from dsa_engine.demo import trained_folder

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=8192, cache_memory="64MiB", progress=False)


def test_the_files_are_those_of_the_log() -> None:
    *steps, last = [json.loads(line) for line in (RESULTS / "training_log.jsonl").read_text().splitlines()]
    assert digests(trained_folder()) == last["files_sha256"]
    assert [step["step"] for step in steps] == list(range(sum(phase.steps for phase in recipe.PHASES)))
    assert json.loads((trained_folder() / "config.json").read_text()) == recipe.model_config()
    assert 5e6 < sum(path.stat().st_size for path in trained_folder().iterdir()) < 16e6


def test_it_finds_facts_beyond_what_it_attends_to(llm: LLM, tmp_path: Path) -> None:
    result = summary(retrieval(llm, held_out(llm), 2048, 20))  # index_topk is 256
    assert result["accuracy"] >= 0.85 and result["value_found"] >= 0.95
    assert len(result["recall_by_layer"]) == 3 and len(result["accuracy_by_depth"]) == 10
    plot_retrieval([result], str(tmp_path / "map.png"))
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_selection_matters(llm: LLM) -> None:
    documents = held_out(llm)
    random, recent = (summary(retrieval(llm, documents, 2048, 10, select=kind)) for kind in ("random", "recent"))
    assert random["accuracy"] <= 0.2 and recent["accuracy"] <= 0.2
    assert 0.0 < random["recall_by_layer"][1] < 0.4 and recent["value_found"] <= 0.2
    with pytest.raises(ValueError, match="no such selection"), selection("best", 3, {}):
        llm.prompt_logits(conversation(documents, 1024, 0).tokens)


def test_the_chat_template_asks_the_same_question(llm: LLM) -> None:
    text = "".join(f"A line of text, the {i}th of them.\nkey {37 * i:04} is {i:02}\n" for i in range(10, 60))
    (output,) = llm.chat([{"role": "user", "content": text + "What is key 0925?"}], SamplingParams(temperature=0.0))
    assert output.text == "key 0925 is 25" and output.finish_reason == "stop"


def test_training_forward_and_engine_agree_on_the_shipped_weights(llm: LLM) -> None:
    model = load_checkpoint(trained_folder()).eval()
    tokens = conversation(held_out(llm), 1024, 3).tokens
    with torch.no_grad():
        outputs = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], Mode("sparse", 256), mtp=False)
        logits = model.lm_head(outputs.hidden)[0]
    engine = llm.prompt_logits(tokens)
    relative = (logits - engine).norm(dim=-1) / engine.norm(dim=-1)
    assert (relative > 1e-4).float().mean() < 0.01 and (logits - engine).norm() / engine.norm() < 1e-3
    assert relative.median() < 1e-5


def test_transformers_loads_the_folder_and_agrees(llm: LLM, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from dsa_engine.convert import dequantize_checkpoint

    # transformers reads FP8 blocks with kernels for GPUs only, so its copy has the same weights expanded.
    dequantize_checkpoint(trained_folder(), tmp_path / "plain", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained_folder())
    tokens = conversation(held_out(llm), 1024, 4).tokens[:1150]
    assert tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False) == tokens
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = llm.prompt_logits(tokens)
    relative = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1)
    assert (relative > 1e-4).float().mean() < 0.01 and relative.median() < 1e-5
    assert torch.equal(theirs.argmax(-1)[1024:], ours.argmax(-1)[1024:])


def test_perplexity_and_second_next_tokens(llm: LLM) -> None:
    documents = held_out(llm)
    assert 1.5 < perplexity(llm, documents, 1024, 2)["loss"] < 3.2  # 768 tokens: 6.6 without knowing anything
    figures = second_next(load_checkpoint(trained_folder()), documents, 512, 3)
    assert figures["text"]["module_right"] > 0.2 and figures["conversations"]["module_agrees"] > 0.5
