"""Stubs of FlashMLA, DeepGEMM, FlashAttention and DeepEP: their released signatures, and what those refuse on sm_90.

A stub has the parameters of the function that it stands for, in their order, and raises :class:`Refused` where the
released code does: wrong dtypes, shapes, strides, alignment. Then it computes the result in the plainest way, in
float64; of tensors without values it only makes the result.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from dsa_engine.kernels.runtime import libraries
from library_stubs import deep_ep, deep_gemm, flash_attention, flash_mla
from library_stubs.checks import Call, Refused, calls

__all__ = ["MODULES", "Refused", "install"]

MODULES: dict[str, dict[str, Any]] = {
    "deep_ep": {"Buffer": deep_ep.Buffer},
    "flash_mla": {"flash_mla_sparse_fwd": flash_mla.flash_mla_sparse_fwd,
                  "flash_mla_with_kvcache": flash_mla.flash_mla_with_kvcache,
                  "get_mla_metadata": flash_mla.get_mla_metadata},
    "deep_gemm": {name: value for name, value in vars(deep_gemm).items() if "_" in name and name[0] != "_"},
    "flash_attn": {"flash_attn_varlen_func": flash_attention.flash_attn_varlen_func},
    "flash_attn_interface": {"flash_attn_varlen_func": flash_attention.flash_attn_3_varlen_func},
}  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Call]:
    """Makes stubs importable, and nothing else known to be installed; returns their calls from now on."""
    calls.clear()
    for name in names:
        module = ModuleType(name)
        vars(module).update(MODULES[name])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(libraries, "is_installed", lambda module: module in names)
    return calls
