"""Peak rates of devices from their makers' data sheets: dense products, memory, links. Nothing here is measured.

Rates of links are payload of one device in one direction: half of a data sheet's sum over both directions.
`roofline.py` has the part of each figure that is reached in practice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One device, as a rank uses it.

    Attributes:
        memory: bytes of memory.
        flops: operations of dense 16-bit matrix products per second.
        narrow_flops: the same with 8-bit inputs.
        narrow: weight formats of the 8-bit products: "fp8", "int8".
        bandwidth: bytes of memory per second.
        node_size: number of devices that the fast links join.
        inside, between: link bytes per second and direction, within a node and between nodes.
        source: source of the figures.
    """

    name: str
    memory: float
    flops: float
    narrow_flops: float
    narrow: tuple[str, ...]
    bandwidth: float
    node_size: int
    inside: float
    between: float
    source: str


def _device(
    name: str, gb: float, tflops: float, narrow: float, formats: tuple[str, ...], tb_s: float, size: int, inside: float,
    between: float, source: str,
) -> Device:  # fmt: skip
    rates = (gb * 1e9, tflops * 1e12, narrow * 1e12, formats, tb_s * 1e12, size, inside * 1e9, between * 1e9)
    return Device(name, *rates, source)


_BOTH = ("fp8", "int8")

# Between nodes one adapter for each device: 200 Gb/s with A100 and Ascend, 400 Gb/s with the others.
DEVICES = {
    device.name: device
    for device in (
        _device("A100", 80, 312, 624, ("int8",), 2.039, 8, 300, 25, "NVIDIA A100 80GB SXM data sheet"),
        _device("H100", 80, 989, 1979, _BOTH, 3.35, 8, 450, 50, "NVIDIA H100 SXM data sheet"),
        _device("H800", 80, 989, 1979, _BOTH, 3.35, 8, 200, 50, "as H100; NVLink: DeepSeek-V3 at ISCA 2025, section 4"),
        _device("H20", 96, 148, 296, _BOTH, 4.0, 8, 450, 50, "figures of NVIDIA's H20 as vendors of servers list them"),
        _device("H200", 141, 989, 1979, _BOTH, 4.8, 8, 450, 50, "NVIDIA H200 SXM data sheet"),
        _device("B200", 180, 2250, 4500, _BOTH, 8.0, 8, 900, 50, "NVIDIA DGX B200 data sheet, an eighth of it"),
        _device(
            "910B", 64, 376, 752, ("int8",), 1.6, 8, 196, 25,
            "as a die of 910C; links: HCCS of an 8-card Atlas 800I A2 and 200 Gb/s RoCE, as its vendors list them",
        ),
        _device(
            "910C-die", 64, 376, 752, ("int8",), 1.6, 768, 196, 25,
            "Serving LLMs on Huawei CloudMatrix384 (2025), section 3: one of the two dies of a card",
        ),
    )
}  # fmt: skip


def device_named(name: str) -> Device:
    """The device of that name; ``ValueError`` if the table does not have it."""
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ValueError(f"--device {name!r} is not known; known are {', '.join(DEVICES)}")
