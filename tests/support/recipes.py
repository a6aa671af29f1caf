"""The recipes of docs/RECIPES.md, and their commands cut down to tiny models on two CPU processes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.run import get_args_parser

from dsa_engine.cli import main

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "RECIPES.md"
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "index_topk": 16,
    "index_n_heads": 4,
    "vocab_size": 260,
    "eos_token_id": 1,
}
SMALL = ["--device", "cpu", "--hf-overrides", json.dumps(TINY), "--max-model-len", "336", "--cache-memory", "64MiB"]
SMALL += ["--max-num-batched-tokens", "64"]
LENGTHS = {
    "bench_prefill.py": ["--input-len", "320", "--warmup", "0", "--repeat", "1"],
    "measure_ttft.py": ["--input-len", "320", "--warmup", "0", "--repeat", "1"],
    "measure_tpot.py": ["--input-len", "320", "--output-len", "4", "--warmup", "0", "--repeat", "1"],
}


class Recipe(NamedTuple):
    """A section: its title, the options of its ``dsa-engine plan``, and the commands below it."""

    title: str
    plan: list[str]
    commands: str


def recipes() -> list[Recipe]:
    page = RECIPES.read_text(encoding="utf-8")
    sections = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```\ndsa-engine plan (.*?)\n(.*?)\n```$", page, re.M | re.S)
    return [Recipe(title, shlex.split(plan), commands) for title, plan, commands in sections]


def words_of(commands: str) -> list[list[str]]:
    """The words of each command of a text."""
    return [shlex.split(line) for line in commands.replace("\\\n", "").splitlines() if line]


def tiny(words: list[str], int4_folder: Path) -> tuple[int, str, list[str]]:
    """A torchrun command made tiny: the number of ranks, at most 2; the script or module; and its words, in which the
    last value of an option wins."""
    models = {
        "deepseek-ai/DeepSeek-V3.2": "deepseek_v32",
        "zai-org/GLM-5.2-FP8": "glm_5_2",
        "DeepSeek-V3.2-int4-experts": str(int4_folder),
    }
    launched = get_args_parser().parse_args(words[1:])
    ranks, script = min(2, int(launched.nproc_per_node)), Path(launched.training_script).name
    given = [models.get(word, word) for word in launched.training_script_args]
    for name in {"--cp-size", "--dcp-size", "--tp-size"}.intersection(given):
        given += [name, str(min(ranks, int(given[given.index(name) + 1])))]
    load_format = "auto" if str(int4_folder) in given else "dummy"
    return ranks, script, [*given, *SMALL, "--load-format", load_format, *LENGTHS.get(script, [])]


def int4_checkpoint(folder: Path) -> Path:
    """A tiny checkpoint in FP8, converted in ``folder`` by the command of the recipe."""
    (convert,) = [words for one in recipes() for words in words_of(one.commands) if words[1] == "convert"]
    source = folder / "source"
    main(["make-checkpoint", "--config", "deepseek_v32", "--overrides", json.dumps(TINY), "--output", str(source)])
    main(["convert", str(source), str(folder / convert[3]), *convert[4:]])
    return folder / convert[3]
