"""The file of expert loads: JSON, one list of loads for each layer with routed experts.

    {"version": 1, "model": "…", "layers": [3, 4, …], "loads": [[120.0, 80.0, …], …]}

Loads are token-expert pairs, or anything in proportion to them. Keys that are not named here are left alone.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from dsa_engine.config.checks import is_number

VERSION = 1


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of all logical experts of some layers.

    Attributes:
        model: name of the model that they were counted with.
        layers: numbers of the layers, ascending.
        loads: ``[layers, experts]``, at least 0. A layer without any load counts as one with equal loads.

    Raises:
        ValueError: sizes that differ, or numbers that cannot be.
    """

    model: str
    layers: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be ascending numbers from 0, not {list(self.layers)!r:.80}")
        if len(self.loads) != len(self.layers) or len({len(loads) for loads in self.loads}) != 1:
            sizes = [len(loads) for loads in self.loads]
            raise ValueError(f"loads must be as many numbers for each of {len(self.layers)} layers, not {sizes!r:.80}")
        for layer, loads in zip(self.layers, self.loads, strict=True):
            for expert, load in enumerate(loads):
                if not is_number(load) or load < 0:
                    raise ValueError(f"load of expert {expert} in layer {layer} must be at least 0, not {load!r:.80}")

    @property
    def experts(self) -> int:
        return len(self.loads[0])

    def of_layer(self, layer: int) -> tuple[float, ...] | None:
        """The loads of a layer; None if the file does not have it, or all are 0: equal loads."""
        loads = self.loads[self.layers.index(layer)] if layer in self.layers else ()
        return loads if any(loads) else None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ExpertLoads:
        """Reads a file.

        Raises:
            ValueError: the file is missing or is no such file; the text names it.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            if value["version"] != VERSION:
                raise ValueError(f"version {value['version']!r:.80} is not {VERSION}; count the loads again")
            return cls(str(value["model"]), tuple(value["layers"]), tuple(map(tuple, value["loads"])))
        except OSError as error:
            raise ValueError(f"expert_loads: cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            wanted = "it must hold a JSON object with version, model, layers, loads"
            raise ValueError(f"expert_loads: cannot read {path}: {error!r}; {wanted}") from error

    def text(self) -> str:
        """The content of a file."""
        value = {"version": VERSION, "model": self.model, "layers": self.layers, "loads": self.loads}
        return json.dumps(value) + "\n"
