"""RoPE against multiplication by complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from caches import need_memory, turned
from dsa_engine.kernels.rows.rope import apply_rope

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]


def angles(tokens: int, half: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + tokens).double()[:, None] * 100.0 ** -(torch.arange(half) / half).double()


def cos_sin(angle: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return angle.cos().float().to(device), angle.sin().float().to(device)


def make(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 2), (9, 8), (9, 3, 8), (5, 2, 3, 6), (0, 4, 8), (130, 1, 24), (7, 0, 4)),
        (3, 128, 64),  # DeepSeek-V3.2's heads
        (1, 64, 64),  # GLM-5's, one token
    ],
)
def test_turns_pairs(shape: tuple[int, ...], interleaved: bool, device: str) -> None:
    x = make(shape)
    angle = angles(shape[0], shape[-1] // 2, start=3)
    y = apply_rope(x.to(device), *cos_sin(angle, device), interleaved=interleaved)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y.double().cpu(), turned(x, angle, interleaved), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_every_dtype_is_rounded_once(
    interleaved: bool, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    x, angle = make((11, 5, 16)).to(dtype), angles(11, 8, start=500)
    y = apply_rope(x.to(device), *cos_sin(angle, device), interleaved=interleaved)
    wanted = turned(x, angle, interleaved)
    assert y.dtype == dtype
    assert relative_error(y, wanted) < bound
    step = torch.finfo(dtype).eps  # half a step of each result, and a float32 error
    assert ((y.double().cpu() - wanted).abs() <= wanted.abs() * step * 0.51 + 2e-5).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_from_one_view_to_another(interleaved: bool, device: str) -> None:
    """The queries' rotated part goes from the output of q_b to the absorbed queries, without a copy in between."""
    q, angle = make((6, 5, 20 + 12)).to(device), angles(6, 6)
    absorbed = torch.full((6, 5, 40 + 12), -7.0, device=device)
    given = apply_rope(q[..., 20:], *cos_sin(angle, device), interleaved=interleaved, out=absorbed[..., 40:])
    assert given.data_ptr() == absorbed[..., 40:].data_ptr()
    wanted = turned(q[..., 20:], angle, interleaved)
    torch.testing.assert_close(absorbed[..., 40:].double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert bool((absorbed[..., :40] == -7).all())


def test_dimensions_that_make_no_view_of_heads(device: str) -> None:
    x, angle = make((4, 3, 2, 8)).to(device).transpose(1, 2), angles(4, 4)
    y = apply_rope(x, *cos_sin(angle, device), interleaved=True)
    torch.testing.assert_close(y.double().cpu(), turned(x, angle, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_written_over_the_input(interleaved: bool, device: str) -> None:
    """The first dimensions of the index queries are rotated in the tensor itself."""
    q, angle = make((6, 12, 24)).to(device), angles(6, 4)
    before = q.clone()
    apply_rope(q[..., :8], *cos_sin(angle, device), interleaved=interleaved, out=q[..., :8])
    torch.testing.assert_close(
        q[..., :8].double().cpu(), turned(before[..., :8], angle, interleaved), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(q[..., 8:], before[..., 8:])


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """Two tokens whose rows lie 2^31 elements apart in a buffer of which no more is touched."""
    far = 2**31 + 64
    need_memory(device, 5 * far)
    huge = torch.empty(far + 64, dtype=torch.float16, device=device)
    x = huge.as_strided((2, 3, 8), (far, 8, 1))
    rows = make((2, 3, 8)).half()
    x.copy_(rows)
    angle = angles(2, 4, start=5)
    apply_rope(x, *cos_sin(angle, device), interleaved=True, out=x)
    torch.testing.assert_close(x.double().cpu(), turned(rows, angle, True), rtol=2e-3, atol=2e-3)
