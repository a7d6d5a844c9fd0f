"""Link rates: data sheets' or NCCL's, PCIe, the way between sockets, latencies. GPUs stand in `gpus`."""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten


class Rates(StrEnum):
    """Which figures a topology is made of."""

    DATASHEET = "datasheet"
    NCCL = "nccl"

    @classmethod
    def of(cls, name: str) -> Rates:
        """The rates of this name.

        Raises:
            TopologyError: there are none.
        """
        if name not in [known.value for known in cls]:
            raise TopologyError(f"rates {shorten(name)}: must be datasheet or nccl")
        return cls(name)


NVLINK_LATENCY_US = Fraction(7, 10)
"""One NVLink hop: the 0.7 us that TACCL (NSDI 2023) measured on NDv2 and DGX-2."""

NVSWITCH_HOP_US = NVLINK_LATENCY_US / 2
"""From a GPU to an NVSwitch, or on to the next GPU: together one NVLink hop (TACCL, DGX-2)."""

FABRIC_HOP_US = Fraction(17, 20)
"""From a GPU to the fabric, or on to the next: together the 1.7 us that TACCL measured for InfiniBand."""


def pcie_rate(gigatransfers: Fraction, lanes: int, rates: Rates) -> Fraction:
    """One-way GB/s of a PCIe link.

    By the standard: one bit per transfer and lane, less the line code (8b/10b to generation 2, 128b/130b
    from 3 on; generation 6 has none). In NCCL's model three quarters of the bits: 12 GB/s for generation 3
    with 16 lanes.
    """
    if rates is Rates.NCCL:
        return gigatransfers * lanes / 8 * Fraction(3, 4)
    code = (
        Fraction(8, 10) if gigatransfers <= 5 else Fraction(128, 130) if gigatransfers < 64 else Fraction(1)
    )
    return gigatransfers * lanes / 8 * code


BETWEEN_SOCKETS = Fraction(10)
"""GB/s each way between the sockets of a host for traffic of its GPUs: NCCL's figure for Intel Skylake.

Data sheets give the raw link only (UPI: 20.8 GB/s), far above what peer traffic through it reaches, so this
figure stands in both sets of rates.
"""


NO_SOCKETS = "PCIe paths are no links here, so that --between-sockets changes nothing; --pcie takes them"
"""The note on a rate between sockets that was stated in vain."""


def crossing_sockets(architecture: str, vendor: str, family: int, model: int) -> Fraction:
    """GB/s each way between two CPUs of one model, as NCCL plans (`ncclTopoGetInterCpuBw`, topo.h 2.30).

    Args:
        architecture: x86_64, arm64 or ppc64.
        vendor: as CPUID says it.
        family: of x86.
        model: of x86; Intel's count up from Skylake (0x55) over Sapphire Rapids (0x8F) to Emerald (0xCF).
    """
    if architecture in {"arm64", "ppc64"}:
        return Fraction(6 if architecture == "arm64" else 32)
    if vendor == "AuthenticAMD":
        return Fraction(16)
    if vendor == "GenuineIntel":
        newest = ((0xCF, 40), (0x8F, 22), (0x55, 10))
        return Fraction(next((rate for least, rate in newest if family == 6 and model >= least), 6))
    if vendor.strip() in {"CentaurHauls", "Shanghai"}:
        return Fraction(9 if (family, model) == (7, 0x5B) else 6)
    return BETWEEN_SOCKETS


PCIE_HOP_US = Fraction(1)
"""One PCIe link: assumed; public figures for a whole path between two GPUs are 2 to 10 us."""
