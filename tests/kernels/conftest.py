"""The same tests prove an operation three ways: the reference on a CPU (plain ``pytest``), the kernel's arithmetic in
Triton's interpreter (``TRITON_INTERPRET=1 pytest tests/kernels``), and the kernel on a GPU where there is one. Those of
operations with a C++ kernel (:func:`on_a_cpu`) run twice on a CPU: with it, and with the reference.

Each test computes the expected values in float64 and in the plainest way, never with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dsa_engine.kernels.runtime import cpu, launch
from dsa_engine.kernels.runtime.launch import INTERPRETED

# ‖got − wanted‖ / ‖wanted‖ that the rounding of inputs and results of each type allows.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture(params=["kernel", "reference"])
def on_a_cpu(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """For ``pytest.mark.usefixtures``: CPU tensors take the C++ kernel, then the reference."""
    if request.param == "kernel":
        if device == "cpu" and not INTERPRETED and cpu.library() is None:
            pytest.skip("no C++ compiler, or DSA_ENGINE_NATIVE=0")
        assert device != "cpu" or INTERPRETED or cpu.serves(torch.empty(0)), "a test before has left references on"
        yield
        return
    if device != "cpu" or INTERPRETED:
        pytest.skip("the reference is tested on a CPU")
    with launch.references():
        yield


@pytest.fixture(params=list(BOUNDS), ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def bound(dtype: torch.dtype) -> float:
    """Largest relative error of a result in ``dtype``."""
    return BOUNDS[dtype]


@pytest.fixture
def fp8_sum_bound(device: str) -> float:
    """Largest relative error of a sum of FP8 products: Hopper's tensor cores add them with some 13 bits."""
    return 3e-4 if device == "cuda" else 0.0


@pytest.fixture
def fp8_mlp_bound(device: str) -> float:
    """The same of two products with codes between them: a sum beside the middle of two codes takes the other one, of
    which a step is up to 1/8."""
    return 1e-2 if device == "cuda" else 1e-3


def measure_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖ in float64; infinite where one holds NaN and the other does not."""
    assert got.shape == wanted.shape
    difference = (got.double() - wanted.double().to(got.device)).norm()
    error = float(difference / wanted.double().norm().clamp(min=1e-30))
    print(f"relative error {error:.1e}")
    return error if error == error else float("inf")


@pytest.fixture(scope="session")
def relative_error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """See :func:`measure_error`."""
    return measure_error
