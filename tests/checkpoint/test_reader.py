"""Reading: every dtype and any part of a tensor, only the bytes of that part, and an error that names what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsa_engine.checkpoint import CheckpointReader, DummyReader, Source, shard_file
from dsa_engine.checkpoint import dummy as dummy_module
from dsa_engine.checkpoint import reader as reader_module
from dsa_engine.checkpoint.index import fingerprint
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.fp8 import dequantize_blocks, quantize_blocks

BLOCK = (16, 8)


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def write_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    weight_map = {}
    for file, tensors in shards.items():
        write(folder, tensors, file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def fp8_tensors(name: str, shape: tuple[int, int], seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The two stored tensors of an FP8 weight, and its expanded value."""
    weight, scale_inv = quantize_blocks(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), BLOCK)
    return {name: weight, name + "_scale_inv": scale_inv}, dequantize_blocks(weight, scale_inv, BLOCK)


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


def test_two_halves_read_the_whole_once(tmp_path: Path) -> None:
    plain = torch.randn(64, 32).bfloat16()
    tensors, whole = fp8_tensors("w", (64, 32))
    folder = write(tmp_path, {"p": plain, **tensors})
    halves, read = [], []
    for rank in range(2):
        with CheckpointReader(folder, BLOCK) as reader:
            rows, columns = torch.empty(32, 32), torch.empty(64, 16)
            reader.load(Source("w", rows, (64, 32), (32 * rank, 0)))
            reader.load(Source("p", columns, (64, 32), (0, 16 * rank)))
            halves.append((rows, columns))
            read.append(reader.bytes_read)
    assert torch.equal(torch.cat([rows for rows, _ in halves]), whole)
    assert torch.equal(torch.cat([columns for _, columns in halves], 1), plain.float())
    scales = tensors["w_scale_inv"].numel()
    assert read[0] == read[1] and sum(read) == 64 * 32 * 2 + 64 * 32 + scales * 4


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


def test_a_source_that_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="does not lie inside"):
        Source("w", torch.empty(3, 3), (4, 4), (2, 0))
    with pytest.raises(ValueError, match="one dimension, or all two"):
        Source("w", torch.empty(3), (4, 4))
    with pytest.raises(ValueError, match="one dimension, or all two"):
        Source("w", torch.empty(1, 3, 3), (1, 3, 3))


def test_dummy_weights_depend_on_seed_name_and_index_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy_module, "RANDOM_BLOCK_ELEMENTS", 300)  # several blocks of rows
    reader = DummyReader(seed=3)

    def load(
        name: str, size: tuple[int, ...], shape: tuple[int, ...], start: tuple[int, ...] = (), seed: int = 3
    ) -> torch.Tensor:
        into = torch.full(size, torch.nan)
        (reader if seed == 3 else DummyReader(seed)).load(Source(name, into, shape, start))
        return into

    whole = load("a.weight", (100, 40), (100, 40))
    assert 0.018 < whole.std() < 0.022 and whole.mean().abs() < 0.002
    assert len(whole.unique()) > 3900  # no block repeats another
    assert torch.equal(load("a.weight", (31, 9), (100, 40), (13, 30)), whole[13:44, 30:39])
    assert torch.equal(load("a.weight", (100, 40), (100, 40)), whole)
    assert not torch.equal(load("b.weight", (100, 40), (100, 40)), whole)
    assert not torch.equal(load("a.weight", (100, 40), (100, 40), seed=4), whole)
    assert (load("model.layers.0.input_layernorm.weight", (5,), (10,), (5,)) == 1).all()
    assert (load("model.norm.weight", (5,), (5,)) == 1).all()
    assert (load("self_attn.indexer.k_norm.bias", (5,), (5,)) == 0).all()
    assert (load("mlp.gate.e_score_correction_bias", (5,), (5,)) == 0).all()
    assert reader.bytes_read == 0


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


def test_large_values_are_finite(tmp_path: Path) -> None:
    """Their sum is not; and float16 cannot hold what bfloat16 can."""
    large = torch.full((64,), 3e38)
    with CheckpointReader(write(tmp_path, {"v": large}), None) as reader:
        into = torch.empty(64)
        reader.load(Source("v", into, (64,)))
        assert torch.equal(into, large)
        with pytest.raises(
            CheckpointError, match="range of float16, or 64 value.* not finite in torch.float16.*dtype='float32'"
        ):
            reader.load(Source("v", torch.empty(64, dtype=torch.float16), (64,)))


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_dummy_codes_have_the_spread_of_dummy_weights(dtype: torch.dtype) -> None:
    codes, scale = torch.empty(100, 400, dtype=dtype), torch.empty(1, 4)
    reader = DummyReader(seed=3)
    reader.load(Source("w", codes, (100, 400)))
    reader.load(Source("w_scale", scale, (1, 4), scale_of=dtype))
    assert len(scale.unique()) == 1
    assert 0.018 < (codes.float() * scale[0, 0]).std() < 0.022
    part = torch.empty(10, 400, dtype=dtype)
    reader.load(Source("w", part, (100, 400), (20, 0)))
    assert torch.equal(part.view(torch.uint8), codes[20:30].view(torch.uint8))
