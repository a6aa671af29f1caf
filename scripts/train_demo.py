"""Trains the model that ships as LLM("demo"), on one CPU core, from a seed; about an hour.

The same command continues a stopped run where it was last saved. --export writes the checkpoint folder of a finished
run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from demo_model import recipe
from demo_model.corpus import documents_of, standard_library
from demo_model.export import write_checkpoint
from demo_model.loop import Run
from dsa_engine.commands.arguments import argument_parser, run


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--run", metavar="DIR", default="runs/demo", help="folder of the run (default: runs/demo)")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop there; the next call goes on")
    parser.add_argument("--export", metavar="DIR", help="when it is done: write the checkpoint folder")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # another number gives other roundings
    documents = documents_of(standard_library()[0])
    training = Run(recipe.model_config(), documents, recipe.PHASES, Path(args.run))
    for figures in training.train(args.until):
        if figures["step"] % 10 == 0:
            show(figures, training.steps)
    print(f"step {training.step} of {training.steps}: saved in {args.run}")
    if args.export and training.step == training.steps:
        write_checkpoint(training.model, recipe.model_config(), Path(args.export))


def show(figures: dict[str, Any], steps: int) -> None:
    losses = "  ".join(f"{name} {figures[name]:.3f}" for name in ("loss", "text", "values"))
    index = " ".join(f"{loss:.3f}" for loss in figures["index_losses"])
    print(f"{figures['step']:5} of {steps}  {figures['phase']:8}  {losses}  indexers {index or '-'}", flush=True)


if __name__ == "__main__":
    run(main)
