"""Formats of weights: a class for each, in a separate file.

A layer asks its ``WeightFormat`` for the linear layers and experts that it needs and calls them; it does not know how
their weights are stored. Norms, the router, the indexer's head weights, the embedding and the LM head have no format:
they are plain parameters of their layers.
"""

from dsa_engine.weights.formats.base import GroupedExperts, Linear, Matrix, WeightFormat, Weights
from dsa_engine.weights.formats.choose import held_as, quantization_name, weight_format
from dsa_engine.weights.formats.unquantized import Unquantized

__all__ = [
    "GroupedExperts",
    "Linear",
    "Matrix",
    "Unquantized",
    "WeightFormat",
    "Weights",
    "weight_format",
    "held_as",
    "quantization_name",
]
