"""A checkpoint's ``quantization_config``: which weights are stored in which way.

Two spellings are read. The released one (``quant_method: "fp8"``) has one scheme for all linear weights: e4m3 in blocks
with float32 scales. ``compressed-tensors`` has groups of targets, each with a scheme, and a list of weights that are
not quantised. Schemes are only read here: :mod:`dsa_engine.weights.formats` has a class for some, and refuses the
others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsa_engine.config.checks import is_integer, shown
from dsa_engine.config.keys import Keys

# Matrices that the released FP8 checkpoints hold in a plain dtype, although config.json does not list them.
PLAIN_IN_RELEASED = ("eh_proj", "weights_proj", "gate", "embed_tokens", "lm_head", "head")

# Keys that nothing here reads, and their values that change nothing, as null does (all values of some); other keys are
# refused.
_NEUTRAL_RELEASED: Mapping[str, tuple[Any, ...]] = {
    "dequantize": (False,),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
}
_NEUTRAL_COMPRESSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("quantization_status", "global_compression_ratio", "version"), ()),
    **dict.fromkeys(("run_compressed", "use_optimized_inference"), ()),
    "dequantize": (False,),
    "kv_cache_scheme": ({},),
    "moe_sparsity_config": ({},),
    "sparsity_config": ({},),
    "transform_config": ({}, {"config_groups": {}}),
}
# For weights and activations: how they were calibrated, and the dtypes of tensors, which the files have.
_NEUTRAL_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ()),
    "group_size": (-1,),
    "actorder": (False,),
}
_ACTORDER = {"group": "group", "dynamic": "group", "weight": "", "static": ""}


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
    layout: str = ""  # compressed-tensors' name for the layout of codes in the file: "int-quantized", …
    actorder: str = ""  # "group": the columns of a group lie anywhere in a row, and the file has g_idx

    @property
    def name(self) -> str:
        """The scheme in words for errors: "fp8 in blocks of 128 × 128 with 8-bit activations"."""
        kind = {"float": "fp", "int": "int"}.get(self.type, self.type) + str(self.bits)
        shared = {"block": f"in blocks of {self.block}", "group": f"in groups of {self.group_size}"}
        inputs = "plain" if self.activation_bits is None else f"{self.activation_bits}-bit"
        asymmetric = "" if self.symmetric else ", with zero points"
        layout = f", {self.layout}" if self.layout else ""
        shared_by = shared.get(self.strategy, f"by {self.strategy}") + (", in any order" if self.actorder else "")
        return f"{kind} {shared_by} with {inputs} activations{asymmetric}{layout}"


@dataclass(frozen=True)
class QuantizationConfig:
    """The schemes of a checkpoint and the weights they apply to.

    A target, and an entry of ``ignore``, is the name of a module ("model.layers.0.mlp.down_proj"), a regular
    expression for its beginning ("re:.*gate$"), or "Linear", which is every linear layer. In the released spelling an
    entry of ``ignore`` may also be one part of a name ("lm_head"), or its beginning.
    """

    method: str  # "fp8" or "compressed-tensors"
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
        """Reads ``quantization_config`` of a ``config.json``; None if it has none."""
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
    part.choice("fmt", ("e4m3",), "e4m3")
    part.choice("activation_scheme", ("dynamic",), "dynamic")
    power_of_two = part.choice("scale_fmt", ("ue8m0", "float"), "float") == "ue8m0"
    block = _pair(part, "weight_block_size")
    stored = WeightScheme("float", 8, "block", block=block, activation_bits=8, power_of_two=power_of_two)
    # `transformers` and vLLM have two names for the list, and read the second where the first is missing.
    listed = _words(part, "modules_to_not_convert") or _words(part, "ignored_layers")
    part.refuse_unread(_NEUTRAL_RELEASED)
    return QuantizationConfig("fp8", ((("Linear",), stored),), (*PLAIN_IN_RELEASED, *listed))


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
    ignore = _words(part, "ignore")
    sparsity = part.raw.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        part.get("sparsity_config")  # the weights are stored whole
    part.refuse_unread(_NEUTRAL_COMPRESSED)
    return QuantizationConfig("compressed-tensors", tuple(read), ignore)


def _scheme(group: Keys, layout: Any) -> WeightScheme:
    """The scheme of one group; ``layout`` is the checkpoint's ``format``, which a group may override."""
    weights, inputs = group.part("weights"), group.part("input_activations")
    if not weights.raw:
        raise ValueError(f"{group.name('weights')} is missing: a group without quantised weights is not supported")
    size = weights.raw.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"  # as compressed-tensors has it
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), default)
    if weights.flag("dynamic", False):
        raise ValueError(f"{weights.name('dynamic')} must be false: weights are quantised when they are stored")
    if group.part("output_activations").raw:
        raise ValueError(f"{group.name('output_activations')} is not supported: outputs are never quantised here")
    scheme = WeightScheme(
        weights.choice("type", ("int", "float"), "int"),
        weights.size("num_bits", 8),
        strategy,
        block=_pair(weights, "block_structure") if strategy == "block" else None,
        group_size=weights.size("group_size") if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        activation_bits=_activation_bits(inputs, weights.get("type") != "float") if inputs.raw else None,
        layout=str(group.get("format") or layout or ""),
        actorder=_actorder(weights, strategy),
    )
    weights.refuse_unread(_NEUTRAL_ARGUMENTS)
    group.refuse_unread()
    return scheme


def _actorder(weights: Keys, strategy: str) -> str:
    """ "group" if the file has ``g_idx``. An order that GPTQ used only while it quantised ("weight") is not stored."""
    value = weights.get("actorder")
    if value is None or isinstance(value, bool):
        order = "group" if value else ""
    elif not isinstance(value, str) or value.lower() not in _ACTORDER:
        raise ValueError(
            f"{weights.name('actorder')} {shown(value)} is not supported; supported are {', '.join(_ACTORDER)}, or null"
        )
    else:
        order = _ACTORDER[value.lower()]
    if order and strategy != "group":
        raise ValueError(f"{weights.name('actorder')} {shown(value)} needs strategy 'group', not {strategy!r}")
    return order


def _activation_bits(inputs: Keys, integer_weights: bool) -> int:
    """Bits of inputs. Those of integer weights have a scale per token; with other weights the format decides."""
    if not inputs.flag("dynamic", False):
        raise ValueError(f"{inputs.name('dynamic')} must be true: static scales of activations are not supported")
    if integer_weights:
        inputs.choice("type", ("int",), "int")
        inputs.choice("strategy", ("token",), "tensor")
        if not inputs.flag("symmetric", True):
            raise ValueError(f"{inputs.name('symmetric')} must be true: zero points are not supported")
    else:
        inputs.asked |= {"type", "strategy", "symmetric", "group_size"}
    bits = inputs.size("num_bits", 8)
    inputs.refuse_unread(_NEUTRAL_ARGUMENTS)
    return bits


def _pair(part: Keys, key: str) -> tuple[int, int]:
    value = part.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(is_integer(n) and n > 0 for n in value):
        raise ValueError(f"{part.name(key)} must be [rows, columns], not {shown(value)}")
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
