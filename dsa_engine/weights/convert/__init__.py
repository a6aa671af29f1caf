"""Conversion of checkpoints: FP8 expanded to plain numbers, or weights quantised, with calibration on a text."""

from dsa_engine.weights.convert.dequantize import dequantize_checkpoint
from dsa_engine.weights.convert.quantize import quantize_checkpoint

__all__ = ["dequantize_checkpoint", "quantize_checkpoint"]
