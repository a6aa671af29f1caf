"""Checkpoints in the Hugging Face layout: reading and writing them, and random weights instead of a checkpoint's.

The names and shapes that a model needs are declared by its modules (`model/layout.py`), not here.
"""

from dsa_engine.weights.dummy import DummyReader
from dsa_engine.weights.reader import CheckpointReader
from dsa_engine.weights.tensors import Source, TensorSpec
from dsa_engine.weights.writer import SafetensorsWriter, WrittenCheckpoint

__all__ = [
    "CheckpointReader",
    "DummyReader",
    "SafetensorsWriter",
    "Source",
    "TensorSpec",
    "WrittenCheckpoint",
]
