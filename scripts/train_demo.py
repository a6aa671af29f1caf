"""Trains the model that ships as LLM("demo"), on one CPU core, from a seed; under an hour.

The same command continues a stopped run. --export writes the checkpoint folder
of a finished run, --log its log, --plot its loss curves.
"""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from demo_model import recipe
from demo_model.loop import Run
from demo_model.pictures import plot_losses
from demo_model.prepare import Material, prepare
from demo_model.ship import digests, ship
from dsa_engine.arguments import argument_parser, run
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.report import environment
from dsa_engine.system.output_files import check_outputs, write_text


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--run", metavar="DIR", default="runs/demo", help="folder of the run (default: runs/demo)")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop there; the next call goes on")
    parser.add_argument("--threads", type=int, default=1, help="threads; another number gives other roundings")
    parser.add_argument("--export", metavar="DIR", help="when it is done: write the checkpoint folder")
    parser.add_argument("--bfloat16", action="store_true", help="export bfloat16 weights instead of FP8 blocks")
    parser.add_argument("--log", metavar="PATH", help="when it is done: write the log (JSON lines) here")
    parser.add_argument("--plot", metavar="PATH", help="when it is done: draw the loss curves (PNG)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    check_outputs(args.log, args.plot)
    check_plot(args.plot)
    torch.set_num_threads(args.threads)
    material = prepare()
    folder = Path(args.run)
    training = Run(material.config, material.documents, recipe.PHASES, folder)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{parameters:,} parameters; at step {training.step} of {training.steps}", flush=True)
    try:
        with closing(training.train(args.until)) as steps:
            for figures in steps:
                if figures["step"] % 10 == 0:
                    show(figures, training.steps)
    except KeyboardInterrupt:
        print(f"step {training.step} of {training.steps}: saved in {folder}; the same command goes on there")
        raise
    print(f"step {training.step} of {training.steps}: saved in {folder}")
    if training.step == training.steps:
        finish(args, training, material)


def finish(args: argparse.Namespace, training: Run, material: Material) -> None:
    """Writes the requested files. The last line of the log has the inputs and the results of the run."""
    made: dict[str, str] = {}
    if args.export:
        python = platform.python_version()
        written = ship(training, Path(args.export), material.tokenizer_json, python, fp8=not args.bfloat16)
        made = digests(written.folder)
        print(f"{args.export}: {written.tensors} tensors, {written.tensor_bytes:,} bytes")
    log = Path(args.run, "log.jsonl")
    if args.log:
        where = environment(torch.device("cpu"), torch.bfloat16, 1)
        last = {"seed": recipe.SEED, "corpus_sha256": material.corpus.digest(), "files_sha256": made} | where
        write_text(args.log, log.read_text(encoding="utf-8") + json.dumps(last) + "\n")
    if args.plot:
        plot_losses([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()], args.plot)


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
    run(main)
