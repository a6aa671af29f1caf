"""Our kernel in Gluon as an adapter of :func:`.sparse_attention.sparse_attention`, like those of other libraries: it is
for sm_90 only, and written against an experimental part of Triton, which other versions may lack or have changed.

A fault of its barriers would be no wrong number but a wait without an end. So before an engine compares it, it runs in
a process of its own, beside the reference, within a minute; where that fails, Triton's kernel stays.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import cache
from tempfile import TemporaryFile
from typing import Any

import torch

from dsa_engine.kernels.attention.sparse_attention import sparse_attention_reference
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.runtime.difference import differences
from dsa_engine.kernels.runtime.launch import INTERPRETED, chip_of
from dsa_engine.kernels.runtime.libraries import ADAPTERS, FEW_ROWS, adapter, is_chosen

try:
    from dsa_engine.kernels.attention import sparse_prefill_sm90
except (ImportError, AttributeError):  # a Triton without this Gluon
    sparse_prefill_sm90 = None  # type: ignore[assignment]

_ROWS = latent_format(512, 64, torch.bfloat16)
NAME = "our sparse prefill in Gluon"
_TRIAL_S = 60.0  # to import, compile and run: 20 s with a cold disk
_TRIAL_ROWS, _CONTEXT = 200, 4096  # more programs than multiprocessors
_TRIAL = "from dsa_engine.kernels.libraries.gluon import try_on; try_on({}, {}, {})"


def _takes(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *, row_format: LatentFormat,
    counts: torch.Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    return (
        sparse_prefill_sm90 is not None
        and not INTERPRETED
        and (q.dtype, slots.dtype, counts) == (torch.bfloat16, torch.int32, None)
        and row_format == _ROWS
        and q.shape[0] > FEW_ROWS
        and q.shape[1] in (64, 128)
        and slots.shape[1] % 128 == 0 < slots.shape[1] <= 4096  # looked through in registers
        and pool.is_contiguous()
        and chip_of(q).capability == 90
    )


@adapter("sparse_attention", NAME, "triton", _takes)
def sparse_prefill(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *, scale: float, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    compares = not is_chosen(ADAPTERS[NAME], q)
    if compares and (fault := _fault_of(_TRIAL.format(q.get_device(), q.shape[1], slots.shape[1]))):
        raise RuntimeError(fault)
    return sparse_prefill_sm90.sparse_prefill(q, pool, slots, scale)


@cache
def _fault_of(trial: str) -> str:
    """Why a program did not succeed in a process of its own: that it did not end, or the last line that it wrote."""
    with TemporaryFile() as written:
        process = subprocess.Popen([sys.executable, "-c", trial], stdout=written, stderr=subprocess.STDOUT)
        try:
            status = process.wait(_TRIAL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the driver may keep a process whose kernel does not end
                process.wait(5)
            return f"its trial in a process of its own did not end within {_TRIAL_S:g} s"
        written.seek(0)
        text = written.read().decode(errors="replace").strip()
    return "" if status == 0 else f"its trial ended with {status}: {text.rpartition(chr(10))[2]}"


def try_on(device: int, heads: int, k: int) -> None:
    """Runs the kernel on a device; raises an error where it differs from the reference."""
    torch.cuda.set_device(device)
    q, pool, slots = trial_inputs(heads, k, torch.device("cuda", device))
    ours = sparse_prefill_sm90.sparse_prefill(q, pool, slots, 576**-0.5)
    wanted = sparse_attention_reference(q, pool, slots, None, _ROWS, 576**-0.5, 256 << 20)
    for error, allowed in (each for pair in zip(ours, wanted, strict=True) for each in differences(*pair)):
        if not error <= allowed:
            raise SystemExit(f"its result differs from the reference by {error:.2g}; allowed is {allowed:.2g}")


def trial_inputs(heads: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, rows and slots; −1 between these, after them and in a whole row; row 0, which no slot names, is NaN."""
    g = torch.Generator(device).manual_seed(k)
    q = torch.randn(_TRIAL_ROWS, heads, 576, generator=g, device=device).to(torch.bfloat16)
    pool = torch.randn(_CONTEXT // 64, 64, 576, generator=g, device=device).to(torch.bfloat16)
    slots = torch.randint(1, _CONTEXT, (_TRIAL_ROWS, k), generator=g, device=device, dtype=torch.int32)
    length = torch.arange(_TRIAL_ROWS, device=device)[:, None] * k // (_TRIAL_ROWS - 1)  # 0 to k
    slots[:100].masked_fill_(torch.arange(k, device=device) >= length[:100], -1)
    slots[100:150].masked_fill_(torch.rand(50, k, generator=g, device=device) < 0.3, -1)
    pool[0, 0] = torch.nan
    return q, pool, slots
