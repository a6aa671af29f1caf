"""Files that cannot be read and numbers that cannot be right: an error that names what is wrong, and nothing loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from checkpoint_files import BLOCK, fp8_tensors, write, write_sharded
from dsa_engine.checkpoint import CheckpointReader, Source, shard_file
from dsa_engine.checkpoint.index import fingerprint
from dsa_engine.errors import CheckpointError


def fails(
    folder: Path, match: str, name: str = "w", shape: tuple[int, ...] = (20, 20), block: tuple[int, int] | None = BLOCK
) -> str:
    """Loading ``name`` fails with an error that matches, and leaves the destination as it was; returns the message."""
    into = torch.full(shape, 7.0)
    with pytest.raises(CheckpointError, match=match) as caught, CheckpointReader(folder, block) as reader:
        reader.load(Source(name, into, shape))
    assert (into == 7).all()
    return str(caught.value)


def test_no_folder_and_no_weights(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such checkpoint folder")
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in fails(tmp_path, "holds no weights")


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"w": torch.ones(20, 20)}})
    (tmp_path / "a.safetensors").unlink()
    fails(tmp_path, r"a\.safetensors is missing")


def test_shards_that_are_no_files(tmp_path: Path) -> None:
    """Nothing is waited for."""
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "a.safetensors"
    index.write_text(json.dumps({"weight_map": {"w": shard.name}}))
    os.mkfifo(shard)
    fails(tmp_path, r"a\.safetensors is a pipe, not a file")
    assert fingerprint(tmp_path), "and those of a run with several ranks"
    shard.unlink()
    shard.symlink_to("/dev/zero")
    fails(tmp_path, r"a\.safetensors is a device, not a file")
    shard.unlink()
    shard.mkdir()
    fails(tmp_path, r"a\.safetensors is a folder, not a file")
    assert fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("n" * 5000, r"names a file of 5,000 characters \(n{60}…\); a file name has at most 255 bytes"),
        ("é" * 200, "names a file of 200 characters"),
        ("a\0b", r"names the file 'a\\x00b', which no file can be called"),
        ("\ud800", "names the file .*, which no file can be called"),
    ],
)
def test_names_that_no_file_can_have(name: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert len(fails(tmp_path, match)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("columns", [20, 3])
def test_a_file_that_is_truncated_while_it_is_loaded(columns: int, tmp_path: Path) -> None:
    """A mapping would end the process with SIGBUS."""
    path = write(tmp_path, {"v": torch.ones(4), "w": torch.ones(2000, 20)}) / "model.safetensors"
    with CheckpointReader(tmp_path) as reader:
        reader.load(Source("v", torch.empty(4), (4,)))
        os.truncate(path, 4096)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors ends before the end of 'w', after 4,096 bytes: it"
        ):
            reader.load(Source("w", torch.empty(2000, columns), (2000, 20)))


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointReader(write(tmp_path, {"w": torch.ones(20, 20)})) as reader:
        reader.describe("w")
        monkeypatch.setattr(shard_file.os, "preadv", lambda *_: os.close(-1))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot read 'w': Bad file descriptor"):
            reader.load(Source("w", torch.empty(20, 20), (20, 20)))


def test_missing_tensor_and_wrong_shape(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(20, 19), "v": torch.ones(3)})
    fails(tmp_path, "no tensor 'other'", name="other")
    fails(tmp_path, r"model\.safetensors: 'w' has shape \[20, 19\], expected \[20, 20\]")
    fails(tmp_path, r"'v' has shape \[3\], expected \[3, 1\]", name="v", shape=(3, 1))


def test_truncated_corrupt_and_lfs_files(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": torch.ones(20, 20)}) / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:50], b"", b"\xff" * 500, whole + b"x"):
        path.write_bytes(damaged)
        assert "download it again" in fails(tmp_path, r"model\.safetensors is truncated or damaged")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    fails(tmp_path, "git lfs pull")


def test_index_that_disagrees_with_the_file(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"v": torch.ones(2)}})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    fails(tmp_path, r"a\.safetensors does not hold 'w'.*disagree")


@pytest.mark.parametrize(
    "text, match",
    [
        ("{", "is not valid JSON"),
        ("\xff", "is not valid JSON"),
        ("{}", "has no 'weight_map'"),
        ("[]", "has no 'weight_map'"),
        ('{"weight_map": ["w"]}', "must map tensor names to file names"),
        ('{"weight_map": {"w": 3}}', "must map tensor names to file names"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "does not lie in the folder"),
    ],
)
def test_invalid_index(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert "model.safetensors.index.json" in fails(tmp_path, match)


def test_one_name_in_two_files_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(2)}, "a.safetensors")
    write(tmp_path, {"w": torch.ones(2)}, "b.safetensors")
    fails(tmp_path, "both hold 'w'")


def test_fp8_without_scales_or_with_wrong_ones(tmp_path: Path) -> None:
    tensors, _ = fp8_tensors("w", (20, 20))
    scales = tensors.pop("w_scale_inv")
    write(tmp_path, tensors)
    fails(tmp_path, "lacks its scales 'w_scale_inv'")
    write(tmp_path, tensors | {"w_scale_inv": scales[:1].clone()})
    fails(tmp_path, r"'w_scale_inv' has shape \[1, 3\], expected \[2, 3\] \(one scale per block of \[16, 8\]")
    write(tmp_path, tensors | {"w_scale_inv": scales.to(torch.float8_e4m3fn)})
    fails(tmp_path, "scales must be float32")
    write(tmp_path, tensors | {"w_scale_inv": scales})
    fails(tmp_path, "no quantization_config with a weight_block_size", block=None)
    write(tmp_path, {"v": torch.ones(20).to(torch.float8_e4m3fn)})
    fails(tmp_path, "only matrices may be", name="v", shape=(20,))


def test_unsupported_dtype(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(20, 20, dtype=torch.int16)})
    assert "BF16" in fails(tmp_path, r"model\.safetensors: 'w' has the unsupported dtype I16")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite(tmp_path: Path, stored: torch.dtype, value: float) -> None:
    """One NaN in an index key's norm would give finite, wrong output: the tensor is named instead."""
    vector, matrix = torch.ones(40, dtype=stored), torch.ones(9, 5, dtype=stored)
    vector[17], matrix[8, 4] = value, value
    with CheckpointReader(write(tmp_path, {"k_norm.bias": vector, "gate.weight": matrix}), None) as reader:
        with pytest.raises(CheckpointError, match=r"'k_norm.bias' holds 1 value\(s\) that are not finite in .*get a"):
            reader.load(Source("k_norm.bias", torch.empty(40), (40,)))
        with pytest.raises(CheckpointError, match=r"'gate.weight' holds 1 value\(s\)"):
            reader.load(Source("gate.weight", torch.empty(9, 5), (9, 5)))
        part = torch.empty(8, 5)
        reader.load(Source("gate.weight", part, (9, 5)))  # the rows of this rank are sound
        assert torch.equal(part, torch.ones(8, 5))


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_that_are_none(tmp_path: Path, value: float) -> None:
    tensors, _ = fp8_tensors("w", (50, 21))
    tensors["w_scale_inv"][2, 1] = value
    with (
        CheckpointReader(write(tmp_path, tensors), BLOCK) as reader,
        pytest.raises(CheckpointError, match="'w_scale_inv' holds the scale .*; scales must be finite and above 0"),
    ):
        reader.load(Source("w", torch.empty(50, 21), (50, 21)))


def test_fp8_codes_that_are_nan(tmp_path: Path) -> None:
    tensors, _ = fp8_tensors("w", (50, 21))
    tensors["w"].view(torch.uint8)[3, 4] = 0x7F
    with (
        CheckpointReader(write(tmp_path, tensors), BLOCK) as reader,
        pytest.raises(CheckpointError, match=r"'w' holds 1 value\(s\) that are not finite"),
    ):
        reader.load(Source("w", torch.empty(50, 21), (50, 21)))


def test_codes_and_scales_that_are_none(tmp_path: Path) -> None:
    tensors, _ = fp8_tensors("w", (50, 21))
    tensors["w"].view(torch.uint8)[3, 4] = 0xFF
    tensors["w_scale_inv"][2, 1] = 0
    tensors |= {"plain": torch.ones(50, 21), "i": torch.ones(50, 21, dtype=torch.int8)}
    codes, scales = torch.empty(50, 21, dtype=torch.float8_e4m3fn), torch.empty(4, 3)
    wrong = {
        r"'w' holds 1 value\(s\) that are not finite \(NaN\)": Source("w", codes, (50, 21)),
        "'w_scale_inv' holds the scale 0.0; scales must be": Source(
            "w_scale_inv", scales, (4, 3), scale_of=codes.dtype
        ),
        "'plain' is torch.float32, where .* says torch.float8_e4m3fn; name it": Source("plain", codes, (50, 21)),
        "'i' is torch.int8, where config.json implies plain numbers": Source("i", torch.empty(50, 21), (50, 21)),
        "'i' has dtype torch.int8; scales must be": Source("i", torch.empty(50, 21), (50, 21), scale_of=codes.dtype),
    }
    with CheckpointReader(write(tmp_path, tensors), BLOCK) as reader:
        for error, source in wrong.items():
            with pytest.raises(CheckpointError, match=error):
                reader.load(source)
