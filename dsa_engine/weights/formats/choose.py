"""The choice of a weight's format: by the checkpoint, the ``quantization`` option, and the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.config.quantization import QuantizationConfig, WeightScheme
from dsa_engine.weights.formats.base import GroupedExperts, Linear, Matrix, SideBySide, StoredFormat, WeightFormat
from dsa_engine.weights.formats.block_fp8 import BlockFP8
from dsa_engine.weights.formats.int4 import Int4
from dsa_engine.weights.formats.int8 import Int8
from dsa_engine.weights.formats.unquantized import Unquantized

# Values of the ``quantization`` option, by the type and bits of a scheme's codes. A checkpoint with several schemes has
# the name of the last of them in this order.
NAMES = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4-experts"}

# The class of each format.
FORMATS: dict[str, type[StoredFormat]] = {"fp8": BlockFP8, "int8": Int8, "int4-experts": Int4}


def weight_format(
    config: QuantizationConfig | None, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> WeightFormat:
    """The format in which all linear layers and experts of a model are made.

    ``config`` is the checkpoint's (None: plain numbers), ``quantization`` the engine's option, and ``dtype`` that of
    activations and of weights in plain numbers.
    """
    name = quantization_name(config)
    if quantization not in (None, "dequantize", name):
        raise ValueError(
            f"quantization={quantization!r} needs a checkpoint that is stored so; this one is "
            f"{'in plain numbers' if name is None else repr(name)}: leave the option out, or convert the checkpoint "
            "with dsa-engine convert"
        )
    plain = Unquantized(dtype, device)
    if config is None:
        return plain
    if config.weight_block_size is not None:  # FP8 blocks, which the reader can expand
        if held_as(config, quantization, device) is None:
            return plain
    elif quantization == "dequantize":
        raise ValueError(f"quantization='dequantize' expands released FP8 blocks only; this checkpoint is {name!r}")
    return ByName(config, {scheme: _format_of(scheme)(scheme, dtype, device) for scheme in config.schemes}, plain)


def held_as(config: QuantizationConfig | None, quantization: str | None, device: torch.device) -> str | None:
    """The format in which a device holds a checkpoint's weights, by :func:`quantization_name`; None: plain numbers."""
    blocks = config is not None and config.weight_block_size is not None
    expands = quantization is None and blocks and not FORMATS["fp8"].is_default_on(device)
    return None if expands or quantization == "dequantize" else quantization_name(config)


def quantization_name(config: QuantizationConfig | None) -> str | None:
    """The value of the ``quantization`` option for a checkpoint; None: plain numbers, or no such value."""
    kinds = {(scheme.type, scheme.bits) for scheme in config.schemes} if config else set()
    names = [name for kind, name in NAMES.items() if kind in kinds]
    return names[-1] if names else None


def _format_of(scheme: WeightScheme) -> type[StoredFormat]:
    made = FORMATS.get(NAMES.get((scheme.type, scheme.bits), ""))
    if made is None:
        raise ValueError(f"weights in {scheme.name} are not supported; supported are {', '.join(FORMATS)}")
    return made


class ByName(WeightFormat):
    """Each weight in the format that the checkpoint has for its name."""

    def __init__(self, config: QuantizationConfig, formats: dict[WeightScheme, WeightFormat], plain: WeightFormat):
        self._config, self._formats, self._plain = config, formats, plain

    def linear(self, *parts: Matrix) -> Linear:
        alike = len({self._config.scheme_of(part.name) for part in parts}) == 1
        return self._of([parts[0].name]).linear(*parts) if alike else SideBySide([self.linear(part) for part in parts])

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> GroupedExperts:
        matrices = ("gate_proj", "up_proj", "down_proj")
        names = [f"{prefix}.{matrix}.weight" for prefix in prefixes for matrix in matrices]
        return self._of(names).experts(prefixes, hidden, intermediate)

    def _of(self, names: Sequence[str]) -> WeightFormat:
        """The common format of weights that are multiplied together."""
        schemes = {self._config.scheme_of(name): name for name in names}
        if len(schemes) > 1:
            (one, first), (other, second) = list(schemes.items())[:2]
            kinds = [scheme.name if scheme else "plain numbers" for scheme in (one, other)]
            raise ValueError(
                f"quantization_config: {first!r} is {kinds[0]}, {second!r} is {kinds[1]}; they are multiplied "
                "together and must be stored alike"
            )
        (scheme,) = schemes
        return self._plain if scheme is None else self._formats[scheme]
