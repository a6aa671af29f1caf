"""Recordings repeat what a function does to the contents of tensors, and refuse what follows from numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.recording import Blocks, Recording

pytestmark = pytest.mark.skipif(not cpu.serves(torch.empty(0)), reason="needs the CPU's kernels")


@torch.inference_mode()
def test_kernels_and_operations_run_again_over_new_contents() -> None:
    x, norm, weight = torch.randn(4, 64), torch.randn(64), torch.randn(32, 64)

    def function() -> torch.Tensor:
        y = linear(rms_norm(x, norm, 1e-6), weight).repeat(1, 2)
        y = y.masked_fill_(x > 1, 7.0).clamp(min=-1)
        return linear(rms_norm(y, norm, 1e-6)[1:], weight)[:, 3:]

    recording = Recording(function)
    assert recording.refused is None
    for seed in range(3):
        x.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)))
        recording.replay()
        assert torch.equal(recording.result, function())


@torch.inference_mode()
def test_freed_blocks_serve_later_allocations() -> None:
    x, weight = torch.randn(2, 1024), torch.randn(1024, 1024) / 32

    def layers(count: int) -> torch.Tensor:
        y = x
        for _ in range(count):
            y = linear(y, weight)
        return y

    few, many = (Recording(lambda n=n: layers(n)) for n in (3, 30))  # type: ignore[misc]
    assert few.memory_bytes == many.memory_bytes == 2 * x.nbytes
    x.normal_()
    many.replay()
    assert torch.equal(many.result, layers(30))


@torch.inference_mode()
def test_results_of_operations_lie_in_blocks_that_serve_again() -> None:
    x, blocks = torch.randn(2, 1024), Blocks(list)

    def function(count: int) -> torch.Tensor:
        y = x.cos()
        for _ in range(count):
            y = (2 * y[:, :512].repeat(1, 2)).sin_()
        return y

    few, many = (Recording(lambda n=n: function(n)).memory_bytes for n in (3, 30))  # type: ignore[misc]
    assert 0 < few == many
    recordings = {count: Recording(lambda n=count: function(n), blocks) for count in (2, 30, 3)}  # type: ignore[misc]
    assert recordings[3].memory_bytes == many + 2 * x.nbytes, "the results of the others"
    for _ in range(2):
        for count, recording in recordings.items():
            x.normal_()
            recording.replay()
            assert torch.equal(recording.result, function(count))


def test_a_recording_does_not_import_the_compiler() -> None:
    """Which takes a second, in the first decode step of a process."""
    program = """
import sys, torch
from dsa_engine.kernels.runtime.recording import Recording
Recording(lambda: torch.ones(2) + 1).replay()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


READING: list[Callable[[torch.Tensor], object]] = [
    lambda x: x * float(x[0]),
    lambda x: x if bool((x > 0).any()) else -x,
    lambda x: x * x.tolist()[0],
    lambda x: x * float(x.numpy()[0]),
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: x.nonzero(as_tuple=True)[0],
    lambda x: torch.where(x > 0)[0],
    lambda x: x.narrow(0, x.argmax(), 1),
    lambda x: x.tensor_split(x.argmax()[None])[0],
    lambda x: x.repeat_interleave(x.long().clamp(min=0)),
    lambda x: x * len(x.unique()),
]


@pytest.mark.parametrize("function", READING)
@torch.inference_mode()
def test_what_follows_from_numbers_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor([2.0, -1.0, 0.0])
    recording = Recording(lambda: function(x))
    assert recording.refused is not None and torch.equal(recording.result, function(x))


@torch.inference_mode()
def test_a_slot_that_does_not_exist_is_an_error_of_a_replay() -> None:
    q, pool, slots = torch.randn(1, 2, 24), torch.randn(3, 4, 24), torch.tensor([[0, 5, 11]], dtype=torch.int32)
    row_format = latent_format(16, 8, torch.float32)
    recording = Recording(lambda: sparse_attention(q, pool, slots, row_format=row_format, scale=0.1)[0])
    slots[0, 1] = 12
    with pytest.raises(IndexError, match="dsa_sparse_attention has met slots"):
        recording.replay()
