"""The engine and ``transformers`` doing the same work in turn, in one process on the CPU."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.llm import LLM
from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.requests import random_prompt
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.weights.convert import dequantize_checkpoint

MAX_ERROR = 1e-3  # relative error of float32 logits; near ties of index scores may select other tokens


@dataclass
class Side:
    """Results of one of the two libraries, run by run."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0  # peak memory above that of the process before the run

    def measure(self, work: Callable[[], float]) -> None:
        """Runs ``work``, which returns the timed seconds."""
        cpu = torch.device("cpu")
        reset_peak(cpu)
        before = peak_bytes(cpu)
        self.seconds.append(work())
        self.peak_bytes = max(self.peak_bytes, peak_bytes(cpu) - before)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def prefill_bytes(config: ModelConfig, length: int, batch: int = 1) -> int:
    """About the largest memory that ``transformers`` takes for a prefill: float32 scores of every pair of tokens, in
    several copies. Measured with the demo model (12 heads of the indexer, 8 of attention): 39 numbers a pair, and 50 in
    a batch of 8; this gives 50."""
    heads = max(config.num_attention_heads, config.index_n_heads)
    return batch * length**2 * (4 * heads + 2) * torch.float32.itemsize


@contextmanager
def float32_checkpoint(folder: Path) -> Iterator[Path]:
    """The folder, or its float32 copy if it is FP8, which ``transformers`` does not read on a CPU."""
    if ModelConfig.from_pretrained(folder).weight_block_size is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield dequantize_checkpoint(folder, Path(temporary, "float32"), dtype=torch.float32).folder


def load_transformers(folder: Path) -> Any:
    """The model in ``transformers``, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it lists the MTP module's tensors, which it does not use
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def relative_error(values: torch.Tensor, reference: torch.Tensor) -> float:
    return ((values - reference).norm() / reference.norm()).item()


@torch.inference_mode()
def compare_prefill(llm: LLM, theirs: Any, length: int, repeat: int, bar: Any) -> dict[str, Any]:
    """Prefill of one prompt, to the logits of its last token; ``bar`` is updated after every run.

    Raises:
        ValueError: the logits of the first runs differ by more than :data:`MAX_ERROR`.
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
        return time.perf_counter() - begin

    def error() -> float:
        return relative_error(logits["engine"], logits["transformers"])

    def check() -> None:
        if not error() <= MAX_ERROR:  # NaN too
            raise ValueError(
                f"the logits after {length:,} tokens differ by {error():.1e} (relative), more than {MAX_ERROR:.0e}: "
                "the two do not compute the same, so their times cannot be compared"
            )

    a, b = _in_turn(engine, transformers, repeat, bar, check)
    return _result(f"prefill of {length:,}", "tokens/s", length, a, b) | {"relative_error": error()}


@torch.inference_mode()
def compare_decode(
    llm: LLM, theirs: Any, context: int, batch: int, count: int, repeat: int, bar: Any
) -> dict[str, Any]:
    """Decode of ``count`` tokens, greedy, after ``context`` tokens; only the tokens after the first are timed.

    ``transformers`` prefills in its first run and decodes from a copy of that cache in the others.
    """
    prompts = [random_prompt(llm.engine, context, seed=i) for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    tokens: dict[str, list[list[int]]] = {}

    def engine() -> float:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens["engine"] = [o.token_ids for o in outputs]
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
        tokens["transformers"] = torch.cat(chosen, dim=1).tolist()
        return seconds

    a, b = _in_turn(engine, transformers, repeat, bar)
    pairs = zip(tokens["engine"], tokens["transformers"], strict=True)
    same = sum(x == y for mine, other in pairs for x, y in zip(mine, other, strict=True))
    name = f"decode at {context:,}, batch {batch}"
    return _result(name, "tokens/s", batch * (count - 1), a, b) | {"equal_tokens": same, "tokens": batch * count}


def _in_turn(
    engine: Callable[[], float],
    transformers: Callable[[], float],
    repeat: int,
    bar: Any,
    check: Callable[[], None] = lambda: None,
) -> tuple[Side, Side]:
    """Alternates the runs, so that a drift of the machine's speed affects both; ``check`` is called after each pair."""
    a, b = Side(), Side()
    for _ in range(repeat):
        for side, work in ((a, engine), (b, transformers)):
            side.measure(work)
            bar.update(1)
        check()
    return a, b


def _result(name: str, unit: str, amount: int, a: Side, b: Side) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "engine": amount / a.median,
        "transformers": amount / b.median,
        "ratio": b.median / a.median,
        "engine_seconds": a.seconds,
        "transformers_seconds": b.seconds,
        "engine_peak_bytes": a.peak_bytes,
        "transformers_peak_bytes": b.peak_bytes,
    }
