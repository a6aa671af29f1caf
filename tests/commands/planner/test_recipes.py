"""docs/RECIPES.md: its figures and commands are those of the planner, and its program has the options of a plan."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import dsa_engine
from dsa_engine.cli import COMMANDS, main
from dsa_engine.commands.arguments import engine_options
from dsa_engine.options import EngineOptions
from recipes import RECIPES, Recipe, recipes, words_of

PROGRAMS = {
    "serve": "dsa_engine",
    "bench prefill": "scripts/bench_prefill.py",
    "bench ttft": "scripts/measure_ttft.py",
    "bench tpot": "scripts/measure_tpot.py",
}


def parsed(name: str, words: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The options of torchrun, and those of its program, by the parsers that read them when the command runs."""
    assert words[0] == "torchrun"
    launched = get_args_parser().parse_args(words[1:])
    assert launched.training_script == PROGRAMS[name] and launched.module == (name == "serve")
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    return launched, parser.parse_args(launched.training_script_args[name == "serve" :])


@pytest.mark.parametrize("recipe", recipes(), ids=lambda one: one.title)
def test_a_recipe_is_its_plan(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *recipe.plan, "--json", str(tmp_path / "plan.json")])
    shown = capsys.readouterr().out
    rows = dict(re.findall(r"^(\S.+?)  +(\S.*)$", shown, re.M))
    cells = [recipe.title, rows["weights on a rank"], f"{rows['free memory on a rank, GiB']} GiB"]
    cells += [rows[name] for name in ("concurrent requests", "drafts", "TTFT, s", "TPOT, ms")]
    assert f"| {' | '.join(cells)} |\n" in RECIPES.read_text(encoding="utf-8")
    plan = json.loads((tmp_path / "plan.json").read_text())
    ending = shown.partition("Commands that run it")[2].partition("\n\n")[2]
    assert words_of(ending) == list(plan["commands"].values())
    assert ending.replace("\n\n", "\n").startswith(f"{recipe.commands}\ntorchrun"), "as `dsa-engine plan` prints them"
    for name in PROGRAMS:
        check(plan, name, plan["commands"][name])


def check(plan: dict[str, Any], name: str, words: list[str]) -> None:
    """The command runs what the plan says, in the meaning of the engine's own options."""
    launched, args = parsed(name, words)
    nodes, own, how = int(launched.nnodes.partition(":")[0]), int(launched.nproc_per_node), plan["decode"]["how"]
    assert nodes * own == how["ranks"] and own <= 8
    assert (launched.rdzv_backend, launched.rdzv_endpoint) == (
        ("c10d", "FIRST_HOST:29500") if nodes > 1 else ("static", "")
    )
    options = EngineOptions(**engine_options(args))
    parallel, demand = options.parallel, plan["demand"]
    assert (parallel.cp_size, parallel.tp_size) == (plan["prefill"]["how"]["cp_size"], how["tp_size"])
    assert (parallel.moe_dispatch, parallel.decode_dispatch) == (
        plan["prefill"]["dispatch"],
        plan["decode"]["dispatch"],
    )
    assert options.max_num_batched_tokens == plan["prefill"]["how"]["chunk"]
    assert options.max_model_len == demand["input_len"] + demand["output_len"]
    assert options.max_num_seqs == plan["decode"]["requests"]
    assert options.enable_dbo == (max(plan[phase]["micro_batches"] for phase in ("prefill", "decode")) > 1)
    assert options.speculative_config.get("num_speculative_tokens", 0) == how["drafts"]
    assert options.kv_cache_dtype == how["cache"]
    assert options.quantization == {"bfloat16": "dequantize"}.get(how["weights"], how["weights"])
    if name == "bench tpot":
        assert args.input_len == [demand["input_len"]] and 2 <= args.output_len < demand["output_len"]
        assert args.batch_size == [plan["decode"]["requests"]] and args.fill_cache == "random"
        assert args.acceptance == ("0.85,0.72,0.61" if how["drafts"] else None)


@pytest.mark.parametrize(
    ("words", "begins", "holds"),
    [
        ("--devices 12 --weights bfloat16 --device B200", "torchrun --nnodes 2 --nproc-per-node 6 ", "every node"),
        ("--devices 64 --cp-size 16 --tp-size 8 --requests 4", "torchrun --nnodes 2 ", "; 4 times"),
        ('--devices 2 --hf-overrides {"num_hidden_layers":6}', "torchrun --nproc-per-node 2 ", "_layers"),
    ],
    ids=["two nodes of 6", "several instances", "few layers"],
)
def test_commands_of_other_plans(
    words: str, begins: str, holds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--weights": "fp8", "--cache": "bfloat16", "--drafts": "0", "--chunk": "4096", "--input-len": "16384"}
    fixed = [word for pair in given.items() for word in pair]
    main(["plan", *fixed, *words.split(), "--json", str(tmp_path / "plan.json")])
    plan, shown = json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out
    assert f"\n{begins}" in shown and holds in shown.partition("Commands that run it")[2]
    for name in PROGRAMS:
        check(plan, name, plan["commands"][name])


def test_the_program_has_the_options_of_the_first_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", RECIPES.read_text(encoding="utf-8"), re.S)

    class Stop(Exception):
        pass

    def stop(*args: Any, **options: Any) -> None:
        raise Stop(EngineOptions(*args, **options))

    monkeypatch.setattr(dsa_engine, "LLM", stop)
    with pytest.raises(Stop) as stopped:
        exec(compile(program, str(RECIPES), "exec"), {})
    _, args = parsed("serve", words_of(recipes()[0].commands)[0])
    args.model = args.model_tag
    assert stopped.value.args == (EngineOptions(**engine_options(args)),)
