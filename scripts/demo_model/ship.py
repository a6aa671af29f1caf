"""Writes the shipped folder of a finished run: weights, tokenizer, configuration and README."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from demo_model import recipe
from demo_model.export import write_checkpoint
from demo_model.loop import Run
from dsa_engine.checkpoint import WrittenCheckpoint
from dsa_engine.demo import demo_files

README = """\
# A small trained model with DeepSeek Sparse Attention

DeepSeek-V3.2's architecture with all its parts (latent attention, lightning indexer, mixture of experts with groups and
a shared expert, one MTP module), {parameters:,} parameters, {format}. Made by `scripts/train_demo.py` of
dsa_engine, from seed {seed}, on one core of a CPU, in {minutes:.0f} minutes and {tokens:,} tokens.

It was trained to find facts in long documents, to continue passages that stand far back, and on plain text:

* facts, questions and numbers are drawn by the script (`key 4821 is 97`; `What is key 4821?`);
* the text is Python's standard library (source files and the language reference of the interpreter that ran the
  training, {python}), which is under the PSF licence; one file in 16 was held out.

It knows nothing else. Its language is that of Python's sources, and it answers questions of this one form only. The
training and its measured results are described in dsa_engine's docs/TRAINING.md. MIT licence, as the project.
"""


def ship(run: Run, folder: Path, tokenizer_json: str, python: str, fp8: bool) -> WrittenCheckpoint:
    """Writes the folder; it must not exist, or be empty."""
    raw = recipe.model_config()
    if not fp8:
        del raw["quantization_config"]
    # Answers are looked up in the document, so greedy decoding is the default.
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    readme = README.format(
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        format="FP8 blocks as released" if fp8 else "bfloat16",
        seed=recipe.SEED,
        minutes=run.seconds / 60,
        tokens=run.tokens,
        python=f"CPython {python}",
    )
    files = {
        "README.md": readme,
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": demo_files()["tokenizer_config.json"],
    }
    return write_checkpoint(run.model, raw, folder, files)


def digests(folder: Path) -> dict[str, Any]:
    """SHA-256 of every file of a folder, by name."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
