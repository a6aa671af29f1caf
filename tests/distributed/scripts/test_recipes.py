"""The benchmarks of the plans of docs/RECIPES.md, and its program, run with tiny models on two CPU processes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.cli import main
from recipes import RECIPES, Recipe, recipes, tiny

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes(), ids=lambda one: one.title)
def test_benchmarks_of_a_plan(
    recipe: Recipe, fork_ranks: Callable[..., Any], int4_folder: Path, demo_cache: Path, tmp_path: Path
) -> None:
    main(["plan", *recipe.plan, "--json", str(tmp_path / "plan.json")])
    commands = json.loads((tmp_path / "plan.json").read_text())["commands"]
    for name, metric in (("bench prefill", "TTFT"), ("bench ttft", "TTFT"), ("bench tpot", "TPOT")):
        ranks, script, words = tiny(commands[name], int4_folder)
        done = fork_ranks(ranks, SCRIPTS / script, *words)
        assert done.returncode == 0, f"{script} {words}: {done.stderr}"
        assert done.stdout.count(f"median {metric} ms") == 1, done.stdout


def test_the_program(fork_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """As it is on the page but for the model, which is small, has a tokenizer and is stored in FP8, and for sizes."""
    (program,) = re.findall(r"```python\n(.*?)```", RECIPES.read_text(encoding="utf-8"), re.S)
    model = tmp_path / "model"
    keys = '{"num_nextn_predict_layers": 1, "kv_lora_rank": 128, "index_head_dim": 128}'
    main(["make-checkpoint", "--config", "demo", "--overrides", keys, "--output", str(model)])
    for given, small in (
        ('"deepseek-ai/DeepSeek-V3.2"', f'"{model}", device="cpu", cache_memory="64MiB"'),
        ("max_model_len=132096", "max_model_len=1024"),
        ("max_num_batched_tokens=4096", "max_num_batched_tokens=96"),
        ("cp_size=8", "cp_size=2"),
        ("max_tokens=1024", "max_tokens=12, ignore_eos=True"),
    ):
        assert program.count(given) == 1
        program = program.replace(given, small)
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "document.txt").write_text("key 4821 is 97. " * 30)
    done = fork_ranks(2, tmp_path / "program.py", tmp_path / "document.txt")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^TTFT \d+\.\d\d s, TPOT \d+\.\d ms$", done.stdout, re.M)
