"""Adapters of other libraries, each held to a released signature by a recorded stub (`tests/support/library_stubs/`);
and of our kernel in Gluon.

Importing this package names them all to :mod:`dsa_engine.kernels.runtime.libraries`; no library is imported before it
is tried.
"""

from dsa_engine.kernels.libraries import (
    block_scaled,
    deep_gemm_experts,
    deep_gemm_logits,
    flash_attention,
    flash_mla,
    gluon,
)

__all__ = ["block_scaled", "deep_gemm_experts", "deep_gemm_logits", "flash_attention", "flash_mla", "gluon"]
