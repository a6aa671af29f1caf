"""What the host does for a prefill of 131,072 tokens on rank 0 of 64, in two micro-batches, by node: functions of
Python and operations of the device, counted on a fake device. `pytest -s` prints the table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.steps import batch
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.kernel import as_one
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.kernels.runtime.pieces import Pieces
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.model import attention, indexer
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="a fake device is another one")

SUPPORT = Path(__file__).parents[2] / "support"
# Of the commit before pieces, with the same count.
BEFORE = {"functions before": 1456, "operations before": 29, "functions": 769, "operations": 67}
LIMITS = {"functions before": 728, "operations before": 14, "functions": 187, "operations": 41}
if sys.version_info < (3, 11):  # without operator.call
    LIMITS["functions"] += 25


class Functions:
    """Python functions called by the engine and what it calls, without those of the fake device."""

    def __init__(self) -> None:
        self.count = 0
        self._stack: list[bool] = []
        self._faked = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            fake = bool(self._faked) or file.startswith(str(SUPPORT)) or any(
                part in file for part in ("/unittest/", "/torch/_subclasses/", "/torch/overrides.py", "/weakref.py",
                                          "_python_dispatch.py", "/torch/utils/_pytree.py")
            )  # fmt: skip
            self._stack.append(fake)
            self._faked += fake
            self.count += not fake
        elif event == "return" and self._stack:
            self._faked -= self._stack.pop()


@contextmanager
def counted(functions: Functions) -> Iterator[None]:
    sys.setprofile(functions)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.fixture
def make(fake_engine: Callable[..., Any]) -> Callable[[FakeDevice], Engine]:
    def engine(device: FakeDevice) -> Engine:
        layers = {"num_hidden_layers": 6, "first_k_dense_replace": 1}
        ranks = {"node_size": 8, "moe_dispatch": "by_node"}
        how = {"enable_dbo": True, "hf_overrides": layers, "kv_cache_dtype": "fp8"}
        made: Engine = fake_engine(device, "deepseek_v32", 64, ranks, **how)
        return made

    return engine


Launched = list[tuple[Any, ...]]


def prefill(device: FakeDevice, engine: Engine, token: int, functions: Functions) -> tuple[list[int], Launched, int]:
    """A prefill of a prompt of one token: functions called before each launch, the launches, and added bytes."""
    before: list[int] = []
    launched: Launched = []
    names = {id(tensor): name for name, tensor in engine.model.named_parameters()}
    names |= {id(pool): f"pool {number}" for number, pool in enumerate(engine.cache.latent)}
    launch, run_kernel = device.launch, device._run_kernel

    def shown(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return names.get(id(x)), x.shape, x.stride(), x.storage_offset(), x.dtype

    def kernel(one: Any, grid: Any, *args: Any, **constants: Any) -> None:
        launched.append((one.__name__, tuple(grid), *map(shown, args), *map(shown, constants.values())))
        run_kernel(one, grid, *args, **constants)

    def watched(one: Any, uses: Any = ()) -> None:
        before.append(functions.count)
        launched.append((one.kind, one.name, device.stream))
        launch(one, uses)

    request = engine.add([token] * 131_072, SamplingParams(temperature=0.0, max_tokens=1))
    live = device.live
    with pytest.MonkeyPatch.context() as patch, device.watched(), counted(functions):
        patch.setattr(device, "launch", watched)
        patch.setattr(device, "_run_kernel", kernel)
        step = engine.scheduler.schedule()
        engine.runner.launch(engine.runner.plan(step))
    engine.scheduler.launched(step)
    engine.finish(request, "abort")
    return before, launched, device.peak - live


def check_costs(before: list[int], launched: Launched) -> None:
    """What a prefill costs the host."""
    operations = [at for at, one in enumerate(one for one in launched if isinstance(one[-1], int) and len(one) == 3)]
    kinds = [one for one in launched if len(one) == 3 and one[0] in ("triton", "torch", "collective", "copy", "graph")]
    assert len(operations) == len(kinds) == len(before)
    first = next(at for at, one in enumerate(kinds) if one[0] == "triton")
    gates = [at for at, one in enumerate(kinds) if one[1] == "route_kernel"]
    assert len(gates) == 2 * 5, "layers with experts, micro-batches"
    begin, end = gates[-4], gates[-2]  # of the first micro-batch, in the last layers
    counts = {
        "functions before": before[first],
        "operations before": first,
        "functions": (before[end] - before[begin]) / 2,
        "operations": (end - begin) / 2,
    }
    for name, count in counts.items():
        print(f"{name:20} {BEFORE[name]:6} -> {count:6g}  ({count / BEFORE[name]:.0%})")
    assert all(count <= LIMITS[name] for name, count in counts.items()), counts


def test_layers_launch_the_same_with_and_without_records(
    make: Callable[[FakeDevice], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels with the same grids, on the same streams, of the weights of each layer, in the same order; and
    no more memory. With records the host calls few functions."""
    runs, before, made = [], list[int](), list[Pieces]()

    class Kept(Pieces):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(batch, "Pieces", Kept)
    for repeats in (False, True):
        monkeypatch.setattr(batch, "WATCHES", repeats)
        with FakeDevice() as device:
            engine = make(device)
            prefill(device, engine, 5, Functions())  # what is made once
            before, *run = prefill(device, engine, 6, Functions())
            runs.append(run)
            assert bool(made) == repeats
    check_costs(before, runs[1][0])
    (eager, added), (repeated, added_again) = runs
    assert len(eager) == len(repeated)
    for number, (one, other) in enumerate(zip(eager, repeated, strict=True)):
        assert one == other, f"launch {number}"
    first, *later = made  # layers find what they lead to
    assert first.replays == 0 and min(one.replays for one in later) >= 2
    assert all(record is not None for one in made for record in one._records.values())
    assert added_again <= 1.01 * added


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """One call of a record, for a reference whose operations would refuse it."""

    def call(*args: Any, **named: Any) -> Any:
        def run(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            return function(*(next(given) if isinstance(x, torch.Tensor) else x for x in args), **named)

        return as_one(run, *(x for x in args if isinstance(x, torch.Tensor)))

    return call


@pytest.mark.parametrize("dispatch", [None, "all_to_all"])
def test_the_same_tokens_with_records(dispatch: Any, demo_cache: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, by the references: PyTorch's operations, with numbers. Chunks of a prompt, prompts of several sizes and
    eager decode steps, in two micro-batches where there is a dispatch."""
    monkeypatch.setenv("DSA_ENGINE_DBO_ROWS", "2,16")
    monkeypatch.setattr(launch, "_references_always", False)  # as it was, after engines that set it for the process
    for module, name in (
        (attention, "store_latent"), (attention, "store_cache_rows"), (indexer, "store_index_keys"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, whole(getattr(module, name)))
    build, made = batch._whole, list[Pieces]()

    def recorded(*given: Any) -> Any:
        one = build(*given)
        one.pieces = Pieces()
        made.append(one.pieces)
        return one

    prompts = [[(number * at) % 190 + 3 for at in range(number)] for number in (5, 70, 300)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"kernels": "reference", "load_format": "dummy", "max_num_batched_tokens": 64}
    if dispatch is not None:
        ranks = EmulatedConfig(emulate_world=2, moe_dispatch=dispatch, decode_dispatch=dispatch)
        options |= {"parallel": ranks, "enable_dbo": True}
    answers = []
    for make in (build, recorded):
        monkeypatch.setattr(batch, "_whole", make)
        with LLM(
            "demo-random", device="cpu", dtype="float32", progress=False, max_model_len=512,
            hf_overrides={"num_hidden_layers": 6}, **options,
        ) as llm:  # fmt: skip
            answers.append([(out.token_ids, repr(out.logprobs)) for out in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert sum(one.replays for one in made) >= len(made)
