"""The choices of packed tokens (`pack_tokens.py`), counted within the experts of one rank."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.moe.pack_tokens import row_words, token_words
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_CHOICES = 1024  # a program; compiled for sm_90, not yet measured


def unpack_choices_reference(
    packed: torch.Tensor, words: int, k: int, first: int, held: int
) -> tuple[torch.Tensor, torch.Tensor]:
    choices = packed[:, words : words + 2 * k]
    experts = choices[:, :k] - first
    experts.masked_fill_((experts < 0) | (experts >= held), -1)
    return experts, choices[:, k:].contiguous().view(torch.float32)


@triton.jit(do_not_specialize=["count", "first", "held"])
def unpack_choices_kernel(
    packed, experts, weights, count, first, held,
    TOKEN_WORDS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK choices a program."""
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = choice < count
    at = choice // K * WIDTH + TOKEN_WORDS + choice % K
    expert = tl.load(packed + at, mask=known, other=-1) - first
    tl.store(experts + choice, tl.where((expert >= 0) & (expert < held), expert, -1), mask=known)
    weight = tl.load(packed + at + K, mask=known, other=0).to(tl.float32, bitcast=True)
    tl.store(weights + choice, weight, mask=known)


@operation()
def unpack_choices(
    packed: torch.Tensor, hidden: int, dtype: torch.dtype, k: int, first: int, held: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the choices of packed rows for the rank that holds the experts ``first … first + held - 1``.

    Args:
        packed: int32 ``[R, row_words(hidden, dtype, k)]``, contiguous, of :func:`pack_tokens`.
        hidden, dtype: width and dtype of the tokens.

    Returns:
        experts ``[R, k]`` int32, counted from ``first``, −1 for those that it does not hold; weights ``[R, k]``
        float32.

    Raises:
        ValueError: rows of another width.
    """
    width = row_words(hidden, dtype, k)
    if packed.dtype != torch.int32 or packed.dim() != 2 or packed.shape[1] != width:
        raise ValueError(
            f"{k} choices after tokens of {hidden} {dtype} are rows of {width} int32, not {packed.dtype} "
            f"{tuple(packed.shape)}"
        )
    words = token_words(hidden, dtype)
    if not runs_triton(packed):
        return unpack_choices_reference(packed, words, k, first, held)
    experts = torch.empty(packed.shape[0], k, dtype=torch.int32, device=packed.device)
    weights = torch.empty(packed.shape[0], k, dtype=torch.float32, device=packed.device)
    if experts.numel():
        unpack_choices_kernel[(cdiv(experts.numel(), _CHOICES),)](
            packed.contiguous(), experts, weights, experts.numel(), first, held,
            TOKEN_WORDS=words, WIDTH=width, K=k, BLOCK=_CHOICES, num_warps=4,
        )  # fmt: skip
    return experts, weights
