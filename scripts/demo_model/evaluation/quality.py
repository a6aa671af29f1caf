"""Quality of a model: retrieval by length and depth, recall of its indexer, perplexity, MTP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from demo_model.attention import Mode
from demo_model.corpus import standard_library
from demo_model.data import Documents
from demo_model.evaluation.cases import Conversation, conversation
from demo_model.evaluation.selection import Watched, selection
from demo_model.model import TrainingModel
from demo_model.prepare import documents_of
from dsa_engine.llm import LLM

SEED = 1000


@dataclass(frozen=True)
class RetrievalCase:
    """Result of one question: whether the whole greedy answer is right; and by layer, for the query that predicts the
    value, the fraction of the needle's tokens that it selects, and whether it selects the value."""

    length: int
    depth: float
    right: bool
    tokens_right: float
    recall: tuple[float, ...]
    value_selected: tuple[bool, ...]


def held_out(llm: LLM) -> Documents:
    """Text that the shipped model was not trained on, in the tokens of the model's folder."""
    return documents_of((llm.folder / "tokenizer.json").read_text(encoding="utf-8"), standard_library().held_out)


def retrieval(
    llm: LLM,
    documents: Documents,
    length: int,
    count: int,
    *,
    kind: str = "fact",
    select: str = "trained",
    seed: int = SEED,
) -> list[RetrievalCase]:
    """Asks ``count`` questions, ten per document; for the arguments see ``cases.conversation`` and
    ``selection.selection``."""
    cases: list[RetrievalCase] = []
    layers = llm.engine.config.num_hidden_layers
    while len(cases) < count:
        each = min(10, count - len(cases))
        talk = conversation(documents, length, seed + len(cases), kind=kind, questions=each)
        watched: Watched = {question.asks: question.needle for question in talk.questions}
        with selection(select, layers, watched, seed) as selected_rows:
            greedy = llm.prompt_logits(talk.tokens).argmax(dim=-1)
        cases += _score(talk, greedy, selected_rows)
    return cases


def _score(
    talk: Conversation, greedy: torch.Tensor, selected_rows: dict[int, list[dict[int, bool]]]
) -> list[RetrievalCase]:
    cases = []
    for question in talk.questions:
        right = [int(greedy[position - 1]) == talk.tokens[position] for position in question.answer]
        layers = selected_rows.get(question.asks, [])
        recall = tuple(sum(layer.values()) / len(layer) for layer in layers)
        value_selected = tuple(layer[question.value] for layer in layers)
        cases.append(
            RetrievalCase(talk.length, question.depth, all(right), sum(right) / len(right), recall, value_selected)
        )
    return cases


def summary(cases: list[RetrievalCase]) -> dict[str, Any]:
    """Figures of cases of one length."""
    layers = max((len(case.recall) for case in cases), default=0)
    selected = [case for case in cases if case.recall]
    by_depth: dict[str, list[bool]] = {}
    for case in cases:
        by_depth.setdefault(f"{min(int(case.depth * 10), 9) / 10:.1f}", []).append(case.right)
    return {
        "length": cases[0].length,
        "cases": len(cases),
        "accuracy": sum(case.right for case in cases) / len(cases),
        "tokens_right": sum(case.tokens_right for case in cases) / len(cases),
        "recall_by_layer": [sum(case.recall[i] for case in selected) / len(selected) for i in range(layers)],
        "value_found_by_layer": [
            sum(case.value_selected[i] for case in selected) / len(selected) for i in range(layers)
        ],
        "value_found": sum(any(case.value_selected) for case in selected) / len(selected) if selected else None,
        "accuracy_by_depth": {depth: sum(right) / len(right) for depth, right in sorted(by_depth.items())},
    }


def perplexity(llm: LLM, documents: Documents, length: int, count: int, seed: int = SEED) -> dict[str, Any]:
    """Mean loss in nats per token over ``count`` held-out texts of ``length`` tokens, and its exponential."""
    total, tokens = 0.0, 0
    for i in range(count):
        batch = documents.batch(seed + i, 1, length, plain=1.0, jumps=False)
        ids = torch.from_numpy(batch.tokens[0])
        logits = llm.prompt_logits(ids.tolist())
        total += torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
        tokens += length - 1
    return {"length": length, "tokens": tokens, "loss": total / tokens, "perplexity": math.exp(total / tokens)}


def divergence(
    llm: LLM, reference: LLM, documents: Documents, length: int, count: int, seed: int = SEED
) -> dict[str, Any]:
    """Distance of a model's next tokens from those of ``reference``, on the texts of :func:`perplexity`: mean and
    maximum of KL(reference ‖ model) in nats per token, and the fraction of equal greedy tokens."""
    total, largest, same, tokens = 0.0, 0.0, 0, 0
    for i in range(count):
        ids = documents.batch(seed + i, 1, length, plain=1.0, jumps=False).tokens[0].tolist()
        wanted = reference.prompt_logits(ids).double().log_softmax(dim=-1)
        ours = llm.prompt_logits(ids).double().log_softmax(dim=-1)
        each = (wanted.exp() * (wanted - ours)).sum(dim=-1)
        total, largest = total + float(each.sum()), max(largest, float(each.max()))
        same += int((wanted.argmax(dim=-1) == ours.argmax(dim=-1)).sum())
        tokens += length
    return {"tokens": tokens, "kl": total / tokens, "largest_kl": largest, "same_greedy_token": same / tokens}


@torch.no_grad()
def second_next(
    model: TrainingModel, documents: Documents, length: int, count: int, seed: int = SEED
) -> dict[str, Any]:
    """Accuracy of the MTP module for the second next token of held-out text and of answers to questions, and how often
    it agrees with the main model one token later, which is the acceptance of speculative decoding."""
    model.eval()
    figures: dict[str, Any] = {}
    topk = model.config.index_topk
    for name, plain in (("text", 1.0), ("conversations", 0.0)):
        main = module = agreed = targets = 0
        for i in range(count):
            batch = documents.batch(seed + i, 1, length, plain=plain, restate=0.0, jumps=False)
            tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
            wanted = torch.from_numpy(batch.weights[0, 2:] >= (0.5 if plain else 1.0))
            outputs = model(tokens, positions, Mode("sparse", topk))
            assert outputs.mtp_hidden is not None
            said = model.lm_head(outputs.hidden)[0, 1:-1].argmax(-1)[wanted]
            drafted = model.lm_head(outputs.mtp_hidden)[0, :-1].argmax(-1)[wanted]
            truth = tokens[0, 2:][wanted]
            main += int((said == truth).sum())
            module += int((drafted == truth).sum())
            agreed += int((drafted == said).sum())
            targets += int(wanted.sum())
        figures[name] = {
            "tokens": targets,
            "main_model_right": main / targets,
            "module_right": module / targets,
            "module_agrees": agreed / targets,
        }
    return figures
