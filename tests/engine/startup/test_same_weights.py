"""Ranks with different checkpoints: noticed wherever they differ in what is read, and named. Threads are ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsa_engine.checkpoint import CheckpointReader, Source
from dsa_engine.checkpoint import reader as reader_module
from dsa_engine.checkpoint.part_digests import PartDigests, digest
from dsa_engine.engine.startup.same_weights import compare_weights
from dsa_engine.errors import CheckpointError

EXPERTS = [f"experts.{number}.weight" for number in range(6)]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"norm": (700,), "q_b": (24, 40), "o_proj": (24, 40)} | dict.fromkeys(EXPERTS, (8, 30))
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


class Ranks:
    """``gather`` is a collective of threads."""

    def __init__(self, size: int):
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def mesh(self, rank: int) -> Any:
        def all_gather_object(value: Any) -> list[Any]:
            self._slots[rank] = value
            self._barrier.wait()
            every = list(self._slots)
            self._barrier.wait()
            return every

        group = SimpleNamespace(index=rank, size=len(self._slots), all_gather_object=all_gather_object)
        return SimpleNamespace(host=group, is_leader=rank == 0, global_ranks=list(range(4, 4 + len(self._slots))))


def errors_of(folders: list[Path], tp_size: int = 1) -> list[str]:
    """What every rank is told; each reads its own folder, columns of ``o_proj`` and some of the experts."""
    ranks = Ranks(len(folders))

    def run(rank: int) -> str:
        digests = PartDigests()
        with CheckpointReader(folders[rank], digests=digests) as reader:
            reader.load(Source("norm", torch.empty(700), (700,)))
            reader.load(Source("q_b", torch.empty(24, 40), (24, 40)))
            width = 40 // tp_size
            reader.load(Source("o_proj", torch.empty(24, width), (24, 40), (0, rank % tp_size * width)))
            for name in EXPERTS[rank :: len(folders)]:
                reader.load(Source(name, torch.empty(8, 30), (8, 30)))
        try:
            compare_weights(ranks.mesh(rank), folders[rank], digests, 1.0)
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(run, range(len(folders))))


@pytest.mark.parametrize(
    ("changed", "index", "tp_size", "said"),
    [
        ({}, 0, 1, ""),
        ({"q_b": 0}, 959, 1, "1 tensor(s) differ, q_b between rank 4, 6, 7 and rank 5; give all"),
        ({"norm": 0, "o_proj": 0}, 699, 1, "2 tensor(s) differ, norm between rank 4, 6, 7 and rank 5; o_proj between"),
        # Two ranks read each half: those of rank 4 and 6 agree.
        ({"o_proj": 0}, 39, 2, "1 tensor(s) differ, o_proj between rank 5 and rank 7; give"),
        ({"o_proj": 0}, 0, 2, ""),  # not read by the rank that has it
        ({"o_proj": 0}, 10, 4, "o_proj between rank 5 and rank 6;"),  # one rank reads it, and the next one compares
        ({EXPERTS[1]: 0}, 0, 1, "experts.1.weight between rank 5 and rank 6;"),
        (
            {EXPERTS[0]: 0},
            0,
            1,
            "experts.0.weight between rank 4 and rank 5;",
        ),  # the rank that compares has another one
        ({EXPERTS[2]: 0}, 0, 1, ""),
        (dict.fromkeys(["norm", "q_b", "o_proj", *EXPERTS], 0), 3, 1, "7 tensor(s) differ, norm between"),
    ],
)
def test_the_tensor_and_the_ranks_are_named(
    changed: dict[str, int], index: int, tp_size: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "CHUNK_ELEMENTS", 300)  # tensors of several parts
    folders = [tmp_path / name for name in ("as it was", "changed")]
    stored = tensors()
    for folder in folders:
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        for name in changed:
            stored[name].view(-1)[index] += 1e-3
    errors = errors_of([folders[rank == 1] for rank in range(4)], tp_size)
    assert len(set(errors)) == 1 and said in errors[0] and bool(said) == bool(errors[0]), errors


def test_the_division_of_experts_does_not_change_the_combined_digest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_file(tensors(), tmp_path / "model.safetensors")
    for world in (2, 3):
        assert errors_of([tmp_path] * world) == [""] * world
    (two, three) = (record.getMessage() for record in caplog.records)
    assert two.startswith("all ranks have read the same weights, digest ") and "% of loading, at " in two
    assert two.partition(":")[0] == three.partition(":")[0]


@pytest.mark.parametrize("elements", [1, 500, 5000])
def test_a_digest_depends_on_every_element(elements: int) -> None:
    values = torch.arange(float(elements))
    for index in range(0, elements, 7):
        other = values.clone()
        other[index] = torch.nextafter(other[index], torch.tensor(torch.inf))
        assert digest(other) != digest(values), index


def test_a_digest_depends_on_the_order_of_rows() -> None:
    values = torch.randn(5, 1000)
    assert digest(values[[1, 0, 2, 3, 4]]) != digest(values)
