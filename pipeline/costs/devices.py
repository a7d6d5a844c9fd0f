"""What an accelerator can do at most, and what share of it training gets: the numbers behind analytic costs.

Rates are the vendors' own, from their data sheets; the shares are ours (see `Device`). No torch in here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from arborcast.pipeline.errors import ProfileError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """The rates that the time of an operator follows from.

    `efficiency` and `memory_efficiency` are one number each for all operators, so that times are within a
    factor of two of published training throughput (tests/test_networks.py holds those figures): 3 x 3
    convolutions come out too slow (libraries have algorithms with fewer operations), products of matrices
    too fast. Balance within a network of one kind of layer is better than that.

    Attributes:
        name: what profiles call it.
        flops: peak floating-point operations per second by the name of the type ("float32"), where a
            multiplication with an addition is two.
        memory_gbps: peak GB/s of its memory, reads and writes together.
        memory_bytes: that it has.
        efficiency: the share of `flops` that dense operators reach.
        memory_efficiency: the share of `memory_gbps` that all others reach.
        launch_us: what every operator costs beyond its work.

    Raises:
        ProfileError: a value is out of range.
    """

    name: str
    flops: Mapping[str, float]
    memory_gbps: float
    memory_bytes: int
    efficiency: float = 0.75
    memory_efficiency: float = 0.8
    launch_us: float = 5.0

    def __post_init__(self) -> None:
        """Check every rule of the docstrings."""
        rates = {f"flops of {dtype}": rate for dtype, rate in self.flops.items()}
        for what, value in (*rates.items(), ("memory_gbps", self.memory_gbps)):
            if not (math.isfinite(value) and value > 0):
                raise ProfileError(f"device {self.name}: {what} must be finite and positive, got {value}")
        for what, share in (("efficiency", self.efficiency), ("memory_efficiency", self.memory_efficiency)):
            if not 0 < share <= 1:
                raise ProfileError(f"device {self.name}: {what} must be in (0, 1], got {share}")
        if not (math.isfinite(self.launch_us) and self.launch_us >= 0):
            raise ProfileError(
                f"device {self.name}: launch_us must be finite and not negative, got {self.launch_us}"
            )
        if self.memory_bytes < 1:
            raise ProfileError(
                f"device {self.name}: memory_bytes must be at least 1, got {self.memory_bytes}"
            )
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def operator_us(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Time of one operator: its launch, and the longer of its arithmetic and memory traffic (a roofline).

        Args:
            flops: of the operator.
            moved_bytes: that it reads and writes.
            dtype: of its arithmetic; asked for only where `flops` is not 0.

        Raises:
            ProfileError: no rate is known for the type.
        """
        memory_us = moved_bytes / (self.memory_gbps * self.memory_efficiency * 1e3)
        if not flops:
            return memory_us + self.launch_us
        if dtype not in self.flops:
            raise ProfileError(f"device {self.name}: has rates for {', '.join(self.flops)}, got {dtype}")
        return max(flops / (self.flops[dtype] * self.efficiency) * 1e6, memory_us) + self.launch_us


V100 = Device(
    "v100", {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}, memory_gbps=900, memory_bytes=16 * GIB
)
"""NVIDIA Tesla V100 SXM2, 16 GB: NVIDIA's V100 data sheet (2017), float16 with tensor cores."""

P100 = Device(
    "p100",
    {"float64": 5.3e12, "float32": 10.6e12, "float16": 21.2e12},
    memory_gbps=732,
    memory_bytes=16 * GIB,
)
"""NVIDIA Tesla P100 SXM2, 16 GB: NVIDIA's P100 data sheet (2016)."""

GTX_1080_TI = Device(
    "1080ti",
    {"float64": 0.354e12, "float32": 11.34e12, "float16": 0.177e12},
    memory_gbps=484,
    memory_bytes=11 * GIB,
)
"""NVIDIA GeForce GTX 1080 Ti: 3584 cores at the boost clock of 1582 MHz, two operations each (NVIDIA's
product page); float64 at 1/32 and float16 at 1/64 of that rate, as in all consumer Pascal chips."""

A100 = Device(
    "a100",
    {"float64": 9.7e12, "float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12},
    memory_gbps=1555,
    memory_bytes=40 * GIB,
)
"""NVIDIA A100 SXM4, 40 GB: NVIDIA's A100 data sheet (2020), dense. float32 without TF32 (torch's default for
matrix products): `dataclasses.replace(A100, flops={**A100.flops, "float32": 156e12})` for TF32."""

H100 = Device(
    "h100",
    {"float64": 34e12, "float32": 67e12, "float16": 989e12, "bfloat16": 989e12},
    memory_gbps=3350,
    memory_bytes=80 * GIB,
)
"""NVIDIA H100 SXM5, 80 GB: NVIDIA's H100 data sheet (2023), dense; float32 without TF32 (494 TFLOPS)."""

DEVICES: Mapping[str, Device] = MappingProxyType(
    {it.name: it for it in (V100, P100, GTX_1080_TI, A100, H100)}
)
"""By name."""


def device_named(name: str) -> Device:
    """The device of a name, in any case, with or without hyphens ("V100", "1080-Ti").

    Raises:
        ProfileError: there is none.
    """
    key = "".join(letter for letter in name.lower() if letter.isalnum())
    if key not in DEVICES:
        raise ProfileError(f"device {name}: must be one of {', '.join(DEVICES)}")
    return DEVICES[key]
