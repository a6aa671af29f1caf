"""The key of a folder of pages: other weights have another digest, equal ones the same."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine.weights.index import checkpoint_digest

CHANGED = "model.layers.1.b"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    random_numbers = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layer}.{name}": torch.randn(40, 50, generator=random_numbers).bfloat16()
        for layer in range(3)
        for name in "abc"
    }
    save_file(tensors | {"model.scale": torch.ones(1)}, made / "model.safetensors")
    return made


def changed(folder: Path, change: Callable[[Tensors], object]) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return checkpoint_digest(folder)


def a_step_of_training(tensors: Tensors, fraction: float = 0.5) -> None:
    """The least change of that many numbers of one tensor, in random places."""
    numbers = tensors[CHANGED].view(torch.int16)
    chosen = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(1)) < fraction
    numbers[chosen] ^= 1


@pytest.mark.parametrize(
    "change",
    [
        a_step_of_training,
        lambda tensors: tensors.update({CHANGED: tensors[CHANGED].reshape(50, 40)}),
        lambda tensors: tensors.update({CHANGED: tensors[CHANGED].view(torch.float16)}),
        lambda tensors: tensors.update({CHANGED: tensors["model.layers.1.a"].clone()}),
        lambda tensors: tensors.update({"model.layers.3.a": tensors.pop("model.layers.2.c")}),
        lambda tensors: tensors.update({"model.scale": torch.full((1,), 2.0)}),
    ],
    ids=["step of training", "shape", "dtype", "tensor twice", "name", "one number"],
)
def test_other_weights_have_another_digest(change: Callable[[Tensors], object], folder: Path) -> None:
    before = checkpoint_digest(folder)
    assert changed(folder, change) != before


def test_equal_weights_have_the_same_digest(folder: Path, tmp_path: Path) -> None:
    """Wherever the folder is, whenever it was written, with other files beside it."""
    before, copy = checkpoint_digest(folder), tmp_path / f"copy {random.random()}"
    shutil.copytree(folder, copy)
    (copy / "notes.txt").touch()
    assert checkpoint_digest(copy) == before and changed(copy, lambda tensors: None) == before
