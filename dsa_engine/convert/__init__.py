"""Makes one checkpoint of another: FP8 expanded, or plain weights quantised, with or without a calibration text."""

from dsa_engine.convert.dequantize import dequantize_checkpoint
from dsa_engine.convert.quantize import quantize_checkpoint

__all__ = ["dequantize_checkpoint", "quantize_checkpoint"]
