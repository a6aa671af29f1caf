"""RoPE against multiplication by complex numbers."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.rope import apply_rope


def angles(tokens: int, half: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + tokens).double()[:, None] * 100.0 ** -(torch.arange(half) / half).double()


def naive(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = angle.shape[-1]
    turn = torch.polar(torch.ones_like(angle), angle)
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * turn[:, i].view(-1, *(1,) * (x.dim() - 2))
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(1, 2), (9, 8), (9, 3, 8), (5, 2, 3, 6), (0, 4, 8)])
def test_turns_pairs(shape: tuple[int, ...], interleaved: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    angle = angles(shape[0], shape[-1] // 2, start=3)
    y = apply_rope(x, angle.cos().float(), angle.sin().float(), interleaved=interleaved)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y.double(), naive(x, angle, interleaved), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_the_distance_only(interleaved: bool) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 16, generator=g).double(), torch.randn(1, 16, generator=g).double()

    def product(at_q: int, at_k: int) -> float:
        rotated = [
            apply_rope(x, angles(1, 8, at).cos(), angles(1, 8, at).sin(), interleaved=interleaved)
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert product(10, 3) == pytest.approx(product(1010, 1003), rel=1e-9)
    assert product(10, 3) != pytest.approx(product(10, 4), rel=1e-3)


def test_the_two_layouts_are_different_models() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = angles(4, 4).cos().float(), angles(4, 4).sin().float()
    assert not torch.allclose(apply_rope(x, cos, sin, interleaved=True), apply_rope(x, cos, sin, interleaved=False))


def test_bfloat16() -> None:
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angle = angles(6, 4)
    y = apply_rope(x, angle.cos().float(), angle.sin().float(), interleaved=True)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), naive(x, angle, True), rtol=0, atol=0.05)


def test_bad_arguments() -> None:
    cos = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"x \(3, 6\) does not fit cos \(3, 4\)"):
        apply_rope(torch.ones(3, 6), cos, cos, interleaved=True)
    with pytest.raises(ValueError, match="does not fit"):
        apply_rope(torch.ones(2, 8), cos, cos, interleaved=False)
