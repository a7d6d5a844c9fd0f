"""What an accelerator can do at most, and what share of it training gets: the numbers behind analytic costs.

Rates are the vendors' own, each with its public source; the shares are ours (see `DeviceRates`).
No torch in here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from arborcast.pipeline.errors import MemoryShortError, ProfileError

GIB = 2**30

RESERVE = 10
"""Percent of what is predicted of a rank's memory that must be free besides: all measured ranks held
no more (`docs/figures.md`, memory of ranks)."""


@dataclass(frozen=True)
class DeviceRates:
    """The rates that the time of an operator follows from.

    `efficiency` and `memory_efficiency` are one number each for all operators, so that times are within a
    factor of two of published training throughput (tests/planning/test_networks.py holds that of BERT): 3 x 3
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
        source: where its rates stand.

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
    source: str = ""

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

    def update_us(self, weight_bytes: float, state_bytes: float) -> float:
        """Time of a parameter's update: weights and state are read and written, gradients read."""
        return self.operator_us(0, 3 * weight_bytes + 2 * state_bytes, "")


def usable(limit: int) -> int:
    """Bytes of a limit of memory that a prediction may fill, so that the reserve has its place, too."""
    return 100 * limit // (100 + RESERVE)


def with_reserve(size: int) -> int:
    """The least limit into which so many predicted bytes fit."""
    return -(-size * (100 + RESERVE) // 100)


@contextmanager
def reserving(limit: int | None) -> Iterator[int | None]:
    """What may be filled of a limit, if there is one; who is short of it inside is told of the limit.

    Raises:
        MemoryShortError: as the block says, with the reserve.
    """
    try:
        yield None if limit is None else usable(limit)
    except MemoryShortError as error:
        words = f"{error} (of {limit}, with {RESERVE} % to spare)"
        raise MemoryShortError(words, with_reserve(error.least_bytes)) from error


def _device(name: str, teraflops: str, memory_gbps: float, gib: int, source: str) -> DeviceRates:
    """A row of the table: `teraflops` of float64, float32, float16 and bfloat16, - for none."""
    types = ("float64", "float32", "float16", "bfloat16")
    flops = {
        dtype: float(rate) * 1e12 for dtype, rate in zip(types, teraflops.split(), strict=True) if rate != "-"
    }
    return DeviceRates(name, flops, memory_gbps, gib * GIB, source=source)


# Dense rates, 16-bit ones of tensor or matrix cores that add up in float32; NVIDIA's float32 without TF32
# (torch's default for products), AMD's by matrix cores. One die of an MI250 or MI250X is one device. TPUs
# multiply float32 in bfloat16 passes by default (XLA), so that both have one rate.
_KNOWN = (
    _device("v100", "7.8 15.7 125 -", 900, 16, "V100 data sheet (SXM2, 16 GB)"),
    _device("p100", "5.3 10.6 21.2 -", 732, 16, "P100 data sheet (SXM2)"),
    _device("1080ti", "0.354 11.34 0.177 -", 484, 11, "GTX 1080 Ti specification: 3584 cores at 1582 MHz"),
    _device("a100", "9.7 19.5 312 312", 1555, 40, "A100 data sheet (SXM, 40 GB)"),
    _device("h100", "34 67 989 989", 3350, 80, "H100 data sheet (SXM)"),
    _device("k80", "1.45 4.37 - -", 240, 12, "Tesla K80 board specification, one of two dies, at boost"),
    _device("m40", "0.21 6.84 - -", 288, 24, "Tesla M40 product brief (24 GB)"),
    _device("titanx", "0.21 6.69 - -", 336.5, 12, "GTX TITAN X specification: 3072 cores at 1089 MHz"),
    _device("p100-pcie", "4.7 9.3 18.7 -", 732, 16, "P100 data sheet (PCIe, 16 GB)"),
    _device("p40", "0.37 11.8 0.18 -", 346, 24, "P40 data sheet"),
    _device("v100-32", "7.8 15.7 125 -", 900, 32, "V100 data sheet (SXM2, 32 GB)"),
    _device("v100-pcie", "7 14 112 -", 900, 16, "V100 data sheet (PCIe, 16 GB)"),
    _device("t4", "0.25 8.1 65 -", 320, 16, "T4 data sheet"),
    _device("rtx2080ti", "0.42 13.4 53.8 -", 616, 11, "Turing white paper"),
    _device("a100-80", "9.7 19.5 312 312", 2039, 80, "A100 data sheet (SXM, 80 GB)"),
    _device("a100-pcie", "9.7 19.5 312 312", 1555, 40, "A100 data sheet (PCIe, 40 GB)"),
    _device("a800", "9.7 19.5 312 312", 2039, 80, "A800 data sheet (SXM, 80 GB)"),
    _device("a800-pcie", "9.7 19.5 312 312", 1935, 80, "A800 data sheet (PCIe, 80 GB)"),
    _device("a30", "5.2 10.3 165 165", 933, 24, "A30 data sheet"),
    _device("a10", "0.98 31.2 125 125", 600, 24, "A10 data sheet"),
    _device("a40", "0.58 37.4 149.7 149.7", 696, 48, "A40 data sheet"),
    _device("a6000", "0.6 38.7 154.8 154.8", 768, 48, "RTX A6000 data sheet, tensor cores without sparsity"),
    _device("rtx3090", "0.56 35.6 71 71", 936, 24, "GA102 white paper"),
    _device("l4", "0.49 30.3 121 121", 300, 24, "L4 data sheet"),
    _device("l20", "0.93 59.8 119.5 119.5", 864, 48, "L20 data sheet"),
    _device("l40s", "1.43 91.6 362 362", 864, 48, "L40S data sheet"),
    _device("rtx4090", "1.29 82.6 165.2 165.2", 1008, 24, "Ada GPU white paper"),
    _device("h100-pcie", "26 51 756 756", 2000, 80, "H100 data sheet (PCIe)"),
    _device("h100-nvl", "30 60 835 835", 3900, 94, "H100 data sheet (NVL)"),
    _device("h200", "34 67 989 989", 4800, 141, "H200 data sheet (SXM)"),
    _device("h200-nvl", "30 60 835 835", 4800, 141, "H200 data sheet (NVL)"),
    _device("h20", "1 44 148 148", 4000, 96, "H20 data sheet (96 GB)"),
    _device("h800", "1 67 989 989", 3350, 80, "H800 data sheet (SXM)"),
    _device("gh200", "34 67 989 989", 4000, 96, "GH200 data sheet (HBM3)"),
    _device("b100", "30 60 1750 1750", 8000, 192, "Blackwell architecture brief: HGX B100"),
    _device("b200", "37 75 2250 2250", 8000, 180, "HGX and DGX B200 data sheets, an eighth"),
    _device("gb200", "40 80 2500 2500", 8000, 186, "GB200 NVL72 data sheet, a 72nd"),
    _device("b300", "1.25 75 2250 2250", 8000, 288, "HGX and DGX B300 data sheets, an eighth"),
    _device("gb300", "1.3 80 2500 2500", 8000, 288, "GB300 NVL72 data sheet, a 72nd"),
    _device("rtx5090", "1.64 104.8 209.5 209.5", 1792, 32, "RTX Blackwell white paper"),
    _device("pro6000", "1.97 126 503.8 503.8", 1792, 96, "RTX PRO Blackwell white paper (workstation)"),
    _device("mi50", "6.6 13.3 26.5 -", 1024, 16, "MI50 data sheet (16 GB)"),
    _device("mi60", "7.4 14.7 29.5 -", 1024, 32, "MI60 data sheet"),
    _device("mi100", "11.5 46.1 184.6 92.3", 1228.8, 32, "MI100 data sheet"),
    _device("mi210", "45.3 45.3 181 181", 1638.4, 64, "MI210 data sheet"),
    _device("mi250", "45.3 45.3 181 181", 1638.4, 64, "MI250 data sheet, half"),
    _device("mi250x", "47.9 47.9 191.5 191.5", 1638.4, 64, "MI250X data sheet, half"),
    _device("mi300a", "122.6 122.6 980.6 980.6", 5300, 128, "MI300A data sheet"),
    _device("mi300x", "163.4 163.4 1307.4 1307.4", 5300, 192, "MI300X data sheet"),
    _device("mi325x", "163.4 163.4 1307.4 1307.4", 6000, 256, "MI325X data sheet"),
    _device("mi350x", "72.1 144.2 2306.9 2306.9", 8000, 288, "MI350X data sheet"),
    _device("mi355x", "78.6 157.3 2516.6 2516.6", 8000, 288, "MI355X data sheet"),
    _device("tpu-v4", "- 275 - 275", 1200, 32, "cloud.google.com/tpu/docs/v4"),
    _device("tpu-v5e", "- 197 - 197", 819, 16, "cloud.google.com/tpu/docs/v5e"),
    _device("tpu-v5p", "- 459 - 459", 2765, 95, "cloud.google.com/tpu/docs/v5p"),
    _device("tpu-v6e", "- 918 - 918", 1638, 32, "cloud.google.com/tpu/docs/v6e"),
    _device("trn2", "- 181 667 667", 2900, 96, "AWS Neuron documentation: Trainium2, one chip"),
    _device("gaudi3", "- - - 1835", 3670, 128, "Gaudi 3 white paper; no rate of float32 products is public"),
)

DEVICES: Mapping[str, DeviceRates] = MappingProxyType({device.name: device for device in _KNOWN})
"""By name; GPUs by the names of `topologies.GPUS`."""

V100, P100, GTX_1080_TI, A100, H100 = _KNOWN[:5]


def device_or_none(name: str) -> DeviceRates | None:
    """The device of a name, in any case, with or without hyphens ("V100", "1080-Ti"); None for no device."""
    key = _plain(name)
    return next((device for device in _KNOWN if _plain(device.name) == key), None)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def device_named(name: str) -> DeviceRates:
    """The same; what is no device is an error.

    Raises:
        ProfileError: there is none.
    """
    device = device_or_none(name)
    if device is None:
        raise ProfileError(f"device {name}: must be one of {', '.join(DEVICES)}")
    return device
