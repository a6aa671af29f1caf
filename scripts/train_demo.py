"""Trains the model that ships as LLM("demo"), on one CPU core, from a seed; about an hour and a half.

A run that was stopped goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dsa_engine.training import recipe
from dsa_engine.training.loop import Run
from dsa_engine.training.prepare import prepare


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="DIR", default="runs/demo", help="folder of the run (default: runs/demo)")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop there; the next call goes on")
    parser.add_argument("--threads", type=int, default=1, help="threads; another number gives other roundings")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    material = prepare()
    folder = Path(args.run)
    run = Run(material.config, material.documents, recipe.PHASES, folder)
    (folder / "tokenizer.json").write_text(material.tokenizer_json, encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"corpus": material.corpus.digest(), "seed": recipe.SEED}) + "\n")
    print(
        f"{sum(p.numel() for p in run.model.parameters()):,} parameters; at step {run.step} of {run.steps}", flush=True
    )
    for figures in run.train(args.until):
        if figures["step"] % 10 == 0:
            show(figures, run.steps)
    print(f"step {run.step} of {run.steps}: saved in {folder}")


def show(figures: dict[str, Any], steps: int) -> None:
    index = " ".join(f"{loss:.3f}" for loss in figures["index_losses"])
    values = "    -" if figures["values"] is None else f"{figures['values']:.1%}"
    second = f"  second next {figures['mtp_right']:.1%}" if figures["mtp_loss"] is not None else ""
    print(
        f"{figures['step']:5} of {steps}  {figures['phase']:8} {figures['seconds'] / 60:5.1f} min  "
        f"loss {figures['loss']:.3f}  text {figures['text']:.3f}  values {values}{second}"
        + (f"  indexers {index}" if index else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
