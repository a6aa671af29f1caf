"""Reading: every dtype and any part of a tensor, and only the bytes of that part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint_files import BLOCK, fp8_tensors, write, write_sharded
from dsa_engine.errors import CheckpointError
from dsa_engine.weights import CheckpointReader, Source
from dsa_engine.weights import reader as reader_module


@pytest.mark.parametrize("into_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_dtypes_are_converted(tmp_path: Path, stored: torch.dtype, into_dtype: torch.dtype) -> None:
    matrix, vector = torch.randn(9, 5).to(stored), torch.randn(7).to(stored)
    folder = write(tmp_path, {"m": matrix, "v": vector})
    with CheckpointReader(folder, None) as reader:
        into = torch.empty(9, 5, dtype=into_dtype), torch.empty(7, dtype=into_dtype)
        reader.load(Source("m", into[0], (9, 5)))
        reader.load(Source("v", into[1], (7,)))
        assert reader.names() == {"m", "v"}
        assert reader.bytes_read == (45 + 7) * stored.itemsize
    assert torch.equal(into[0], matrix.to(into_dtype)) and torch.equal(into[1], vector.to(into_dtype))


# (start, size): inside one block, across blocks, at block borders, at the partial edge, whole.
PARTS = [
    ((3, 2), (5, 4)),
    ((7, 3), (30, 17)),
    ((16, 8), (16, 8)),
    ((45, 19), (5, 2)),
    ((15, 0), (2, 21)),
    ((0, 0), (50, 21)),
]


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
@pytest.mark.parametrize("start, size", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_fp8_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: tuple[int, int],
    size: tuple[int, int],
    dtype: torch.dtype,
    chunk: int,
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_ELEMENTS", chunk)
    tensors, whole = fp8_tensors("w", (50, 21))
    with CheckpointReader(write(tmp_path, tensors), BLOCK) as reader:
        into = torch.full(size, torch.nan, dtype=dtype)
        reader.load(Source("w", into, (50, 21), start))
        rows, columns = (slice(s, s + n) for s, n in zip(start, size, strict=True))
        assert torch.equal(into, whole[rows, columns].to(dtype))
        blocks = [-(-(s + n) // b) - s // b for s, n, b in zip(start, size, BLOCK, strict=True)]
        # Each weight byte once, and each scale that the part touches once, however the part is cut into chunks.
        assert reader.bytes_read == size[0] * size[1] + blocks[0] * blocks[1] * 4


@pytest.mark.parametrize("chunk", [1, 7, 1 << 24])
def test_parts_of_plain_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_ELEMENTS", chunk)
    matrix, vector = torch.randn(10, 6), torch.randn(11).bfloat16()
    with CheckpointReader(write(tmp_path, {"m": matrix, "v": vector}), None) as reader:
        # The destination may be a view, as a slot of a stack of experts is.
        stack = torch.zeros(3, 4, 8)
        reader.load(Source("m", stack[1, :, 2:5], (10, 6), (3, 1)))
        assert torch.equal(stack[1, :, 2:5], matrix[3:7, 1:4])
        assert stack.count_nonzero() == 12
        part = torch.zeros(4)
        reader.load(Source("v", part, (11,), (5,)))
        assert torch.equal(part, vector[5:9].float())
        assert reader.bytes_read == 12 * 4 + 4 * 2
        reader.load(Source("m", torch.empty(0, 6), (10, 6), (10, 0)))
        assert reader.bytes_read == 12 * 4 + 4 * 2


def test_an_expert_shard_reads_its_experts_only_and_opens_only_their_files(tmp_path: Path) -> None:
    shards = {f"model-{e}.safetensors": fp8_tensors(f"experts.{e}.weight", (32, 24), e)[0] for e in range(4)}
    folder = write_sharded(tmp_path, shards)
    (folder / "model-0.safetensors").unlink()  # never needed here, so never missed
    with CheckpointReader(folder, BLOCK) as reader:
        for e in (2, 3):
            into = torch.empty(32, 24)
            reader.load(Source(f"experts.{e}.weight", into, (32, 24)))
            assert torch.equal(into, fp8_tensors("", (32, 24), e)[1])
        assert reader.bytes_read == 2 * (32 * 24 + 2 * 3 * 4)
        assert len(reader.names()) == 8


def test_without_an_index_several_files_are_joined_and_the_usual_name_wins(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)}, "part-a.safetensors")
    write(tmp_path, {"b": torch.ones(3)}, "part-b.safetensors")
    assert CheckpointReader(tmp_path, None).names() == {"a", "b"}
    write(tmp_path, {"c": torch.ones(3)})
    assert CheckpointReader(tmp_path, None).names() == {"c"}


def test_describe(tmp_path: Path) -> None:
    with CheckpointReader(write(tmp_path, fp8_tensors("w", (20, 20))[0]), BLOCK) as reader:
        assert reader.describe("w") == ((20, 20), torch.float8_e4m3fn)
        assert reader.describe("w_scale_inv") == ((2, 3), torch.float32)
        assert reader.bytes_read == 0


def test_a_source_that_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="does not lie inside"):
        Source("w", torch.empty(3, 3), (4, 4), (2, 0))
    with pytest.raises(ValueError, match="one dimension, or all two"):
        Source("w", torch.empty(3), (4, 4))
    with pytest.raises(ValueError, match="one dimension, or all two"):
        Source("w", torch.empty(1, 3, 3), (1, 3, 3))


def test_large_values_are_finite(tmp_path: Path) -> None:
    """Their sum is not; and float16 cannot hold what bfloat16 can."""
    large = torch.full((64,), 3e38)
    with CheckpointReader(write(tmp_path, {"v": large}), None) as reader:
        into = torch.empty(64)
        reader.load(Source("v", into, (64,)))
        assert torch.equal(into, large)
        with pytest.raises(CheckpointError, match="not finite in torch.float16.*dtype='float32'"):
            reader.load(Source("v", torch.empty(64, dtype=torch.float16), (64,)))


def test_codes_and_scales_as_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_ELEMENTS", 100)
    tensors, _ = fp8_tensors("w", (50, 21))
    integers = torch.randint(-128, 128, (50, 21), dtype=torch.int8)
    with CheckpointReader(write(tmp_path, tensors | {"i": integers}), BLOCK) as reader:
        codes, scales = torch.empty(32, 8, dtype=torch.float8_e4m3fn), torch.empty(2, 1)
        reader.load(Source("w", codes, (50, 21), (16, 8)))
        reader.load(Source("w_scale_inv", scales, (4, 3), (1, 1), scale_of=codes.dtype))
        assert torch.equal(codes.view(torch.uint8), tensors["w"].view(torch.uint8)[16:48, 8:16])
        assert torch.equal(scales, tensors["w_scale_inv"][1:3, 1:2])
        assert reader.bytes_read == 32 * 8 + 2 * 4
        whole = torch.empty(50, 21, dtype=torch.int8)
        reader.load(Source("i", whole, (50, 21)))
        assert torch.equal(whole, integers)
