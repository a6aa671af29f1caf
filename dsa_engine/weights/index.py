"""The file of each tensor in a checkpoint folder."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dsa_engine.config.model import read_object
from dsa_engine.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SAMPLE = 4096  # bytes
_TENSOR_SAMPLE = 64  # bytes of each tensor

_TRANSFORMERS = "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW_FOLDER)"
_PICKLED = f"pickled, which may run code and is not read here; transformers writes it as safetensors: {_TRANSFORMERS}"
_OTHER_FORMATS = {
    ".bin": _PICKLED,
    ".pt": _PICKLED,
    ".pth": _PICKLED,
    ".gguf": "GGUF, which is not read here; get the original checkpoint",
}


def open_shard(path: Path) -> Any:
    """A safetensors file, mapped into memory (a ``safetensors.safe_open``); its tensors are views of the mapping."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise CheckpointError(f"{path} is no file; put the checkpoint's file there")
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the checkpoint again, or its missing files") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({error}); download it again (a git-lfs pointer: with `git lfs pull`)"
        ) from error


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Maps every tensor name to its file: by the index if there is one, else by the files' headers."""
    if not folder.is_dir():
        raise CheckpointError(f"no such checkpoint folder: {folder}")
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_index(index)
    # A folder may also hold the same weights under another name (consolidated.safetensors): the usual name wins.
    single = folder / SINGLE_NAME
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no weights: neither {INDEX_NAME} nor any *.safetensors file{_others(folder)}"
        )
    file_of: dict[str, Path] = {}
    for path in files:
        for name in open_shard(path).keys():
            if name in file_of:
                raise CheckpointError(
                    f"{path} and {file_of[name].name} both hold {name!r}, and no {INDEX_NAME} chooses one"
                )
            file_of[name] = path
    return file_of


def fingerprint(folder: Path) -> str:
    """A digest that tells checkpoints apart: the index, names and sizes of the files, and samples of each.

    Reads 17 times 4 KiB of each file: another version of the same model is noticed, a damaged byte is not.
    """
    digest = blake2b(digest_size=8)
    index = folder / INDEX_NAME
    if index.is_file():
        digest.update(index.read_bytes())
    for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(17):
                file.seek(max(0, size - _SAMPLE) * number // 16)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """A digest of names, types and shapes of all tensors, and of 64 bytes in the middle of each.

    A fine-tuned model has other bytes nearly everywhere, so it has another digest. A change of single numbers
    is not noticed, nor is a damaged byte.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(set(locate_tensors(folder).values())):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        shard = open_shard(path)
        for name in sorted(shard.keys()):
            tensor = shard.get_tensor(name)  # a view of the file
            raw = tensor.reshape(-1).view(torch.uint8)
            sample = raw[max(0, (raw.numel() - _TENSOR_SAMPLE) // 2) :][:_TENSOR_SAMPLE]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _others(folder: Path) -> str:
    """The addition to an error for weights in formats that are not read."""
    for suffix, what in _OTHER_FORMATS.items():
        names = sorted(path.name for path in folder.glob(f"*{suffix}"))
        if names:
            return f"; {names[0]} is {what}"
    return ""


def _read_index(index: Path) -> dict[str, Path]:
    try:
        file_of = {name: Path(file) for name, file in read_object(index)["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to file names") from error
    if outside := [file for file in file_of.values() if file.is_absolute() or ".." in file.parts]:
        raise CheckpointError(f"{index}: 'weight_map' names {outside[0]}, outside of the folder; name files in it")
    return {name: index.parent / file for name, file in file_of.items()}
