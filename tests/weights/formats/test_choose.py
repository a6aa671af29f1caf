"""Which format a weight is born with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dsa_engine.config.quantization import QuantizationConfig, WeightScheme
from dsa_engine.weights.formats import Matrix, Unquantized, choose, weight_format
from dsa_engine.weights.formats.base import SideBySide, StoredFormat
from dsa_engine.weights.formats.unquantized import UnquantizedExperts, UnquantizedLinear

CPU = torch.device("cpu")
BLOCKS = WeightScheme("float", 8, "block", block=(128, 128), activation_bits=8)
INT8 = WeightScheme("int", 8, "channel", activation_bits=8, layout="int-quantized")
INT4 = WeightScheme("int", 4, "group", group_size=128, layout="pack-quantized")
FP8_CHECKPOINT = QuantizationConfig("fp8", ((("Linear",), BLOCKS),), ("gate",))
INT8_CHECKPOINT = QuantizationConfig("compressed-tensors", ((("Linear",), INT8),))
INT4_CHECKPOINT = QuantizationConfig(
    "compressed-tensors", ((("re:.*experts.*",), INT4), (("Linear",), INT8)), ("lm_head",)
)


class Marked(StoredFormat):
    """Plain weights that remember the scheme they were made for; the default on a device of type ``meta`` only."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        self.scheme, self.plain = scheme, Unquantized(dtype, device)

    def linear(self, *parts: Matrix) -> UnquantizedLinear:
        made = self.plain.linear(*parts)
        made.scheme = self.scheme  # type: ignore[attr-defined]
        return made

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> UnquantizedExperts:
        made = self.plain.experts(prefixes, hidden, intermediate)
        made.scheme = self.scheme  # type: ignore[attr-defined]
        return made

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        return device.type == "meta"


@pytest.fixture(autouse=True)
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "FORMATS", dict.fromkeys(("fp8", "int8", "int4-experts"), Marked))


def scheme_of(
    config: QuantizationConfig | None, option: str | None, name: str, device: torch.device = CPU
) -> WeightScheme | None:
    made = weight_format(config, option, torch.float32, device).linear(Matrix(name, 4, 8))
    return getattr(made, "scheme", None)


def test_each_weight_has_the_format_of_its_name() -> None:
    assert scheme_of(None, None, "a.weight") is None
    assert scheme_of(FP8_CHECKPOINT, "fp8", "a.weight") == BLOCKS
    assert scheme_of(FP8_CHECKPOINT, "fp8", "mlp.gate.weight") is None
    assert scheme_of(INT8_CHECKPOINT, None, "a.weight") == INT8
    for option in (None, "int4-experts"):
        assert scheme_of(INT4_CHECKPOINT, option, "mlp.experts.0.up_proj.weight") == INT4
        assert scheme_of(INT4_CHECKPOINT, option, "mlp.up_proj.weight") == INT8
        assert scheme_of(INT4_CHECKPOINT, option, "lm_head.weight") is None
    experts = weight_format(INT4_CHECKPOINT, None, torch.float32, CPU).experts(["mlp.experts.3"], 8, 4)
    assert experts.scheme == INT4


def test_fp8_is_expanded_where_the_device_does_not_multiply_it() -> None:
    assert scheme_of(FP8_CHECKPOINT, None, "a.weight") is None
    assert scheme_of(FP8_CHECKPOINT, None, "a.weight", torch.device("meta")) == BLOCKS
    assert scheme_of(FP8_CHECKPOINT, "dequantize", "a.weight", torch.device("meta")) is None


@pytest.mark.parametrize(
    "config, option, error",
    [
        (None, "fp8", "'fp8' needs .* plain numbers"),
        (FP8_CHECKPOINT, "int8", "this one is 'fp8': leave the option out, or convert"),
        (INT4_CHECKPOINT, "int8", "this one is 'int4-experts'"),
        (INT8_CHECKPOINT, "dequantize", "expands released FP8 blocks only; this checkpoint is 'int8'"),
        (
            QuantizationConfig("compressed-tensors", ((("Linear",), WeightScheme("int", 3, "channel")),)),
            None,
            "int3 .* supported are fp8, int8",
        ),
    ],
)
def test_what_does_not_fit_is_refused(config: QuantizationConfig | None, option: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        weight_format(config, option, torch.float32, CPU)


def test_what_is_multiplied_together_is_stored_alike() -> None:
    made = weight_format(INT4_CHECKPOINT, None, torch.float32, CPU)
    with pytest.raises(ValueError, match="'experts.down_.*' is int4 .* 'b.down_.*' is int8 .* must be stored alike"):
        made.experts(["experts", "b"], 8, 4)
    beside = made.linear(Matrix("experts.weight", 4, 8), Matrix("b.weight", 3, 8))
    assert isinstance(beside, SideBySide) and beside.rows == [4, 3]
    assert [one.scheme for one in beside.layers] == [INT4, INT8]  # type: ignore[attr-defined]
