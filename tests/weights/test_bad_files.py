"""Files that cannot be read and numbers that cannot be right: an error that names what is wrong, and nothing loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from checkpoint_files import BLOCK, fp8_tensors, write, write_sharded
from dsa_engine.errors import CheckpointError
from dsa_engine.weights import CheckpointReader, Source


def fails(
    folder: Path, match: str, name: str = "w", shape: tuple[int, ...] = (20, 20), block: tuple[int, int] | None = BLOCK
) -> str:
    """Loading ``name`` fails with an error that matches, and leaves the destination as it was; returns the message."""
    into = torch.full(shape, 7.0)
    with pytest.raises(CheckpointError, match=match) as caught, CheckpointReader(folder, block) as reader:
        reader.load(Source(name, into, shape))
    assert (into == 7).all()
    return str(caught.value)


def test_no_folder_no_weights_and_a_missing_shard(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such checkpoint folder")
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in fails(tmp_path, "holds no weights")
    write_sharded(tmp_path, {"a.safetensors": {"w": torch.ones(20, 20)}})
    (tmp_path / "a.safetensors").unlink()
    fails(tmp_path, r"a\.safetensors is missing")


def test_missing_tensor_and_wrong_shape(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(20, 19), "v": torch.ones(3)})
    fails(tmp_path, "no tensor 'other'", name="other")
    fails(tmp_path, r"model\.safetensors: 'w' has shape \[20, 19\], expected \[20, 20\]")
    fails(tmp_path, r"'v' has shape \[3\], expected \[3, 1\]", name="v", shape=(3, 1))


def test_truncated_corrupt_and_lfs_files(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": torch.ones(20, 20)}) / "model.safetensors"
    whole = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    for damaged in (whole[:-1], whole[:50], b"", b"\xff" * 500, whole + b"x", pointer):
        path.write_bytes(damaged)
        assert "git lfs pull" in fails(tmp_path, r"model\.safetensors is truncated or damaged")


def test_index_that_disagrees_with_the_file(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"v": torch.ones(2)}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    fails(tmp_path, r"a\.safetensors does not hold 'w'.*disagree")


BAD_INDEX = ["{", "\xff", "{}", "[]", '{"weight_map": ["w"]}', '{"weight_map": {"w": 3}}', '{"a":' * 100_000]


@pytest.mark.parametrize("text", BAD_INDEX, ids=range(7))
def test_invalid_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    fails(tmp_path, r"model\.safetensors\.index\.json (is not valid JSON|must hold a JSON object|has no 'weight_map')")


def test_files_outside_of_the_folder_and_a_pipe(tmp_path: Path) -> None:
    """Neither is opened: a pipe would wait for its other end."""
    (tmp_path / "inside").mkdir()
    write(tmp_path, {"w": torch.ones(20, 20)}, "a.safetensors")
    index = tmp_path / "inside" / "model.safetensors.index.json"
    for file in ("../a.safetensors", str(tmp_path / "a.safetensors"), "b/../../a.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        fails(tmp_path / "inside", r"'weight_map' names \S*a\.safetensors, outside of the folder")
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    os.mkfifo(tmp_path / "inside" / "a.safetensors")
    fails(tmp_path / "inside", r"inside/a\.safetensors is no file")
    index.unlink()
    fails(tmp_path / "inside", r"inside/a\.safetensors is no file")


def test_one_name_in_two_files_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(2)}, "a.safetensors")
    write(tmp_path, {"w": torch.ones(2)}, "b.safetensors")
    fails(tmp_path, "both hold 'w'")


def test_fp8_without_scales_or_with_wrong_ones(tmp_path: Path) -> None:
    tensors, _ = fp8_tensors("w", (20, 20))
    scales = tensors.pop("w_scale_inv")
    write(tmp_path, tensors)
    fails(tmp_path, "lacks its scales 'w_scale_inv'")
    for wrong in (scales[:1].clone(), scales.to(torch.float8_e4m3fn), scales.int()):
        write(tmp_path, tensors | {"w_scale_inv": wrong})
        fails(tmp_path, r"'w_scale_inv' is .*, expected float32 \[2, 3\]: one scale per block of \[16, 8\]")
    write(tmp_path, tensors | {"w_scale_inv": scales})
    fails(tmp_path, "weight_block_size", block=None)
    write(tmp_path, {"v": torch.ones(20).to(torch.float8_e4m3fn)})
    fails(tmp_path, "only matrices may be", name="v", shape=(20,))


def test_unsupported_dtype(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(20, 20, dtype=torch.int16)})
    assert "BF16" in fails(tmp_path, r"model\.safetensors: 'w' has the dtype I16")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite(tmp_path: Path, stored: torch.dtype, value: float) -> None:
    """One NaN in an index key's norm would give finite, wrong output: the tensor is named instead."""
    vector, matrix = torch.ones(40, dtype=stored), torch.ones(9, 5, dtype=stored)
    vector[17], matrix[8, 4] = value, value
    with CheckpointReader(write(tmp_path, {"k_norm.bias": vector, "gate.weight": matrix}), None) as reader:
        for name, shape in (("k_norm.bias", (40,)), ("gate.weight", (9, 5))):
            with pytest.raises(CheckpointError, match=rf"'{name}' holds values that are not finite"):
                reader.load(Source(name, torch.empty(shape), shape))
        part = torch.empty(8, 5)
        reader.load(Source("gate.weight", part, (9, 5)))  # the rows of this rank are sound
        assert torch.equal(part, torch.ones(8, 5))


@pytest.mark.parametrize("codes", [0x7F, 0xFF])
@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
def test_codes_and_scales_that_are_not_finite(codes: int, scale: float, tmp_path: Path) -> None:
    """Expanded, and as they are stored."""
    tensors, _ = fp8_tensors("w", (50, 21))
    nan_codes, nan_scales = tensors["w"].clone(), tensors["w_scale_inv"].clone()
    nan_codes.view(torch.uint8)[3, 4], nan_scales[2, 1] = codes, scale
    for wrong in ({"w": nan_codes}, {"w_scale_inv": nan_scales}):
        (name,) = wrong
        stored = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        with CheckpointReader(write(tmp_path, tensors | wrong), BLOCK) as reader:
            for source in (Source("w", torch.empty(50, 21), (50, 21)), Source(name, stored, tuple(stored.shape))):
                with pytest.raises(CheckpointError, match=f"'{name}' holds values that are not finite"):
                    reader.load(source)


def test_dtypes_that_the_configuration_contradicts(tmp_path: Path) -> None:
    codes = torch.empty(50, 21, dtype=torch.float8_e4m3fn)
    wrong = {
        "'plain' is torch.float32, where .* says torch.float8_e4m3fn; name it": Source("plain", codes, (50, 21)),
        "'i' is torch.int8, where config.json implies plain numbers": Source("i", torch.empty(50, 21), (50, 21)),
        "'i' has dtype torch.int8; scales must be": Source("i", torch.empty(50, 21), (50, 21), scale_of=codes.dtype),
    }
    write(tmp_path, {"plain": torch.ones(50, 21), "i": torch.ones(50, 21, dtype=torch.int8)})
    with CheckpointReader(tmp_path, BLOCK) as reader:
        for error, source in wrong.items():
            with pytest.raises(CheckpointError, match=error):
                reader.load(source)
