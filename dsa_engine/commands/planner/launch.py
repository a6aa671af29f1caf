"""The commands that run a plan, with the names of the engine's options."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from typing import TYPE_CHECKING

from dsa_engine.commands.bench.options import OUTPUT_LEN
from dsa_engine.config.released import HUB_IDS
from dsa_engine.weights.formats.choose import NAMES

if TYPE_CHECKING:
    from dsa_engine.commands.planner.search import Plan, Planner


def commands(planner: Planner, plan: Plan, model: str, hf_overrides: str, dummy: bool) -> dict[str, list[str]]:
    """The words of each command of one instance, by name: "convert" if the checkpoint has other weights than the plan,
    then "serve", "bench prefill", "bench ttft" and "bench tpot", for every node. ``model``: a folder, a hub id, or the
    name of a released configuration."""
    demand, prefill, decode, weights = planner.demand, plan.prefill, plan.decode, plan.decode.how.weights
    hub_ids, words = {name: hub_id for hub_id, name in reversed(HUB_IDS.items())}, {}
    model = (HUB_IDS if dummy else hub_ids).get(model, model)
    if weights not in planner.stored:
        target = f"{model.rstrip('/').rpartition('/')[2]}-{weights}"
        words["convert"] = ["dsa-engine", "convert", model, target, "--quantize", weights]
        model = target
    spilled = planner.placed(decode.how).spilled(demand.longest, decode.requests)
    drafting = {"method": "mtp", "num_speculative_tokens": decode.how.drafts}
    options = {
        "load-format": "dummy" if dummy else None,
        "hf-overrides": None if json.loads(hf_overrides) == {} else hf_overrides,
        "quantization": weights if weights in NAMES.values() else "dequantize" if "fp8" in planner.stored else None,
        "kv-cache-dtype": decode.how.cache,
        "max-model-len": demand.longest,
        "max-num-seqs": decode.requests,
        "max-num-batched-tokens": prefill.how.chunk,
        "cp-size": prefill.how.cp_size,
        "dcp-size": decode.how.dcp_size if decode.how.dcp_size > 1 else None,
        "tp-size": decode.how.tp_size,
        "hot-rows": decode.how.hot_rows or None,
        "host-cache-memory": f"{math.ceil(spilled / 2**30) + 1}GiB" if decode.how.hot_rows else None,
        "moe-dispatch": prefill.dispatch,
        "decode-dispatch": decode.dispatch,
        "speculative-config": json.dumps(drafting) if decode.how.drafts else None,
    }
    given = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    given.append("--enable-dbo" if max(prefill.micro_batches, decode.micro_batches) > 1 else "--no-enable-dbo")
    lengths = ["--input-len", str(demand.input_len)]
    # Decode alone, with the plan's acceptance; filled caches spare the prefill of a whole batch.
    decoded = max(2, min(OUTPUT_LEN["tpot"], demand.output_len - 1))
    alone = ["--fill-cache", "random", "--batch-size", str(decode.requests), "--output-len", str(decoded)]
    if decode.how.drafts:
        alone += ["--acceptance", ",".join(map(str, demand.acceptance))]
    programs = {
        "serve": ["-m", "dsa_engine", "serve", model],
        "bench prefill": ["scripts/bench_prefill.py", "--model", model, *lengths],
        "bench ttft": ["scripts/measure_ttft.py", "--model", model, *lengths],
        "bench tpot": ["scripts/measure_tpot.py", "--model", model, *lengths, *alone],
    }
    nodes = torchrun(decode.how.ranks, planner.device.node_size)
    return words | {name: [*nodes, *program, *given] for name, program in programs.items()}


def torchrun(ranks: int, node_size: int) -> list[str]:
    """The launcher of ``ranks`` ranks, on every node; all nodes have equally many."""
    own = max(n for n in range(1, min(ranks, node_size) + 1) if ranks % n == 0)
    words = ["torchrun", "--nproc-per-node", str(own)]
    if own < ranks:
        words[1:1] = ["--nnodes", str(ranks // own)]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_HOST:29500"]
    return words


def shell_lines(command: list[str]) -> str:
    """A command as a shell reads it, in lines of up to 120 characters; an option stays beside its value."""
    text, unbroken = shlex.quote(command[0]), "\xa0"  # a space at which textwrap begins no line
    for before, word in zip(command, command[1:], strict=False):
        text += unbroken if before.startswith("-") and not word.startswith("-") else " "
        text += shlex.quote(word).replace(" ", unbroken)
    lines = textwrap.wrap(text, 117, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace(unbroken, " ")
