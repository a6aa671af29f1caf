"""The file of expert loads: JSON, one list of loads for each layer with routed experts.

    {"version": 1, "model": "…", "layers": [3, 4, …], "loads": [[120.0, 80.0, …], …]}

Loads are token-expert pairs, or anything in proportion to them. Keys that are not named here are left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_engine.config.checks import is_integer, is_number, shown

VERSION = 1


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of all logical experts of some layers.

    Attributes:
        model: name of the model that they were counted with.
        layers: numbers of the layers, ascending.
        loads: ``[layers, experts]``, at least 0. A layer without any load counts as one with equal loads.

    Raises:
        ValueError: sizes that differ, or numbers that cannot be; the text says which.
    """

    model: str
    layers: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for fault in _faults(self.model, self.layers, self.loads):
            raise ValueError(fault)

    @property
    def experts(self) -> int:
        return len(self.loads[0])

    def of_layer(self, layer: int) -> tuple[float, ...] | None:
        """The loads of a layer; None if the file does not have it, or all are 0: equal loads."""
        if layer not in self.layers:
            return None
        loads = self.loads[self.layers.index(layer)]
        return loads if any(loads) else None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ExpertLoads:
        """Reads a file.

        Raises:
            ValueError: the file is missing or is no such file; the text names it.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"expert_loads: cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"expert_loads: {path} is not valid JSON ({error})") from error
        keys = ("version", "model", "layers", "loads")
        if not isinstance(value, dict) or any(key not in value for key in keys):
            raise ValueError(f"expert_loads: {path} must hold a JSON object with {', '.join(keys)}, not {shown(value)}")
        if value["version"] != VERSION or isinstance(value["version"], bool):
            raise ValueError(
                f"expert_loads: {path} has version {shown(value['version'])}, this program reads {VERSION}; count the "
                "loads again"
            )
        for fault in _faults(value["model"], value["layers"], value["loads"]):
            raise ValueError(f"expert_loads: {path}: {fault}")
        return cls(value["model"], tuple(value["layers"]), tuple(tuple(map(float, layer)) for layer in value["loads"]))

    def text(self) -> str:
        """The content of a file."""
        value = {"version": VERSION, "model": self.model, "layers": self.layers, "loads": self.loads}
        return json.dumps(value) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a file, whole or not at all."""
        temporary = Path(f"{os.fspath(path)}.{os.getpid()}")
        try:
            temporary.write_text(self.text(), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _faults(model: Any, layers: Any, loads: Any) -> Iterator[str]:
    """Whatever is wrong, most fundamental first."""
    if not isinstance(model, str):
        yield f"model must be a name, not {shown(model)}"
    if not _is_list(layers) or not layers or not all(is_integer(layer) and layer >= 0 for layer in layers):
        yield f"layers must be a list of numbers of layers, from 0, not {shown(layers)}"
    elif list(layers) != sorted(set(layers)):
        yield f"layers must be ascending, each there once, not {shown(layers)}"
    if not _is_list(loads) or not all(_is_list(layer) and layer for layer in loads):
        yield f"loads must be a list of the loads of each layer, not {shown(loads)}"
        return
    if len(loads) != len(layers):
        yield f"there are {len(layers)} layers and loads of {len(loads)}; give one list of loads for each layer"
    for layer, own in zip(layers, loads, strict=False):
        if len(own) != len(loads[0]):
            yield f"layer {layers[0]} has loads of {len(loads[0])} experts, layer {layer} of {len(own)}"
        for expert, load in enumerate(own):
            if not is_number(load) or load < 0:
                yield f"the load of expert {expert} in layer {layer} must be a number of at least 0, not {shown(load)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
