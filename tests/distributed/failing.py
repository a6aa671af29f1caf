"""A run in which something goes wrong on purpose: torchrun … failing.py HOW FOLDER."""

from __future__ import annotations

import os
import signal
import sys
import time

from dsa_engine import LLM, CapacityError, ParallelConfig, SamplingParams

HOW, FOLDER = sys.argv[1:]
RANK = int(os.environ["RANK"])
OPTIONS = {"max_model_len": 256, "cache_memory": "64MiB", "load_format": "dummy"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def one_rank_raises() -> None:
    raise ValueError("the third step \udcff\nof rank 1 was too much for it")


def one_rank_is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_rank_hangs() -> None:
    time.sleep(300)


def one_rank_is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_is_interrupted() -> None:
    signal.raise_signal(signal.SIGINT)  # what Ctrl-C sends


def one_rank_leaves() -> None:
    sys.exit(3)


def in_the_third_step() -> None:
    llm = LLM(
        FOLDER,
        **OPTIONS,
        parallel=ParallelConfig(timeout=5 if HOW in ("one_rank_hangs", "one_rank_is_stopped") else 600),
    )
    if RANK == 1:
        steps, launch = iter(range(100)), llm.engine.runner.launch

        def fails(*args):
            if next(steps) == 2:
                globals()[HOW]()
            return launch(*args)

        llm.engine.runner.launch = fails  # type: ignore[method-assign]
    print(f"rank {RANK} has begun")  # into a pipe: not written before it is flushed
    llm.generate([[2, 3, 4], [5, 6]], GREEDY)


def all_alike() -> None:
    llm = LLM(FOLDER, **OPTIONS)
    prompts = [[2, 3, 4], [5, 6]]
    before = [out.token_ids for out in llm.generate(prompts, GREEDY)]
    for wrong, error in (([], ValueError), ([2, 100000], ValueError), ([2] * 300, ValueError)):
        for call in (lambda p: llm.generate([[7, 8], p], GREEDY), llm.prompt_logits, llm.engine.prefill):
            try:
                call(wrong)
            except error:
                continue
            raise AssertionError(f"{wrong} was taken")
    try:
        LLM(FOLDER, **OPTIONS | {"cache_memory": 1})
        raise AssertionError("a cache of one byte was taken")
    except CapacityError:
        pass
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == before
    print(f"rank {RANK} goes on\n", end="", flush=True)
    llm.generate([2, 100000], GREEDY)


def other_prompts() -> None:
    llm = LLM(FOLDER, **OPTIONS)
    llm.generate([[2, 3, 4]], GREEDY)
    llm.generate([[2, 3, 4 + (RANK == 2)]], GREEDY)


def no_such_model() -> None:
    LLM(FOLDER + "/nowhere")


def bad_sizes() -> None:
    LLM(FOLDER, **OPTIONS, parallel=ParallelConfig(cp_size=2))


def too_many_ranks() -> None:
    LLM(
        FOLDER, **OPTIONS, hf_overrides={"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    )


globals()["in_the_third_step" if HOW.startswith("one_rank") else HOW]()
