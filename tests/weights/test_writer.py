"""Writing: files that safetensors itself reads, shards and their index, nothing at the target until all is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dsa_engine.errors import CheckpointError
from dsa_engine.weights import CheckpointReader, SafetensorsWriter, TensorSpec

TENSORS = {
    "odd": torch.randn(3, 5).to(torch.float8_e4m3fn),  # 15 bytes: what follows would be misaligned
    "scales": torch.randn(2, 3),
    "half": torch.randn(7).half(),
    "brain": torch.randn(2, 9).bfloat16(),
    "strided": torch.randn(4, 6).T,
    "empty": torch.randn(0, 4),
}
SPECS = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def write(target: Path, *, max_shard_size: int | str = "5GB", fail_at: str | None = None) -> SafetensorsWriter:
    with SafetensorsWriter(target, SPECS, max_shard_size=max_shard_size) as writer:
        for name, tensor in TENSORS.items():
            if name == fail_at:
                raise RuntimeError("stop")
            writer.write(name, tensor)
        writer.add_file("config.json", "{}")
        writer.add_file("raw.bin", b"\0\1")
    return writer


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


def test_a_single_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    writer = write(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors", "raw.bin"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(same(loaded[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it
    assert writer.written.shards == 1 and writer.written.tensors == len(TENSORS)
    assert writer.written.tensor_bytes == sum(t.numel() * t.element_size() for t in TENSORS.values())
    assert (tmp_path / "out" / "raw.bin").read_bytes() == b"\0\1"


def test_shards_and_their_index(tmp_path: Path) -> None:
    writer = write(tmp_path / "out", max_shard_size=40)
    folder = tmp_path / "out"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == writer.written.tensor_bytes
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    # 15 + 24, 14, 36, 0 and 96 bytes: the last is larger than a shard may be, and gets its own.
    groups = [{"odd", "scales"}, {"half"}, {"strided"}, {"brain", "empty"}]
    assert writer.written.shards == len(files) == len(groups)
    for file, names in zip(files, groups, strict=True):
        assert {name for name, where in index["weight_map"].items() if where == file} == names
        loaded = load_file(folder / file)
        assert loaded.keys() == names
        assert all(same(loaded[name], TENSORS[name]) for name in names)
    assert CheckpointReader(folder, None).names() == TENSORS.keys()


def test_an_existing_folder_is_refused_unless_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    before = (tmp_path / "empty" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        write(tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        write(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file"]


def test_a_target_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with (
        pytest.raises(CheckpointError, match="exists and is not an empty folder"),
        SafetensorsWriter(target, SPECS) as writer,
    ):
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        target.mkdir()
        (target / "theirs").write_text("")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and [p.name for p in target.iterdir()] == ["theirs"]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        write(tmp_path / "out", fail_at="brain")
    with (
        pytest.raises(ValueError, match="6 of 6 tensors were not written"),
        SafetensorsWriter(tmp_path / "out", SPECS),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_at_any_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small file system, filled so that more and more of the checkpoint fits."""
    room = tmp_path / "room"
    room.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(room)], capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    specs = [TensorSpec(f"t{i}", (5000 + 700 * i,), torch.float32) for i in range(6)]  # 162 KB
    outcomes = set()
    try:
        for filled in range(0, 256, 4):
            (room / "filler").write_bytes(b"x" * 1024 * filled)
            try:
                with SafetensorsWriter(room / "out", specs, max_shard_size="64KB") as writer:
                    for spec in specs:
                        writer.write(spec.name, torch.ones(spec.shape))
                    (room / "meanwhile").write_bytes(b"x" * 20_000)  # so that what was free is not enough
                    writer.add_file("config.json", "{}")
                outcomes.add("written")
            except (CheckpointError, OSError) as error:
                assert re.search("cannot write .*/room/out/|its disk has only|No space left", str(error)), error
                outcomes.add(str(error).partition(" ")[0])
                assert not (room / "out").exists()
            assert {path.name for path in room.iterdir()} <= {"filler", "meanwhile", "out"}
            for path in room.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        subprocess.run(["umount", str(room)], check=True)
    assert {"written", "cannot"} <= outcomes


def test_nothing_is_at_the_target_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with SafetensorsWriter(target, SPECS, max_shard_size=40) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
            assert not target.exists()
            (temporary,) = tmp_path.iterdir()
            assert ".incomplete-" in temporary.name and not (temporary / "config.json").exists()
        writer.add_file("config.json", "{}")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_as_the_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, make = SafetensorsWriter(tmp_path / "out", SPECS), Path.mkdir

    def interrupted(*args: Any, **options: Any) -> None:
        make(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.write("odd", TENSORS["odd"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("other", torch.randn(3, 5)),
        ("odd", torch.randn(3, 5)),
        ("odd", torch.randn(5, 3).to(torch.float8_e4m3fn)),
        ("scales", TENSORS["scales"]),  # a second time
    ],
)
def test_only_announced_tensors_are_taken(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"not '{name}'"), SafetensorsWriter(tmp_path / "out", SPECS) as writer:
        writer.write("scales", TENSORS["scales"])
        writer.write(name, tensor)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_may_change_after_it_was_written(tmp_path: Path) -> None:
    buffer = torch.zeros(2, 4)
    with SafetensorsWriter(tmp_path / "out", [TensorSpec(n, (4,), torch.float32) for n in "ab"]) as writer:
        for number, name in enumerate("ab"):
            writer.write(name, buffer[0].fill_(number))
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert [loaded[name].tolist() for name in "ab"] == [[0] * 4, [1] * 4]


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="needs 4,000,000,000,000,000,000 bytes"):
        SafetensorsWriter(tmp_path / "out", [TensorSpec("x", (10**9, 10**9), torch.float32)])


def test_folders_above_the_target_are_made_and_permissions_are_usual(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "a" / "b" / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
