"""The engine beside ``transformers``: same checkpoint, same threads, one process, runs in turn; prints the ratios.

Logits and greedy tokens of the two are compared too. The prefill of ``transformers`` is quadratic in
time and memory (8,192 tokens of the demo model on one thread: about two minutes and 10 GiB per run).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, run
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.measure.requests import random_prompt
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar
from dsa_engine.system.sizes import available_bytes, format_bytes
from dsa_engine.weights.convert import dequantize_checkpoint
from dsa_engine.weights.model_folder import resolve_model

MAX_ERROR = 1e-3  # relative error of float32 logits; near ties of index scores may select other tokens
CPU = torch.device("cpu")
Work = Callable[[], float]  # returns the timed seconds


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo", help="a Hugging Face model folder, or 'demo' (default)")
    parser.add_argument("--input-len", type=lengths, default=[4096], help="prompt lengths for prefill")
    parser.add_argument("--context", type=lengths, default=[2048], help="context lengths for decode")
    parser.add_argument("--batch-size", type=lengths, default=[1, 8], help="batch sizes for decode")
    parser.add_argument("--output-len", type=int, default=16, help="tokens to decode")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of both")
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.repeat, args.threads) < 1 or args.output_len < 2:
        raise ValueError("--repeat and --threads must be at least 1, --output-len at least 2")
    check_outputs(args.json)
    if not Path("/proc/self/clear_refs").exists():
        raise ValueError("peak memory is read from /proc, which only Linux has")
    torch.set_num_threads(args.threads)
    decodes = list(itertools.product(args.context, args.batch_size))
    model = resolve_model(args.model)
    check_memory(ModelConfig.from_pretrained(model), [(n, 1) for n in args.input_len] + decodes)
    llm, theirs = load(model, args)
    results = []
    with progress_bar(2 * args.repeat * (len(args.input_len) + len(decodes)), "runs", "comparing") as bar:
        for n in args.input_len:
            results.append(compare_prefill(llm, theirs, n, args.repeat, bar))
        for context, batch in decodes:
            results.append(compare_decode(llm, theirs, context, batch, args.output_len, args.repeat, bar))
    if args.json:
        write_json(args.json, environment(CPU, torch.float32, 1) | {"model": args.model, "results": results})
    header = ("", "dsa_engine", "transformers", "ratio", "dsa_engine memory", "transformers memory", "difference")
    print(format_table(header, [row(r) for r in results]))


def check_memory(config: ModelConfig, cases: list[tuple[int, int]]) -> None:
    """Prints the memory that the largest prefill of ``cases`` (length, batch) takes; ``ValueError`` if less is
    available. ``transformers`` has float32 scores of every pair of tokens, in several copies. Measured with the demo
    model (12 heads of the indexer, 8 of attention): 39 numbers a pair, and 50 in a batch of 8; this takes 50."""
    length, batch = max(cases, key=lambda case: case[1] * case[0] ** 2)
    heads = max(config.num_attention_heads, config.index_n_heads)
    needed = batch * length**2 * (4 * heads + 2) * torch.float32.itemsize
    said = (
        f"transformers takes up to about {format_bytes(needed)} beside the weights, for {batch} prompt(s) of "
        f"{length:,} tokens; {format_bytes(available_bytes())} are available"
    )
    if needed > available_bytes():
        raise ValueError(f"{said}: give a shorter --input-len or --context, or a smaller --batch-size")
    print(said, flush=True)


def load(folder: Path, args: argparse.Namespace) -> tuple[LLM, Any]:
    """The model in both, in float32; an FP8 one from a float32 copy, as ``transformers`` does not read it on a CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it lists the MTP module's tensors, which it does not use
    logging.disable_progress_bar()
    longest = max(args.input_len + [c + args.output_len for c in args.context])
    options = {"max_num_seqs": max(args.batch_size), "max_model_len": longest, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as temporary:
        if ModelConfig.from_pretrained(folder).weight_block_size is not None:
            folder = dequantize_checkpoint(folder, Path(temporary, "float32"), dtype=torch.float32).folder
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return LLM(folder, dtype="float32", device="cpu", **options), theirs


def compare_prefill(llm: LLM, theirs: Any, length: int, repeat: int, bar: Any) -> dict[str, Any]:
    """Prefill of one prompt, to the logits of its last token; ``bar`` is updated after every run.

    Raises:
        ValueError: the logits differ by more than :data:`MAX_ERROR`.
    """
    prompt = random_prompt(llm.engine, length)
    ids = torch.tensor([prompt])
    logits: dict[str, torch.Tensor] = {}

    def engine() -> float:
        begin = time.perf_counter()
        logits["engine"] = prefill(llm.engine, prompt)
        return time.perf_counter() - begin

    def transformers() -> float:
        begin = time.perf_counter()
        logits["transformers"] = theirs(ids, use_cache=True, logits_to_keep=1).logits[0, -1].float()
        seconds = time.perf_counter() - begin
        if not error() <= MAX_ERROR:  # NaN too
            raise ValueError(
                f"the logits after {length:,} tokens differ by {error():.1e} (relative), more than {MAX_ERROR:.0e}: "
                "the two do not compute the same, so their times cannot be compared"
            )
        return seconds

    def error() -> float:
        return ((logits["engine"] - logits["transformers"]).norm() / logits["transformers"].norm()).item()

    return in_turn(f"prefill of {length:,}", length, engine, transformers, repeat, bar) | {"relative_error": error()}


def compare_decode(
    llm: LLM, theirs: Any, context: int, batch: int, count: int, repeat: int, bar: Any
) -> dict[str, Any]:
    """Decode of ``count`` tokens, greedy, after ``context`` tokens; only the tokens after the first are timed.

    ``transformers`` prefills in its first run and decodes from a copy of that cache in the others.
    """
    prompts = [random_prompt(llm.engine, context, seed=i) for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    tokens: dict[str, torch.Tensor] = {}

    def engine() -> float:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens["engine"] = torch.tensor([o.token_ids for o in outputs])
        # Requests that were prefilled first have also waited for the others; the fastest one has only decoded.
        return min(o.metrics.tpot_s or 0.0 for o in outputs) * (count - 1)

    @cache
    def prefilled() -> Any:
        return theirs(torch.tensor(prompts), use_cache=True, logits_to_keep=1)

    def transformers() -> float:
        past = copy.deepcopy(prefilled().past_key_values)
        chosen = [prefilled().logits[:, -1].argmax(-1, keepdim=True)]
        begin = time.perf_counter()
        for _ in range(count - 1):
            out = theirs(chosen[-1], past_key_values=past, use_cache=True)
            chosen.append(out.logits[:, -1].argmax(-1, keepdim=True))
        seconds = time.perf_counter() - begin
        tokens["transformers"] = torch.cat(chosen, dim=1)
        return seconds

    name = f"decode at {context:,}, batch {batch}"
    result = in_turn(name, batch * (count - 1), engine, transformers, repeat, bar)
    same = int((tokens["engine"] == tokens["transformers"]).sum())
    return result | {"equal_tokens": same, "tokens": batch * count}


def in_turn(name: str, amount: int, engine: Work, transformers: Work, repeat: int, bar: Any) -> dict[str, Any]:
    """Alternates the runs of ``amount`` tokens, so that a drift of the machine's speed affects both. Memory is the
    peak above that of the process before a run."""
    sides = {"engine": engine, "transformers": transformers}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    peaks = dict.fromkeys(sides, 0)
    for _ in range(repeat):
        for side, work in sides.items():
            reset_peak(CPU)
            before = peak_bytes(CPU)
            seconds[side].append(work())
            peaks[side] = max(peaks[side], peak_bytes(CPU) - before)
            bar.update(1)
    medians = {side: statistics.median(seconds[side]) for side in sides}
    result: dict[str, Any] = {"name": name, "unit": "tokens/s", "ratio": medians["transformers"] / medians["engine"]}
    for side in sides:
        result |= {side: amount / medians[side], f"{side}_seconds": seconds[side], f"{side}_peak_bytes": peaks[side]}
    return result


def row(r: dict[str, Any]) -> tuple[str, ...]:
    if "relative_error" in r:
        difference = f"logits {r['relative_error']:.1e}"
    else:
        difference = f"{r['equal_tokens']} of {r['tokens']} tokens equal"
    rates = [f"{r[side]:,.1f} {r['unit']}" for side in ("engine", "transformers")]
    memory = [format_bytes(r[f"{side}_peak_bytes"]) for side in ("engine", "transformers")]
    return (r["name"], *rates, f"{r['ratio']:.1f}x", *memory, difference)


if __name__ == "__main__":
    run(main)
