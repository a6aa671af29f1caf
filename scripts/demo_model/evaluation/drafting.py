"""Gain of speculative decoding on the trained model: acceptance by position, and time per token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from demo_model.data import Documents
from demo_model.evaluation.cases import PASSAGE, conversation
from dsa_engine.llm import LLM
from dsa_engine.outputs import SpeculationMetrics
from dsa_engine.sampling_params import SamplingParams

TEXT_TOKENS = 64  # generated after a text
SEED = 3000


@dataclass
class Drafted:
    """Results of the generations of one kind with one number of drafts; ``tpot`` in seconds."""

    tokens: list[list[int]] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    speculation: list[SpeculationMetrics] = field(default_factory=list)

    def counts(self) -> SpeculationMetrics:
        """Counts of drafts, summed over all generations."""
        length = max((len(one.num_draft_tokens_per_pos) for one in self.speculation), default=0)

        def total(name: str) -> tuple[int, ...]:
            padded = [(*getattr(one, name), *(0,) * length)[:length] for one in self.speculation]
            return tuple(map(sum, zip(*padded, strict=True)))

        drafts = sum(one.num_drafts for one in self.speculation)
        return SpeculationMetrics(drafts, total("num_draft_tokens_per_pos"), total("num_accepted_tokens_per_pos"))


def requests(documents: Documents, length: int, count: int) -> dict[str, list[tuple[list[int], int]]]:
    """Prompts of about ``length`` tokens and the number of tokens to generate after each: held-out text, questions
    for a fact of a document, and a passage of a document to repeat."""
    prompts: dict[str, list[tuple[list[int], int]]] = {"text": [], "facts": [], "passages": []}
    for i in range(count):
        batch = documents.batch(SEED + i, 1, length, plain=1.0, jumps=False)
        prompts["text"].append((torch.from_numpy(batch.tokens[0]).tolist(), TEXT_TOKENS))
        for name, kind in (("facts", "two"), ("passages", "continue")):
            talk = conversation(documents, length, SEED + i, kind=kind, questions=1)
            answer = talk.questions[0].answer
            prompts[name].append((talk.tokens[: answer.start], PASSAGE if kind == "continue" else len(answer)))
    return prompts


def measure_drafting(
    llm: LLM, documents: Documents, length: int, count: int, drafts: Sequence[int]
) -> dict[str, dict[int, Drafted]]:
    """Generates greedily for every prompt with every number of drafts, in turn; by kind and number of drafts."""
    results: dict[str, dict[int, Drafted]] = {}
    for kind, asked in requests(documents, length, count).items():
        results[kind] = {number: Drafted() for number in drafts}
        for prompt, tokens in asked:
            for number in drafts:
                llm.wait_idle()
                llm.engine.draft(number)
                params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
                output = llm.generate([prompt], params, use_tqdm=False)[0]
                metrics, drafted = output.metrics, results[kind][number]
                drafted.tokens.append(output.token_ids)
                drafted.tpot.append(metrics.tpot_s or 0.0)
                if metrics.speculation is not None:
                    drafted.speculation.append(metrics.speculation)
    return results


def report(results: dict[str, dict[int, Drafted]]) -> list[dict[str, Any]]:
    """A row per kind and number of drafts; ``same_tokens``: generations that equal those with the first."""
    rows = []
    for kind, by_number in results.items():
        plain = next(iter(by_number.values()))
        for number, one in by_number.items():
            counts = one.counts()
            rows.append(
                {
                    "kind": kind,
                    "num_speculative_tokens": number,
                    "generations": len(one.tokens),
                    "tokens": sum(map(len, one.tokens)),
                    "same_tokens": sum(a == b for a, b in zip(one.tokens, plain.tokens, strict=True)),
                    "median_tpot_ms": statistics.median(one.tpot) * 1e3,
                    "acceptance_rates": counts.acceptance_rates,
                    "mean_acceptance_length": counts.mean_acceptance_length if counts.num_drafts else 1.0,
                    "num_drafts": counts.num_drafts,
                }
            )
    return rows
