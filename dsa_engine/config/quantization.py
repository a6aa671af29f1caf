"""A checkpoint's ``quantization_config``: which weights are stored in which way.

Two spellings are read. The released one (``quant_method: "fp8"``) has one scheme for all linear weights: e4m3 in blocks
with float32 scales. ``compressed-tensors`` has groups of targets, each with a scheme, and a list of weights that are
not quantised. Schemes are only read here: :mod:`dsa_engine.quantization` has a class for some and refuses the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsa_engine.config.checks import is_integer, shown
from dsa_engine.config.keys import Keys

METHODS = ("fp8", "compressed-tensors")

# Matrices that the released FP8 checkpoints hold in a plain dtype, although config.json does not list them.
PLAIN_IN_RELEASED = ("eh_proj", "weights_proj", "gate", "embed_tokens", "lm_head", "head")

_MAX_BLOCK = 2**24


@dataclass(frozen=True)
class WeightScheme:
    """How some linear weights are stored, and how their inputs are rounded."""

    type: str  # type of a code: "float" (e4m3 if it has 8 bits) or "int"
    bits: int  # bits of a code
    strategy: str  # elements that share a scale: "block", "channel" (a row), "group" (part of a row), "tensor"
    block: tuple[int, int] | None = None  # rows and columns, for strategy "block"
    group_size: int | None = None  # columns, for strategy "group"
    symmetric: bool = True  # no zero points
    activation_bits: int | None = None  # bits of inputs that are quantised as they arrive; None: not quantised
    power_of_two: bool = False  # scales of activations are rounded up to powers of two (``scale_fmt: ue8m0``)
    layout: str = (
        ""  # compressed-tensors' name for the layout of codes in the file: "int-quantized", "pack-quantized", …
    )

    @property
    def name(self) -> str:
        """The scheme in words for errors: "fp8 in blocks of 128 × 128 with 8-bit activations"."""
        kind = {"float": "fp", "int": "int"}.get(self.type, self.type) + str(self.bits)
        shared = {"block": f"in blocks of {self.block}", "group": f"in groups of {self.group_size}"}
        inputs = "plain" if self.activation_bits is None else f"{self.activation_bits}-bit"
        asymmetric = "" if self.symmetric else ", with zero points"
        layout = f", {self.layout}" if self.layout else ""
        return (
            f"{kind} {shared.get(self.strategy, f'by {self.strategy}')} with {inputs} activations{asymmetric}{layout}"
        )


@dataclass(frozen=True)
class QuantizationConfig:
    """The schemes of a checkpoint and the weights they apply to.

    A target, and an entry of ``ignore``, is the name of a module ("model.layers.0.mlp.down_proj"), a regular
    expression for its beginning ("re:.*gate$"), or "Linear", which is every linear layer. In the released spelling an
    entry of ``ignore`` may also be one part of a name ("lm_head"), or its beginning.
    """

    method: str  # one of METHODS
    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignore: tuple[str, ...] = ()

    @cached_property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """All schemes, each once."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.groups))

    @property
    def weight_block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale in the released format; None in other formats."""
        return self.groups[0][1].block if self.method == "fp8" else None

    def scheme_of(self, weight: str) -> WeightScheme | None:
        """The scheme of the weight of this name ("….weight"); None: it is stored in plain numbers."""
        module = weight.removesuffix(".weight")
        if any(self._is(module, entry, target=False) for entry in self.ignore):
            return None
        for targets, scheme in self.groups:
            if any(self._is(module, target, target=True) for target in targets):
                return scheme
        return None

    def _is(self, module: str, entry: str, *, target: bool) -> bool:
        if entry.startswith("re:"):
            return re.match(entry[3:], module) is not None
        if entry == module or (target and entry == "Linear"):
            return True
        return self.method == "fp8" and (entry in module.split(".") or module.startswith(f"{entry}."))

    @classmethod
    def from_keys(cls, keys: Keys) -> QuantizationConfig | None:
        """Reads ``quantization_config`` of a ``config.json``; None if it has none.

        Raises:
            ValueError: the method or a value is not supported; the text says what is.
        """
        if keys.get("quantization_config") is None:
            return None
        part = keys.part("quantization_config")
        method = part.get("quant_method")
        if method == "fp8":
            return _released(part)
        if method == "compressed-tensors":
            return _compressed_tensors(part)
        raise ValueError(
            f"quantization_config {shown(method)} is not supported; supported are quant_method 'fp8' with fmt 'e4m3' "
            "and weight_block_size, and 'compressed-tensors'"
        )


def _released(part: Keys) -> QuantizationConfig:
    fmt = "e4m3" if part.get("fmt") is None else part.get("fmt")
    if fmt != "e4m3":
        raise ValueError(
            f"quantization_config 'fp8'/{shown(fmt)} is not supported; supported is quant_method 'fp8' with fmt 'e4m3'"
        )
    scale_fmt = part.get("scale_fmt")
    if scale_fmt not in (None, "ue8m0"):
        raise ValueError(f"quantization_config.scale_fmt {shown(scale_fmt)} is not supported; 'ue8m0' is, or none")
    scheme = part.get("activation_scheme")
    if scheme not in (None, "dynamic"):
        raise ValueError(f"quantization_config.activation_scheme {shown(scheme)} is not supported; 'dynamic' is")
    block = _pair(part, "weight_block_size")
    power_of_two = scale_fmt == "ue8m0"
    stored = WeightScheme("float", 8, "block", block=block, activation_bits=8, power_of_two=power_of_two)
    plain = (*PLAIN_IN_RELEASED, *_words(part, "modules_to_not_convert"))
    return QuantizationConfig("fp8", ((("Linear",), stored),), plain)


def _compressed_tensors(part: Keys) -> QuantizationConfig:
    groups = part.part("config_groups").raw
    if not groups:
        raise ValueError("quantization_config.config_groups must name at least one group of targets")
    read = []
    for name, raw in groups.items():
        if not isinstance(raw, dict):
            raise ValueError(f"quantization_config.config_groups.{name} must be a JSON object, not {shown(raw)}")
        group = Keys(raw, f"quantization_config.config_groups.{name}")
        targets = _words(group, "targets")
        if not targets:
            raise ValueError(f"{group.name('targets')} must name at least one target")
        read.append((targets, _scheme(group, part.get("format"))))
    return QuantizationConfig("compressed-tensors", tuple(read), _words(part, "ignore"))


def _scheme(group: Keys, layout: Any) -> WeightScheme:
    """The scheme of one group; ``layout`` is the checkpoint's ``format``, which a group may override."""
    own = group.get("format")
    weights = group.part("weights")
    if not weights.raw:
        raise ValueError(f"{group.name('weights')} is missing: a group without quantised weights is not supported")
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    activation_bits = None
    inputs = group.part("input_activations")
    if inputs.raw:
        activation_bits = inputs.size("num_bits", 8)
        if not inputs.flag("dynamic", False):
            raise ValueError(f"{inputs.name('dynamic')} must be true: static scales of activations are not supported")
        if weights.get("type") != "float":
            _check_int_inputs(inputs)
    if group.part("output_activations").raw:
        raise ValueError(f"{group.name('output_activations')} is not supported: outputs are never quantised here")
    return WeightScheme(
        weights.choice("type", ("int", "float"), "int"),
        weights.size("num_bits", 8),
        strategy,
        block=_pair(weights, "block_structure") if strategy == "block" else None,
        group_size=weights.size("group_size") if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        activation_bits=activation_bits,
        layout=str(own if own is not None else layout if layout is not None else ""),
    )


def _check_int_inputs(inputs: Keys) -> None:
    """Checks that inputs of integer weights are integers with a scale per token; other roundings are not supported."""
    for key, only in (("type", "int"), ("strategy", "token"), ("symmetric", True)):
        value = inputs.get(key)
        if value is not None and value != only:
            raise ValueError(f"{inputs.name(key)} {shown(value)} is not supported; {only!r} is")


def _pair(part: Keys, key: str) -> tuple[int, int]:
    value = part.get(key)
    whole = isinstance(value, list) and len(value) == 2
    if not whole or not all(is_integer(n) and 0 < n < _MAX_BLOCK for n in value):
        raise ValueError(f"quantization_config.{key} must be [rows, columns], not {shown(value)}")
    return value[0], value[1]


def _words(part: Keys, key: str) -> tuple[str, ...]:
    """A list of names, empty if the key is missing; its regular expressions are checked."""
    value = part.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{part.name(key)} must be a list of names, not {shown(value)}")
    for word in value:
        if word.startswith("re:"):
            try:
                re.compile(word[3:])
            except re.error as error:
                raise ValueError(f"{part.name(key)}: {shown(word)} is no regular expression: {error}") from error
    return tuple(value)
