"""Quotients of many numbers by one, each as a true division gives it, in five operations instead of some twenty.

With ``y = 1 / b`` rounded to nearest and fused multiply-adds, a quotient is corrected by its remainder:

    q = a · y        r = a − q · b        q + r · y

Once makes it one of the two floats beside a / b, of which twice takes the nearer: the remainder of such a quotient is
exact (P. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor, 1990). That holds as
long as no remainder underflows: for |a| over 2^-100. Below, the last bit may be another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_engine.kernels.runtime.launch import INTERPRETED

# The interpreter's multiply-add rounds twice.
_FUSES = tl.constexpr(not INTERPRETED)


@triton.jit
def divide(a, b):
    """``a / b`` for finite float32 ``a``, and ``b`` positive and normal, with as few values as rows of ``a``; of −0 it
    is 0."""
    # Triton's `/` is off by a bit at times.
    if _FUSES:
        reciprocal = tl.div_rn(1.0, b)
        quotient = a * reciprocal
        quotient = tl.fma(tl.fma(-quotient, b, a), reciprocal, quotient)
        quotient = tl.fma(tl.fma(-quotient, b, a), reciprocal, quotient)
    else:
        quotient = tl.div_rn(a, b)
    return quotient
