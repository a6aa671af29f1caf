"""Trains the model that ships as LLM("demo"), on one CPU core, from a seed, for an hour or two. --export is the
checkpoint folder that it writes, --log a file for the figures of each step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from demo_model import recipe
from demo_model.data import Documents, standard_library
from demo_model.model import TrainingModel
from demo_model.training import train
from dsa_engine.commands.arguments import argument_parser, run
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import trained_folder
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.model.layout import released_tensors


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--export", metavar="DIR", required=True, help="the checkpoint folder to write")
    parser.add_argument("--log", metavar="PATH", help="a file for the figures of each step, in JSON lines")
    args = parser.parse_args()
    torch.set_num_threads(1)  # another number gives other roundings
    model, steps = TrainingModel(trained_folder(), recipe.SEED), sum(phase.steps for phase in recipe.PHASES)
    for figures in train(model, Documents(standard_library()[0]), recipe.PHASES):
        if args.log:
            with Path(args.log).open("a", encoding="utf-8") as log:
                log.write(json.dumps(figures) + "\n")
        if figures["step"] % 10 == 0:
            values = "  ".join(f"{name} {figures[name]:.3f}" for name in ("loss", "text", "values"))
            print(f"{figures['step']:5} of {steps}  {figures['phase']:8}  {values}", flush=True)
    write_checkpoint(model, Path(args.export))


def write_checkpoint(model: TrainingModel, folder: Path) -> None:
    """Writes a folder that the engine loads, with the shipped tokenizer: FP8 blocks if the model's ``config.json`` has
    a ``quantization_config``, else its dtype."""
    config, weights, tensors = ModelConfig.from_dict(model.raw), dict(model.tensors), dict[str, torch.Tensor]()
    mtp = f"model.layers.{config.num_hidden_layers}."  # it gets copies of the embedding and the head
    weights[f"{mtp}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{mtp}shared_head.head.weight"] = weights["lm_head.weight"]
    power_of_two = (model.raw.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"
    specs = iter(released_tensors(config, fp8=config.weight_block_size is not None))
    for spec in specs:
        values = weights[spec.name].detach().float()
        if spec.quantized:
            assert config.weight_block_size is not None
            scales = next(specs).name  # a quantised weight is followed by its scales
            tensors[spec.name], tensors[scales] = quantize_blocks(values, config.weight_block_size, power_of_two)
        else:
            tensors[spec.name] = values.to(spec.dtype).clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.raw, indent=2) + "\n", encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained_folder() / name, folder)


if __name__ == "__main__":
    run(main)
