"""The CPU's kernels read and write nothing beside their tensors: random shapes and types, each tensor at the edge of
pages that may not be touched. They run in a process of their own, which an access outside ends."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import index_key_format, latent_format
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.formats.int4 import arrange_int4_, planes_for, quantize_int4
from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul import PLAIN
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8, W4A16
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_linear
from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.linear.per_head_matmul import per_head_matmul
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``x`` that begins, or ends, at a page that may not be touched."""
    size = x.numel() * x.itemsize
    if size == 0:
        return x
    page, inside = mmap.PAGESIZE, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, inside + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (start, start + page + inside):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0) == 0
    offset = page + random.choice((0, inside - size))
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(x.dtype).view(x.shape)
    return copy.copy_(x)


class Guarded(TorchDispatchMode):
    """What operations allocate is guarded, too."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = call(*args, **(kwargs or {}))
        aten = torch.ops.aten
        return guarded(made) if call.overloadpacket in (aten.empty, aten.new_empty, aten.empty_like) else made


def run_some() -> None:
    dtype, rows, threads = random.choice(list(cpu.TYPES)), random.randint(1, 16), random.choice((1, 3))
    cpu.threads_for = lambda work: threads
    heads, outputs, width = random.randint(1, 9), random.randint(1, 130), random.randint(1, 300)
    grouped = 32 * random.randint(1, 9)

    def make(*shape: int) -> torch.Tensor:
        return guarded(torch.randn(shape).to(dtype))

    x, matrix = make(rows, width), torch.randn(outputs, width)
    codes, scale = quantize_rows_int8(matrix)
    packed, scales = quantize_int4(torch.randn(outputs, grouped), 32)
    fp8 = [guarded(part) for part in quantize_blocks(matrix, (128, 128))]
    chosen, weights = guarded(torch.randint(-1, heads, (rows, 3)).int()), guarded(torch.rand(rows, 3))
    slots = guarded(torch.randint(-1, 10, (rows, outputs)).int())
    tall, wide = make(heads, outputs, width), make(heads, width, outputs)
    pool, q = make(2, 5, width), make(rows, heads, width)
    with Guarded(), torch.no_grad():
        linear(x, guarded(matrix.to(dtype)))
        quantized_linear(x, (guarded(codes), guarded(scale)), INT8)
        for product in (W4A8, W4A16):
            arrange_int4_(arranged := guarded(packed), planes_for(product is W4A8))
            quantized_linear(make(rows, grouped), (arranged, guarded(scales), None), product)
        block_scaled_linear(x, *fp8)
        for weight in (wide, tall.transpose(1, 2)):
            per_head_matmul(q, weight, guarded(torch.empty(rows, heads, outputs, dtype=dtype)))
        expert_mlp(x, chosen, weights, (make(heads, 2 * outputs, width),), (make(heads, width, outputs),), PLAIN)
        rms_norm(x, make(width), 1e-6)
        silu_mul(make(rows, 2 * width))
        sparse_attention(q, pool, slots, row_format=latent_format(width, 0, dtype), scale=0.1)
        tables, segments = (
            guarded(torch.tensor([[1, 0]], dtype=torch.int32)),
            Segments.of([Segment(0, rows, 0, 0)], "cpu"),
        )
        keys, by_head = make(2, random.randint(rows, 40), width), guarded(torch.rand(rows, heads))
        lightning_indexer(q, by_head, keys, tables, segments, 3, key_format=index_key_format(width, dtype))


@pytest.mark.skipif(INTERPRETED or cpu.library() is None or sys.platform != "linux", reason="no kernels of the CPU")
def test_nothing_outside_is_touched() -> None:
    done = subprocess.run([sys.executable, __file__], env=os.environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


if __name__ == "__main__":
    for seed in range(60):
        print("seed", seed, flush=True)
        random.seed(seed), torch.manual_seed(seed)
        run_some()
