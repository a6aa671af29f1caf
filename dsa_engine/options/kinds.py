"""Kinds of values that only the engine's options have; the common ones are in ``config/fields.py``."""

from __future__ import annotations

import os
from typing import Any

from dsa_engine.config.checks import DTYPE_NAMES, number
from dsa_engine.config.fields import STR, Kind, instance_of
from dsa_engine.parallel import ParallelConfig
from dsa_engine.system.sizes import parse_bytes

DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # as in vLLM


def _check_model(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a folder, a hub id or 'demo', not {value!r}")


def _check_folder(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be the path of a folder, not {value!r}")
    if not os.fspath(value):
        raise ValueError(f"{name} must be the path of a folder, not an empty text")


def _check_dtype(name: str, value: Any) -> None:
    STR.check(name, value)
    if value != "auto" and value not in DTYPE_NAMES and value not in DTYPE_ALIASES:
        raise ValueError(f"{name} must be 'auto' or one of {', '.join(DTYPE_NAMES)}, not {value!r}")


def _check_size(name: str, value: Any) -> None:
    parse_bytes(value, name)


def _check_capture_sizes(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"{name} must be a list of numbers of requests, each 1 or more, not {value!r}")


def _parse_capture_sizes(word: str) -> list[int]:
    return [] if word == "none" else [int(size) for size in word.split(",")]


MODEL = Kind(_check_model)
FOLDER = Kind(_check_folder)
DTYPE = Kind(_check_dtype)
SIZE = Kind(_check_size, metavar="SIZE")  # bytes, or a text such as "4GiB"
GIB = Kind(number(above=0), float, metavar="GIB")
FRACTION = Kind(number(above=0, maximum=1), float, metavar="FRACTION")
CAPTURE_SIZES = Kind(_check_capture_sizes, _parse_capture_sizes, metavar="N,N,…")
PARALLEL = Kind(instance_of(ParallelConfig), parse=None)
