"""GPUs: how many NVLinks or xGMI links each has and how fast, its PCIe slot, and what identifies it in files.

Rates are GB/s each way per link. Data sheets give the sum of both directions over all links of a GPU (A100:
600 GB/s over 12 links, so 25 GB/s a link each way). `link_nccl` is what NCCL and RCCL plan with
(src/graph/topo.h of NCCL 2.30 and rocm-systems), capabilities are those of developer.nvidia.com/cuda-gpus,
PCI devices those of pci.ids (hwdata, July 2026), of MI350P and virtual functions those of AMD's Kubernetes
tools. B300's slot is PCIe 6 by NVIDIA's talk at Hot Chips 2025 (B200's is 5). AMD's links are 16 bits wide:
25 GT/s are 50 GB/s. One die of an MI250 or MI250X is one GPU.

Taken as known, not read: the data sheets of cards without links, of A30, B100, GH200 and H100 PCIe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.topologies.rates import Rates, pcie_rate

NVIDIA, AMD = "NVIDIA", "AMD"
HOPPER = 90
NVIDIA_ID, AMD_ID = 0x10DE, 0x1002  # of PCI
VENDORS = {NVIDIA_ID: NVIDIA, AMD_ID: AMD}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A product, or several that no topology tells apart.

    Attributes:
        name: as `--gpu` takes it.
        vendor: NVIDIA or AMD.
        links: how many NVLinks or xGMI links one GPU has; 0 where it has none.
        link: one-way GB/s per link by the data sheet.
        link_nccl: the same in NCCL's or RCCL's planning model.
        pcie_generation: of its slot.
        capability: compute capability, 80 for 8.0; None for AMD's.
        architecture: LLVM's name of the target, such as gfx90a; "" for NVIDIA's.
        source: where its figures stand.
        board: what joins the GPUs of the boards that it is sold on: "nvswitch", "mesh" (one link to each
            other GPU), "wired" where that differs from box to box, or "" where nothing or a bridge does.
        devices: PCI device ids.
        assumed: why the number or rate of its links is assumed; empty where its maker published it.
        pcie_lanes: of its slot.
    """

    name: str
    vendor: str
    links: int
    link: Fraction
    link_nccl: Fraction
    pcie_generation: int
    capability: int | None
    architecture: str
    source: str
    board: str = ""
    devices: frozenset[int] = frozenset()
    assumed: str = ""
    pcie_lanes: int = 16

    @property
    def in_network(self) -> str:
        """What an NVSwitch can do for it, a word of `builders.IN_NETWORK`.

        NVLink SHARP adds and multicasts "since the Hopper generation" (NCCL user guide, Device API), whose
        compute capability is 9.0. It is read and written through multimem addresses of a rank (PTX ISA), so
        that sums do not turn at the switch.
        """
        return "loopback" if self.capability is not None and self.capability >= HOPPER else "none"

    def rate(self, rates: Rates) -> Fraction:
        """One-way GB/s per NVLink or xGMI link."""
        return self.link if rates is Rates.DATASHEET else self.link_nccl


def _gpu(
    name: str, kind: str, links: str, pcie: int, board: str, devices: str, source: str, lanes: int = 16
) -> Gpu:
    """A row of the table.

    `kind` is a compute capability or an architecture, `links` their number x GB/s, with a question mark
    behind where they are assumed, as `source` says.
    """
    count, _, rate = links.removesuffix("?").partition(" x ")
    capability = None if kind.startswith("gfx") else int(kind.replace(".", ""))
    return Gpu(
        name,
        vendor=AMD if capability is None else NVIDIA,
        links=int(count or 0),
        link=Fraction(rate or 0),
        link_nccl=Fraction(_planned(capability, kind)) if links else Fraction(0),
        pcie_generation=pcie,
        capability=capability,
        architecture=kind if capability is None else "",
        source=source,
        board=board,
        devices=frozenset(int(device, 16) for device in devices.split()),
        assumed=f"{name}: {source}" if links.endswith("?") else "",
        pcie_lanes=lanes,
    )


def _planned(capability: int | None, architecture: str) -> str:
    """GB/s per link in NCCL (`ncclTopoNVLinkBw`) and RCCL (`ncclTopoXGMISpeed`)."""
    if capability is None:
        return {"gfx90a": "36", "gfx942": "48", "gfx950": "48"}.get(architecture, "24")
    if capability == 86:
        return "12"
    known = {100: "40.1", 90: "20.6", 70: "20", 60: "18"}
    return next(rate for least, rate in known.items() if capability >= least)


SXM, OAM, BOX = "nvswitch", "mesh", "wired"

# Of several products with one capability or architecture, the first that fits what a file shows is taken.
_KNOWN = (
    _gpu("k80", "3.7", "", 3, "", "102d", "Tesla K80 board specification: PCIe Gen3 x16"),
    _gpu("m40", "5.2", "", 3, "", "17fd 13f2", "Tesla M40 product brief: PCIe Gen3 x16; M60 alike"),
    _gpu("titanx", "5.2", "", 3, "", "17c2", "GeForce GTX TITAN X specification: PCIe 3.0"),
    _gpu("p100", "6.0", "4 x 20", 3, BOX, "15f9", "Tesla P100 data sheet: NVLink 160 GB/s"),
    _gpu("p100-pcie", "6.0", "", 3, "", "15f7 15f8", "Tesla P100 PCIe data sheet: no NVLink"),
    _gpu("p40", "6.1", "", 3, "", "1b38 1bb3 1b00 1b02 1b06", "Tesla P40 data sheet; P4, 1080 Ti alike"),
    _gpu(
        "v100", "7.0", "6 x 25", 3, BOX, "1db1 1db2 1db5 1db7 1db8 1df5", "V100 data sheet: NVLink 300 GB/s"
    ),
    _gpu("v100-pcie", "7.0", "", 3, "", "1db3 1db4 1db6 1df6", "V100 data sheet (PCIe): no NVLink"),
    _gpu("gv100", "7.0", "4 x 25", 3, "", "1dba", "Quadro GV100 data sheet: NVLink 200 GB/s"),
    _gpu("t4", "7.5", "", 3, "", "1eb8", "T4 data sheet: PCIe Gen3 x16"),
    _gpu("rtx2080ti", "7.5", "2 x 25", 3, "", "1e04 1e07 1e30 1e78", "Turing white paper: NVLink 100 GB/s"),
    _gpu("a100", "8.0", "12 x 25", 4, SXM, "20b0 20b2 20b3", "A100 data sheet: NVLink 600 GB/s"),
    _gpu("a100-pcie", "8.0", "12 x 25", 4, "", "20b1 20b5 20f1", "A100 data sheet (PCIe): bridges 600 GB/s"),
    _gpu("a800", "8.0", "8 x 25?", 4, SXM, "20bd 20f3", "Reuters (Nov. 2022): 400 GB/s"),
    _gpu("a800-pcie", "8.0", "8 x 25?", 4, "", "20f5 20f6", "as A800 on boards; not found published"),
    _gpu("a30", "8.0", "4 x 25", 4, "", "20b7", "A30 data sheet: bridge 200 GB/s"),
    _gpu(
        "a6000", "8.6", "4 x 14.0625", 4, "", "2230 2231", "GA102 white paper: NVLink 112.5 GB/s; A5000 alike"
    ),
    _gpu("a40", "8.6", "4 x 14.0625", 4, "", "2235", "GA102 white paper: NVLink 112.5 GB/s"),
    _gpu("rtx3090", "8.6", "4 x 14.0625", 4, "", "2203 2204", "GA102 white paper: NVLink 112.5 GB/s"),
    _gpu("a10", "8.6", "", 4, "", "2236 2237", "A10 data sheet: PCIe Gen4 x16; A10G alike"),
    _gpu("rtx3080", "8.6", "", 4, "", "2206 2208 220a 2216", "GA102 white paper: PCIe 4.0, no NVLink"),
    _gpu("a4000", "8.6", "", 4, "", "24b0", "RTX A4000 data sheet: PCIe Gen4 x16, no NVLink"),
    _gpu("a2", "8.6", "", 4, "", "25b6", "A2 data sheet: PCIe Gen4 x8", 8),
    _gpu("l40s", "8.9", "", 4, "", "26b5 26b9 26b1", "L40S data sheet; L40, RTX 6000 Ada alike"),
    _gpu("l4", "8.9", "", 4, "", "27b8", "L4 data sheet: PCIe Gen4 x16"),
    _gpu("l20", "8.9", "", 4, "", "26b7 26ba", "L20 data sheet: PCIe Gen4 x16"),
    _gpu("rtx4090", "8.9", "", 4, "", "2684 2685", "Ada GPU white paper: PCIe 4.0, no NVLink"),
    _gpu("rtx4080", "8.9", "", 4, "", "2702 2704", "Ada GPU white paper: PCIe 4.0, no NVLink"),
    _gpu(
        "rtx4000ada", "8.9", "", 4, "", "27b2 26b2", "RTX 4000 Ada data sheet: PCIe Gen4 x16; 5000 Ada alike"
    ),
    _gpu("h100", "9.0", "18 x 25", 5, SXM, "2330 2337 2338 2339", "H100 data sheet (SXM): NVLink 900 GB/s"),
    _gpu("h200", "9.0", "18 x 25", 5, SXM, "2335", "H200 data sheet (SXM): NVLink 900 GB/s"),
    _gpu("h20", "9.0", "18 x 25?", 5, SXM, "2328 2329 232c", "press of 2024: NVLink 900 GB/s"),
    _gpu("h800", "9.0", "8 x 25", 5, SXM, "2324", "DeepSeek-V3 (ISCA 2025): NVLink 400 GB/s"),
    _gpu("h100-pcie", "9.0", "12 x 25", 5, "", "2331", "H100 PCIe product brief: bridges 600 GB/s"),
    _gpu("h100-nvl", "9.0", "12 x 25", 5, "", "2321", "H100 data sheet (NVL): bridges 600 GB/s"),
    _gpu("h200-nvl", "9.0", "18 x 25", 5, "", "233b", "H200 data sheet (NVL): bridges 900 GB/s"),
    _gpu("gh200", "9.0", "18 x 25", 5, "", "2342 2348", "GH200 data sheet: NVLink 900 GB/s"),
    _gpu("b200", "10.0", "18 x 50", 5, SXM, "2901 2909", "DGX B200 user guide: 14.4 TB/s for 8"),
    _gpu("b100", "10.0", "18 x 50", 5, SXM, "29bc", "HGX B100 data sheet: NVLink 1.8 TB/s"),
    _gpu("gb200", "10.0", "18 x 50", 5, SXM, "2941", "DGX GB200 user guide: 1.8 TB/s a GPU"),
    _gpu("b300", "10.3", "18 x 50", 6, SXM, "3182", "DGX B300 data sheet: 14.4 TB/s for 8"),
    _gpu("gb300", "10.3", "18 x 50", 6, SXM, "31a1 31c2 31c3", "Azure's ND GB300 v6: 130 TB/s for 72"),
    _gpu(
        "vr200",
        "10.7",
        "36 x 50",
        6,
        SXM,
        "307f",
        "NVLink 6: 3.6 TB/s a GPU over 36 links; slot and PCI id not found published",
    ),
    _gpu("pro6000", "12.0", "", 5, "", "2bb1 2bb4 2bb5", "RTX PRO 6000 Blackwell data sheet: PCIe Gen5 x16"),
    _gpu("rtx5090", "12.0", "", 5, "", "2b85 2b87", "RTX Blackwell white paper: PCIe Gen5"),
    _gpu("pro5000", "12.0", "", 5, "", "2bb3", "RTX PRO 5000 Blackwell data sheet: PCIe Gen5 x16"),
    _gpu("pro4500", "12.0", "", 5, "", "2c31 2c34", "RTX PRO 4500 Blackwell data sheet; PRO 4000 alike"),
    _gpu("rtx5080", "12.0", "", 5, "", "2c02 2c05 2f04", "RTX Blackwell white paper: PCIe Gen5; 5070 alike"),
    _gpu("rtx5060ti", "12.0", "", 5, "", "2d04 2d05", "GeForce RTX 5060 family: PCIe Gen5 x8", 8),
    _gpu("gb10", "12.1", "", 5, "", "2e12", "DGX Spark data sheet: one GPU a box"),
    _gpu("mi50", "gfx906", "2 x 46?", 4, "", "66a0 66a1", "AMD (2018): 2 links; rate assumed as MI100's"),
    _gpu("mi100", "gfx908", "3 x 46", 4, "", "738c 738e", "ROCm documentation: 3 links of 23 GT/s"),
    _gpu("mi250x", "gfx90a", "8 x 50", 4, BOX, "7408", "ROCm documentation, MI250: 8 links of 25 GT/s a die"),
    _gpu("mi250", "gfx90a", "8 x 50", 4, BOX, "740c", "ROCm documentation, MI250: 8 links of 25 GT/s a die"),
    _gpu("mi210", "gfx90a", "3 x 50", 4, "", "740f 7410", "MI210 data sheet: 3 links, 300 GB/s"),
    _gpu(
        "mi300x", "gfx942", "7 x 64", 5, OAM, "74a1 74a9 74b5 74bd", "CDNA 3 white paper: 7 links, 896 GB/s"
    ),
    _gpu("mi325x", "gfx942", "7 x 64", 5, OAM, "74a5 74b9", "CDNA 3 white paper: 7 links, 896 GB/s"),
    _gpu("mi300a", "gfx942", "8 x 64?", 5, BOX, "74a0", "arXiv 2508.11298: 64 GB/s; 8 links assumed"),
    _gpu("mi350x", "gfx950", "7 x 76.8", 5, OAM, "75a0 75b0", "CDNA 4 white paper: 7 links, 1075.2 GB/s"),
    _gpu("mi350p", "gfx950", "", 5, "", "75a8 75b8", "RCCL's model of 8 MI350P: PCIe Gen5, no xGMI"),
    _gpu("mi355x", "gfx950", "7 x 76.8", 5, OAM, "75a3 75b3", "CDNA 4 white paper: 7 links, 1075.2 GB/s"),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _KNOWN}
"""All GPUs by name."""


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, in any case, with or without hyphens ("H200", "RTX-4090").

    Raises:
        TopologyError: it is unknown.
    """
    gpu = next((gpu for gpu in _KNOWN if _plain(gpu.name) == _plain(name)), None)
    if gpu is None:
        raise TopologyError(f"gpu {shorten(name)}: must be one of {', '.join(sorted(GPUS))}")
    return gpu


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.lower())


def gpu_of_capability(capability: int, *, links: int) -> Gpu | None:
    """The GPU of NVIDIA's with this compute capability (80 for 8.0) that shows so many NVLinks.

    Products of one capability often differ in nothing but the number: those with exactly so many go first,
    then those with more, then those with less, and among these the one that stands first in the table (A100,
    H100 SXM, B200). A capability between two known ones is the smaller (as in NCCL). None below all.
    """
    known = [gpu.capability for gpu in _KNOWN if gpu.capability is not None and gpu.capability <= capability]
    return _nearest([gpu for gpu in _KNOWN if known and gpu.capability == max(known)], links)


def gpu_of_architecture(gcn: str, *, links: int) -> Gpu | None:
    """AMD's GPU by its architecture in the forms of RCCL's files: "gfx942", "gfx90a:sramecc+:xnack-", "908".

    The number 910 is gfx90a, 940 and 941 are early gfx942. As for NVIDIA's the number of links decides among
    several products. None where it is unknown.
    """
    match = re.fullmatch(r"(?:gfx)?([0-9a-f]{3,4})(?::.*)?", gcn.strip().lower())
    number = match[1] if match else ""
    number = {"910": "90a", "940": "942", "941": "942"}.get(number, number)
    return _nearest([gpu for gpu in _KNOWN if number and gpu.architecture == f"gfx{number}"], links)


def _nearest(candidates: list[Gpu], links: int) -> Gpu | None:
    def strangeness(gpu: Gpu) -> tuple[bool, int]:
        return gpu.links < links, abs(gpu.links - links) if links else 0

    return min(candidates, key=strangeness, default=None)


def nvswitch_for(gpus: Iterable[Gpu | None]) -> str:
    """What an NVSwitch can do for all of these, a word of `builders.IN_NETWORK`."""
    words = {"none" if gpu is None else gpu.in_network for gpu in gpus}
    return words.pop() if len(words) == 1 else "none"


def others_like(gpu: Gpu) -> list[str]:
    """Names of the products with the same capability or architecture, and as many links."""
    return [
        other.name
        for other in _KNOWN
        if other is not gpu
        and (other.capability, other.architecture, other.links)
        == (gpu.capability, gpu.architecture, gpu.links)
    ]


def gpu_of_device(vendor: int, device: int) -> Gpu | None:
    """The GPU with these PCI ids; None where they are unknown."""
    maker = VENDORS.get(vendor)
    return next((gpu for gpu in _KNOWN if gpu.vendor == maker and device in gpu.devices), None)


GIGATRANSFERS = {
    1: Fraction(5, 2),
    2: Fraction(5),
    3: Fraction(8),
    4: Fraction(16),
    5: Fraction(32),
    6: Fraction(64),
}
"""GT/s a lane of each PCIe generation."""


def slot_rate(gpu: Gpu, rates: Rates) -> Fraction:
    """One-way GB/s of the PCIe slot of a GPU."""
    return pcie_rate(GIGATRANSFERS[gpu.pcie_generation], gpu.pcie_lanes, rates)
