"""Link rates of hardware: what the data sheets say, and what NCCL plans with.

Rates are one-way GB/s per NVLink or per PCIe slot. Data sheets give NVLink as the sum of both directions
over all links of a GPU (A100: 600 GB/s over 12 links, so 25 GB/s a link each way).
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU generation.

    Attributes:
        name: as `--gpu` takes it.
        nvlinks: how many NVLinks one GPU has.
        nvlink: one-way GB/s per NVLink by the data sheet.
        nvlink_nccl: the same in NCCL's planning model (topo.h, 2.30), by compute capability.
        pcie_generation: of its slot, 16 lanes wide.
    """

    name: str
    nvlinks: int
    nvlink: Fraction
    nvlink_nccl: Fraction
    pcie_generation: int

    def rate(self, rates: Rates) -> Fraction:
        """One-way GB/s per NVLink."""
        return self.nvlink if rates is Rates.DATASHEET else self.nvlink_nccl


def _gpu(name: str, nvlinks: int, nvlink: str, nccl: str, pcie: int) -> tuple[str, Gpu]:
    return name, Gpu(name, nvlinks, Fraction(nvlink), Fraction(nccl), pcie)


GPUS: dict[str, Gpu] = dict(
    [
        _gpu("p100", 4, "20", "18", 3),
        _gpu("v100", 6, "25", "20", 3),
        _gpu("a100", 12, "25", "20", 4),
        _gpu("a30", 4, "25", "20", 4),
        _gpu("a40", 4, "14.0625", "12", 4),
        _gpu("a6000", 4, "14.0625", "12", 4),
        _gpu("h100", 18, "25", "20.6", 5),
        _gpu("h200", 18, "25", "20.6", 5),
        _gpu("h20", 18, "25", "20.6", 5),
        _gpu("a800", 8, "25", "20", 4),
        _gpu("h800", 8, "25", "20.6", 5),
        _gpu("b100", 18, "50", "40.1", 5),
        _gpu("b200", 18, "50", "40.1", 5),
    ]
)

# The newest generation with this compute capability or a smaller one counts, as in NCCL; 8.6 stands for
# the workstation Amperes, whose links are slower.
_BY_CAPABILITY = {60: "p100", 70: "v100", 80: "a100", 86: "a40", 90: "h100", 100: "b200"}


def gpu_named(name: str) -> Gpu:
    """The GPU generation of this name, in any case.

    Raises:
        TopologyError: it is unknown.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise TopologyError(f"gpu {shorten(name)}: must be one of {', '.join(sorted(GPUS))}")
    return gpu


def gpu_of_capability(sm: int) -> Gpu:
    """The GPU generation of a compute capability, written as in NCCL's XML (80 for 8.0).

    Raises:
        TopologyError: none has NVLinks that are known here.
    """
    known = [capability for capability in _BY_CAPABILITY if capability <= sm]
    if not known or sm > 109 or 86 < sm < 90:
        raise TopologyError(f"sm {sm}: must be a compute capability with NVLinks known here, 60 to 109")
    return GPUS[_BY_CAPABILITY[max(known)]]


_GIGATRANSFERS = {
    1: Fraction(5, 2),
    2: Fraction(5),
    3: Fraction(8),
    4: Fraction(16),
    5: Fraction(32),
    6: Fraction(64),
}


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


def slot_rate(gpu: Gpu, rates: Rates) -> Fraction:
    """One-way GB/s of the PCIe slot, 16 lanes wide, of a GPU."""
    return pcie_rate(_GIGATRANSFERS[gpu.pcie_generation], 16, rates)


BETWEEN_SOCKETS = Fraction(10)
"""GB/s each way between the sockets of a host for traffic of its GPUs: NCCL's figure for Intel Skylake.

Data sheets give the raw link only (UPI: 20.8 GB/s), far above what peer traffic through it reaches, so this
figure stands in both sets of rates.
"""

PCIE_HOP_US = Fraction(1)
"""One PCIe link: assumed; public figures for a whole path between two GPUs are 2 to 10 us."""
