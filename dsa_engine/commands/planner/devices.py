"""Peak rates of devices from their makers' data sheets: dense products, memory, links. Nothing here is measured.

Rates of links are payload of one device in one direction: half of a data sheet's sum over both directions.
`predict.py` has the part of each figure that is reached in practice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One device, as a rank uses it."""

    name: str
    memory_gb: float  # 10^9 bytes
    tflops: float  # 10^12 operations of dense matrix products per second, with 16-bit inputs
    narrow_tflops: float  # with 8-bit inputs
    narrow: tuple[str, ...]  # weight formats of the 8-bit products: "fp8", "int8"
    tb_s: float  # 10^12 bytes of memory per second
    node_size: int  # devices that the fast links join
    inside_gb_s: float  # 10^9 bytes of a link per second and direction, within a node
    between_gb_s: float  # between nodes
    source: str


_BOTH = ("fp8", "int8")

# Between nodes one adapter for each device: 200 Gb/s with A100 and Ascend, 400 Gb/s with the others.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", 80, 312, 624, ("int8",), 2.039, 8, 300, 25, "NVIDIA A100 80GB SXM data sheet"),
        Device("H100", 80, 989, 1979, _BOTH, 3.35, 8, 450, 50, "NVIDIA H100 SXM data sheet"),
        Device("H800", 80, 989, 1979, _BOTH, 3.35, 8, 200, 50, "as H100; NVLink: DeepSeek-V3 at ISCA 2025, section 4"),
        Device("H20", 96, 148, 296, _BOTH, 4.0, 8, 450, 50, "figures of NVIDIA's H20 as vendors of servers list them"),
        Device("H200", 141, 989, 1979, _BOTH, 4.8, 8, 450, 50, "NVIDIA H200 SXM data sheet"),
        Device("B200", 180, 2250, 4500, _BOTH, 8.0, 8, 900, 50, "NVIDIA DGX B200 data sheet, an eighth of it"),
        Device(
            "910B", 64, 376, 752, ("int8",), 1.6, 8, 196, 25,
            "as a die of 910C; links: HCCS of an 8-card Atlas 800I A2 and 200 Gb/s RoCE, as its vendors list them",
        ),
        Device(
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
