"""A run that fails on purpose: torchrun … failing.py HOW FOLDER."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dsa_engine import LLM, CapacityError, ParallelConfig, SamplingParams
from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.engine.startup import start

HOW, FOLDER = sys.argv[1:]
RANK = int(os.environ["RANK"])
OPTIONS = {"max_model_len": 256, "cache_memory": "64MiB", "load_format": "dummy"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def one_rank_raises() -> None:
    raise ValueError("the third step \udcff\nof rank 1 was too much for it")


def one_rank_is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_rank_stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_hangs() -> None:
    time.sleep(300)


def one_rank_is_interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does; it reaches the main thread, which waits
    time.sleep(0.3)


def one_rank_leaves() -> None:
    sys.exit(3)


def in_the_third_step() -> None:
    together = int(os.environ["WORLD_SIZE"]) if HOW.endswith("_of_a_context") else 1
    waits = HOW.startswith(("one_rank_hangs", "one_rank_stops"))
    llm = LLM(FOLDER, **OPTIONS, parallel=ParallelConfig(dcp_size=together, timeout=5 if waits else 600))
    if RANK == 1:
        steps, launch = iter(range(100)), llm.engine.runner.launch

        def fails(*args):
            if next(steps) == 2:
                globals()[HOW.removesuffix("_of_a_context")]()
            return launch(*args)

        llm.engine.runner.launch = fails  # type: ignore[method-assign]
    print(f"rank {RANK} has begun")  # stays in the buffer of the pipe until it is flushed
    llm.generate([[2, 3, 4], [5, 6]], GREEDY)


def while_weights_load() -> None:
    """A rank is stopped, or ends without an error; rank 2 takes longer than the timeout."""
    load, timeout = start.load, 4.0

    def loads_slowly(prepared: start.Prepared) -> start.Loaded:
        if int(HOW == "while_weights_load") == RANK:
            os.kill(os.getpid(), signal.SIGSTOP) if HOW == "rank_0_stops" else os._exit(0)
        time.sleep(1.5 * timeout * (RANK == 2))
        return load(prepared)

    start.load = loads_slowly
    LLM(FOLDER, **OPTIONS, parallel=ParallelConfig(timeout=timeout))


def all_alike() -> None:
    llm = LLM(FOLDER, **OPTIONS)
    prompts = [[2, 3, 4], [5, 6]]
    before = [out.token_ids for out in llm.generate(prompts, GREEDY)]
    for wrong, error in (([], ValueError), ([2, 100000], ValueError), ([2] * 300, ValueError)):
        for call in (lambda p: llm.generate([[7, 8], p], GREEDY), llm.prompt_logits, partial(prefill, llm.engine)):
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


def refused(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(f"rank {RANK} {what}: {type(error).__name__}: {error}\n", end="", flush=True)
        return
    raise AssertionError(f"{what} was taken")


def ranks_that_differ() -> None:
    """Rank 1 starts with other options, then rank 2 measures another prompt; each time all ranks get an error."""
    mine = RANK == 1
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(FOLDER, copy, dirs_exist_ok=True)
        weights = bytearray(Path(copy, "model.safetensors").read_bytes())
        weights[len(weights) // 2] ^= 1
        Path(copy, "model.safetensors").write_bytes(weights)
        stale = copy if mine else FOLDER
        refused("checkpoint", lambda: LLM(stale, **OPTIONS | {"load_format": "auto"}))
        layout = ParallelConfig(tp_size=1 if mine else 3, timeout=50 if mine else 60)
        refused("layout", lambda: LLM(FOLDER, **OPTIONS, parallel=layout))
        layers = {"num_hidden_layers": 3 - mine}
        refused("layers", lambda: LLM(FOLDER, **OPTIONS, hf_overrides=layers))
        llm = LLM(stale, **OPTIONS)  # weights are not read
    mine = RANK == 2
    llm.wait_idle()
    refused("benchmark", lambda: measure_prefill(llm.engine, [4 + mine] * 9))
    assert len(llm.generate([[2, 3, 4]], GREEDY)[0].token_ids) == 8
    raise RuntimeError("the end")


def one_part_refuses() -> None:
    """Options that the rank that prefills refuses, both that decode, or one rank; then a run that answers."""
    rank_1 = RANK == 1
    parallel: dict[str, Any] = {"prefill_ranks": 1, "timeout": 20}
    for what, options, of_mesh in (
        ("facts", {"seed": int(rank_1)}, {}),
        ("rebalance", {}, {"rebalance_every": 3}),
        ("record", {}, {"record_expert_loads": "/dev/null/loads.json"}),
        ("events", {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:none"}}, {}),
        ("loads", {"decode_options": {"expert_loads": "nowhere.json"}}, {}),
        ("replicas", {"decode_options": {"redundant_experts": 1000}}, {}),
        ("host", {"host_cache_memory": 1}, {}),
        ("caches", {"decode_options": {"cache_memory": 1}}, {}),
        ("folder", {"cache_folder": "/dev/null/pages"}, {}),
    ):
        refused(what, partial(LLM, FOLDER, **OPTIONS | options, parallel=ParallelConfig(**parallel | of_mesh)))
    record = ParallelConfig(timeout=20, record_expert_loads="/dev/null/loads.json")
    refused("record of all", lambda: LLM(FOLDER, **OPTIONS, parallel=record))
    llm = LLM(FOLDER, **OPTIONS, parallel=ParallelConfig(**parallel))
    if RANK == 0:
        assert len(llm.generate([[2, 3, 4]], GREEDY)[0].token_ids) == 8
        llm.close()
    else:
        llm.follow()
    raise RuntimeError("the end")


def an_interrupt_is_caught() -> None:
    """One rank leaves its call; the others finish theirs, and all go on together."""
    llm = LLM(FOLDER, **OPTIONS)
    wanted = [out.token_ids for out in llm.generate([[2, 3, 4], [5]], GREEDY)]
    if RANK == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        outputs = llm.generate([[5, 6]], SamplingParams(max_tokens=200, ignore_eos=True))
        assert len(outputs[0].token_ids) == 200
        print(f"rank {RANK} was not interrupted\n", end="", flush=True)
    except KeyboardInterrupt:
        print(f"rank {RANK} was interrupted\n", end="", flush=True)
    assert [out.token_ids for out in llm.generate([[2, 3, 4], [5]], GREEDY)] == wanted
    print(f"rank {RANK} goes on\n", end="", flush=True)
    raise RuntimeError("the end")


def no_such_model() -> None:
    LLM(FOLDER + "/nowhere")


def bad_sizes() -> None:
    LLM(FOLDER, **OPTIONS, parallel=ParallelConfig(cp_size=2))


def too_many_ranks() -> None:
    LLM(
        FOLDER, **OPTIONS, hf_overrides={"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    )


WHERE = {"one_rank": "in_the_third_step", "rank_0": "while_weights_load"}
globals()[next((where for begin, where in WHERE.items() if HOW.startswith(begin)), HOW)]()
