"""Checkpoints in the Hugging Face layout: read, write, make at random, convert."""

from dsa_engine.checkpoint.convert import dequantize_checkpoint
from dsa_engine.checkpoint.dummy import DummyReader
from dsa_engine.checkpoint.layout import (
    ParameterCounts,
    TensorSpec,
    parameter_counts,
    released_tensors,
)
from dsa_engine.checkpoint.quantize import quantize_checkpoint
from dsa_engine.checkpoint.random_init import write_random_checkpoint
from dsa_engine.checkpoint.reader import CheckpointReader, Reader, Source
from dsa_engine.checkpoint.released import RELEASED_CONFIGS, released_config
from dsa_engine.checkpoint.writer import SafetensorsWriter, WrittenCheckpoint

__all__ = [
    "RELEASED_CONFIGS",
    "CheckpointReader",
    "DummyReader",
    "ParameterCounts",
    "Reader",
    "SafetensorsWriter",
    "Source",
    "TensorSpec",
    "WrittenCheckpoint",
    "dequantize_checkpoint",
    "parameter_counts",
    "quantize_checkpoint",
    "released_config",
    "released_tensors",
    "write_random_checkpoint",
]
