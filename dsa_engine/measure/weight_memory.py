"""Memory of a rank's weights, counted by building its model on the meta device: formats, cuts and copies as in a
run."""

from __future__ import annotations

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.measure.emulation.config import EmulatedConfig, EmulatedMesh
from dsa_engine.model.model import Model
from dsa_engine.model.runtime import Runtime
from dsa_engine.quantization import quantization_name, weight_format

_META = torch.device("meta")


def weight_bytes(model: Model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def rank_model(
    config: ModelConfig,
    stored: QuantizationConfig | None,
    dtype: torch.dtype,
    ranks: int,
    tp_size: int = 1,
    mtp_modules: int = 0,
) -> Model:
    """The model of the rank with the most routed experts, on the meta device.

    Args:
        config: the model.
        stored: their format in memory; None: all in ``dtype``.
        dtype: dtype of activations and of weights that are not quantised.
        ranks: number of ranks over which the experts are divided.
        tp_size: number of neighbouring ranks over which embedding, output projections and LM head are cut.
        mtp_modules: number of MTP modules that draft; their copies of embedding and head are not loaded.

    Raises:
        ValueError: sizes that do not divide, or a format that has no class.
    """
    mesh = EmulatedMesh(EmulatedConfig(emulate_world=ranks, tp_size=tp_size), _META)
    with torch.inference_mode():
        made = weight_format(stored, quantization_name(stored), dtype, _META)
        model = Model(config, Runtime(mesh, dtype, made, workspace=0), mtp_modules)
        model.weights_loaded()
    return model
