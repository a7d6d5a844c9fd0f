"""Link rates: data sheets' or NCCL's, PCIe, latencies. GPUs stand in `gpus`, sockets in `processors`."""

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

NOT_NVLINK = "of NVLink, for want of a published one"
"""Why that latency is assumed of other links: xGMI, ICI, NeuronLink, Ethernet between accelerators."""

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


PCIE_HOP_US = Fraction(7, 50)
"""One PCIe link, so that no way is slower than peer writes are: 0.36 us within a socket (two links), 0.44
across (three), as measured on RTX PRO 6000 (local-inference-lab/rtx6kpro, hardware/pcie-bandwidth.md)."""

PCIE_HOP = "0.14 us for a PCIe link"
"""Why that latency is assumed."""


def not_infiniband(network: str) -> str:
    """Why the latency of a fabric is assumed: TACCL's is that of InfiniBand. Empty for that itself."""
    return "" if network == INFINIBAND else f"of InfiniBand, for {network}"


INFINIBAND = "InfiniBand"
