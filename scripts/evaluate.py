"""Quality of the demo model: [torchrun --nproc-per-node N] scripts/evaluate.py [--length 1024,8192] [engine options]

Retrieval by length of the document; --json has each case, with the depth of its fact. A case is a document and a
question; it is right if every token of its greedy answer is. With --hf-overrides '{"index_topk": 9216}' attention is
dense up to that length.

With --speculative-config '{"num_speculative_tokens": 3}' also tokens a step with drafts, by sampling parameters, and
how many of 8 continuations of held-out text, 160 tokens with the seeds 0 to 7, are equal without drafts. --rounds 5:
tokens of a second of the engine's thread at 1, 8 and 32 requests, without drafts, with all, and with as many as bring
most: medians of runs in turn, and the ratio of the last to the better of the others.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from demo_model.data import Documents, draw_facts, standard_library
from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.arguments import (
    add_engine_arguments,
    add_json_argument,
    argument_parser,
    lengths,
    llm_from,
    reported,
    run,
)
from dsa_engine.engine.engine import Engine
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.system.output_files import check_outputs

SEED = 1000
SPACING = 64  # tokens of a document per fact
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.6},
    {"temperature": 0.0},
]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--length", type=lengths, default=[1024, 8192], help="tokens of the documents")
    parser.add_argument("--cases", type=int, default=100, help="questions at each length")
    parser.add_argument("--rounds", type=int, default=0, help="of rates with numbers of drafts")
    add_json_argument(parser)
    add_engine_arguments(parser)
    args = parser.parse_args()
    check_outputs(args.json)
    llm = llm_from(args)
    documents = held_out()
    results: dict[int, dict[str, Any]] = {}
    for length in args.length:
        cases = retrieval(llm, documents, length, args.cases)
        results[length] = {"right": sum(right for _, right in cases) / len(cases), "cases": cases}
    drafts = [continuations(llm, documents, how) for how in SAMPLING if llm.engine.runner.num_drafts]
    rates = {requests: rates_of(llm.engine, documents, requests, args.rounds) for requests in (1, 8, 32) if args.rounds}
    if not llm.engine.mesh.is_leader:
        return
    if args.json:
        figures = {"retrieval": results, "drafts": drafts, "rates": rates}
        write_json(args.json, run_report(llm.engine, reported(args), llm.engine.mesh.world_size) | figures)
    rows = [(f"{length:,}", len(result["cases"]), f"{result['right']:.1%}") for length, result in results.items()]
    print(format_table(("tokens", "cases", "right"), rows))
    if drafts:
        measured = [(str(how), f"{one['tokens a step']:.2f}", one["equal"]) for how, one in zip(SAMPLING, drafts)]
        print(format_table(("sampling", "tokens a step", "equal without drafts"), measured))
    if rates:
        shown = [(n, *(f"{rate:,.0f}" for rate in of), f"{of[2] / max(of[:2]):.3f}") for n, of in rates.items()]
        print(format_table(("requests", "no drafts", "all", "as many as bring most", "ratio"), shown))


class Conversation(NamedTuple):
    """A document followed by its questions; ``answers`` are positions of answers, ``depths`` those of their facts,
    0 to 1."""

    tokens: list[int]
    answers: list[range]
    depths: list[float]


def held_out() -> Documents:
    """Text that the shipped model was not trained on."""
    return Documents(standard_library()[1])


def retrieval(llm: LLM, documents: Documents, length: int, count: int) -> list[tuple[float, bool]]:
    """Asks ``count`` questions, ten per document: for each the depth of its fact, 0 to 1, and whether every token of
    the greedy answer is right: with the right answers to earlier questions before it, a single prefill shows it."""
    cases: list[tuple[float, bool]] = []
    while len(cases) < count:
        talk = conversation(documents, length, SEED + len(cases), min(10, count - len(cases)))
        greedy = llm.prompt_logits(talk.tokens).argmax(dim=-1).tolist()
        for depth, answer in zip(talk.depths, talk.answers, strict=True):
            cases.append((depth, all(greedy[i - 1] == talk.tokens[i] for i in answer)))
    return cases


def rates_of(engine: Engine, documents: Documents, requests: int, rounds: int) -> list[float]:
    """Decoded tokens of a second of this thread, at temperature 1: without drafts, with all, and with as many as bring
    most; these have learnt in a round before."""
    rngs = [np.random.default_rng([SEED, seed]) for seed in range(requests)]
    prompts = [[documents.bos, *np.concatenate([*documents.passage(rng, 200)])[:199].tolist()] for rng in rngs]
    chosen, rates = None, dict[Any, list[float]]()
    for number in [0, engine.options.num_drafts, None] * (1 + rounds):
        engine.set_num_drafts(number)
        if number is None:
            decoding = engine.scheduler.decoding
            chosen = decoding.draft_number = chosen or decoding.draft_number
        params = [SamplingParams(max_tokens=400, ignore_eos=True, seed=seed) for seed in range(requests)]
        added = [engine.add(*one) for one in zip(prompts, params, strict=True)]
        while not all(one.output for one in added):
            engine.step()
        before, begun = sum(len(one.output) for one in added), time.thread_time()
        while all(one.finish_reason is None for one in added):
            engine.step()
        seconds = time.thread_time() - begun
        rates.setdefault(number, []).append((sum(len(one.output) for one in added) - before) / seconds)
        while engine.has_work:
            engine.step()
    return [statistics.median(of[1:]) for of in rates.values()]


def continuations(llm: LLM, documents: Documents, how: dict[str, Any], count: int = 8) -> dict[str, Any]:
    """Tokens of a step with drafts, and how many of the outputs are those without drafts."""
    rngs = [np.random.default_rng([SEED, seed]) for seed in range(count)]
    prompts = [[documents.bos, *np.concatenate([*documents.passage(rng, 200)])[:199].tolist()] for rng in rngs]
    params = [SamplingParams(max_tokens=160, ignore_eos=True, seed=seed, **how) for seed in range(count)]
    drafts = llm.engine.runner.num_drafts
    llm.engine.set_num_drafts(drafts)
    drafted = llm.generate(prompts, params)
    llm.engine.set_num_drafts(0)
    plain = llm.generate(prompts, params)
    llm.engine.set_num_drafts(None)
    counts = [one.metrics.speculation for one in drafted if one.metrics.speculation is not None]
    accepted, steps = (sum(of) for of in zip(*((one.num_accepted_tokens, one.num_drafts) for one in counts)))
    equal = sum(one.token_ids == other.token_ids for one, other in zip(drafted, plain))
    return {"sampling": how, "tokens a step": 1 + accepted / steps, "equal": equal}


def conversation(documents: Documents, length: int, seed: int, questions: int = 10) -> Conversation:
    """A document of exactly ``length`` tokens and a question for a fact in each of ``questions`` parts of it, in random
    order; the same arguments give the same tokens. Facts are spread evenly; ``ValueError`` if they are too few."""
    count = length // SPACING
    if count < questions:
        raise ValueError(f"a document of {length} tokens has {count} facts: too few for {questions} questions")
    rng = np.random.default_rng([seed, length, 0])
    tokens, starts, facts = [documents.bos, documents.user], list[int](), draw_facts(rng, count)
    for i in range(count + 1):
        until = int((i + 0.5) * length / count) - 6 if i < count else length
        while (room := until - len(tokens)) > 0:
            for line in documents.passage(rng, room):  # the last line is cut and keeps its line break
                room = until - len(tokens)
                tokens += [*line[: room - 1].tolist(), int(line[-1])] if len(line) > room > 0 else line[:room].tolist()
        if i < count:
            starts.append(len(tokens))
            tokens += documents.fact(*facts[i])
    made = Conversation(tokens, [], [])
    for i, part in enumerate(rng.permutation(questions)):
        inside = [j for j, start in enumerate(starts) if part <= start / length * questions < part + 1]
        asked = int(rng.choice(inside))
        tokens += [*[documents.user] * (i > 0), *documents.question(facts[asked][0])]
        answer = documents.answer(*facts[asked])
        made.answers.append(range(len(tokens), len(tokens) + len(answer)))
        made.depths.append(starts[asked] / length)
        tokens += answer
    return made


if __name__ == "__main__":
    run(main)
