"""Adapters of other libraries, each held to a released signature by a recorded stub (`tests/support/library_stubs/`).

Importing this package names them all to :mod:`dsa_engine.kernels.runtime.libraries`; no library is imported before it
is tried.
"""

from dsa_engine.kernels.libraries import block_scaled, deep_gemm_experts, deep_gemm_logits, flash_attention, flash_mla

__all__ = ["block_scaled", "deep_gemm_experts", "deep_gemm_logits", "flash_attention", "flash_mla"]
