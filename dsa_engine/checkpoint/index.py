"""The file of each tensor in a checkpoint folder."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from dsa_engine.checkpoint.shard_file import ShardFile
from dsa_engine.config.json_text import read_json
from dsa_engine.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SAMPLE = 4096  # bytes
_LONGEST_NAME = 255  # bytes of a file's name

_TRANSFORMERS = "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW_FOLDER)"
_PICKLED = f"pickled, which may run code and is not read here; transformers writes it as safetensors: {_TRANSFORMERS}"
_OTHER_FORMATS = {
    ".bin": _PICKLED,
    ".pt": _PICKLED,
    ".pth": _PICKLED,
    ".gguf": "GGUF, which is not read here; get the original checkpoint",
}


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Maps every tensor name to its file: by the index if there is one, else by the files' headers.

    Raises:
        CheckpointError: no such folder, no safetensors files, a bad index, a damaged file, or a name in two files.
    """
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
        for name in ShardFile(path).tensors:
            if name in file_of:
                raise CheckpointError(
                    f"{path} and {file_of[name].name} both hold {name!r}, and no {INDEX_NAME} chooses one"
                )
            file_of[name] = path
    return file_of


def fingerprint(folder: Path) -> str:
    """A digest that tells checkpoints apart: the index, names and sizes of the files, and samples of each.

    Reads 3 times 4 KiB of each file: another version of the same model is noticed, a damaged byte is not.
    """
    digest = blake2b(digest_size=8)
    index = folder / INDEX_NAME
    if index.is_file():
        digest.update(index.read_bytes())
    for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
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
        weight_map = read_json(index.read_text(encoding="utf-8"))["weight_map"]
    except ValueError as error:
        raise CheckpointError(f"{index} is not valid JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{index} has no 'weight_map'") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names")
    for file in set(weight_map.values()):
        _check_file_name(index, file)
    return {name: index.parent / file for name, file in weight_map.items()}


def _check_file_name(index: Path, name: str) -> None:
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        length = 0
    if length == 0 or "\0" in name:
        raise CheckpointError(f"{index} names the file {name[:60]!r}, which no file can be called")
    if length > _LONGEST_NAME:
        raise CheckpointError(
            f"{index} names a file of {len(name):,} characters ({name[:60]}…); a file name has at most 255 bytes"
        )
    if Path(name).name != name:
        raise CheckpointError(f"{index} names the file {name!r}, which does not lie in the folder itself")
