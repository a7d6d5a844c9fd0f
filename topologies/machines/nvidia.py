"""NVIDIA's boxes and racks: DGX-1 to B300, HGX boards for some markets, NVL72; nodes of four of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from arborcast.synth.topology import Topology
from arborcast.topologies.builders import cable
from arborcast.topologies.cluster import even_nics
from arborcast.topologies.entries import BOTH, Entry
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.machine import Machine
from arborcast.topologies.machines.boxes import (
    BOXES,
    box_entry,
    nic,
    rails,
    several,
)
from arborcast.topologies.rates import NVLINK_LATENCY_US, Rates

# NVLinks per pair of GPUs of a DGX-1 with V100, numbered as nvidia-smi does (NCCL issue 671).
DGX1_NVLINKS = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)

_BASEPOD = "DGX BasePOD reference architecture"


def cube_mesh(name: str, gpu: str, rates: Rates) -> Topology:
    """The hybrid cube mesh of NVLinks of a DGX-1: some pairs of V100 have two links, P100 one each.

    Symmetries: among V100 {0,1,4,5} and {2,3,6,7} are the two orbits of ranks; all P100 are alike.
    """
    most, flips = (1, (1, 2, 4)) if gpu == "p100" else (2, (1, 4))
    rate = GPUS[gpu].rate(rates)
    links = [
        link
        for first, row in enumerate(DGX1_NVLINKS)
        for second, links_of_pair in enumerate(row[:first])
        if links_of_pair
        for link in cable(first, second, min(links_of_pair, most) * rate, NVLINK_LATENCY_US)
    ]
    symmetries = [tuple(rank ^ bit for rank in range(8)) for bit in flips]
    return Topology.build(name, 8, links, symmetries=symmetries)


def dgx1(*, name: str, boxes: int, nic: Fraction, rails: int, rates: Rates, gpu: str, nics: int) -> Machine:
    """DGX-1: the GPUs of a box share its NICs, two each of four."""
    topology, shared = cube_mesh(name, gpu, rates), even_nics(8, nic, nics)
    return several(name, topology, shared, gpu=gpu, boxes=boxes, rails=rails, rates=rates)


def _cube(name: str, gpu: str, wiring: str) -> Entry:
    return Entry(
        name,
        f"boxes of 8 {gpu.upper()}, {wiring}, 4 NICs to a fabric",
        partial(dgx1, gpu=gpu, nics=4),
        (BOXES, nic(Fraction("12.5")), rails(1)),
        BOTH,
        gpu,
        "NVIDIA",
        f"{GPUS[gpu].source}; NADDOD on DGX servers (2023): 4 x 100 Gb/s",
    )


def _rack(gpu: str, port: str, source: str) -> Entry:
    """An entry for NVL72 racks or slices of them, in one domain of NVLink."""
    return box_entry(
        f"{gpu}-nvl72",
        f"racks of 72 {gpu.upper()} in one NVLink domain, or slices of whole trays of 4 (gpus=)",
        gpu,
        f"72 x {port}",
        vendor="NVIDIA",
        source=source,
        gpus=72,
        tray=4,
        infiniband=True,
    )


def _dgx(name: str, gpu: str, port: str, source: str) -> Entry:
    """An entry for boxes of 8 on NVSwitch with a NIC for each GPU.

    NICs are dealt to two fabric switches unless told, as in ForestColl's model of its A100 testbed.
    """
    kind = gpu.upper()
    sharp = " with NVLink SHARP" if GPUS[gpu].in_network != "none" else ""
    return box_entry(
        name,
        f"boxes of 8 {kind} on NVSwitch{sharp}, NICs to a fabric",
        gpu,
        f"8 x {port}",
        vendor="NVIDIA",
        source=source,
        deal=2,
        infiniband=True,
        nics_assumed=f"of NICs: {source}" if name.startswith("hgx") else "",
    )


def _node(name: str, gpu: str, links: int, nics: str, source: str) -> Entry:
    """A supercomputer's node of four GPUs that share their links evenly."""
    return box_entry(
        name,
        f"nodes of 4 {gpu.upper()} with {links} NVLinks between each two, {nics} GB/s to a fabric",
        gpu,
        nics,
        vendor="Eviden",
        source=f"{source}; {links} of the {GPUS[gpu].links} links for each of the 3 others",
        gpus=4,
        shape="mesh",
        of_pair=links,
    )


ENTRIES: Sequence[Entry] = (
    _cube("dgx1", "v100", "hybrid cube mesh of NVLinks"),
    _cube("dgx1-p100", "p100", "the same cube mesh with single links"),
    box_entry(
        "dgx2",
        "boxes of 16 V100 on NVSwitch, 8 NICs to a fabric",
        "v100",
        "8 x 12.5",
        vendor="NVIDIA",
        source="PC Perspective (March 2018): 8 EDR NICs",
        gpus=16,
    ),
    _dgx("dgx-a100", "a100", "25", "DGX A100 data sheet: 8 ConnectX-6, which have 200 Gb/s"),
    _dgx("dgx-h100", "h100", "50", f"{_BASEPOD}: 8 ConnectX-7 of 400 Gb/s"),
    _dgx("dgx-h200", "h200", "50", f"{_BASEPOD}: 8 ConnectX-7 of 400 Gb/s"),
    _dgx("dgx-b200", "b200", "50", "DGX B200 user guide: 8 ConnectX-7 of 400 Gb/s"),
    _dgx("dgx-b300", "b300", "100", "DGX B300 data sheet: 8 ConnectX-8, which have 800 Gb/s"),
    _dgx("hgx-a800", "a800", "25", "boards have no NICs: 200 Gb/s as in a DGX A100"),
    _dgx("hgx-h800", "h800", "50", "boards have no NICs: 8 of 400 Gb/s as in DeepSeek's (ISCA 2025)"),
    _dgx("hgx-h20", "h20", "50", "boards have no NICs: 400 Gb/s as in a DGX H100"),
    _rack("gb200", "50", "DGX GB200 user guide: 18 trays of 4 GPUs with 4 ConnectX-7 of 400 Gb/s"),
    _rack("gb300", "100", "Azure documentation, ND GB300 v6: 18 hosts of 4 GPUs, 800 Gb/s for each"),
    _node("leonardo", "a100", 4, "4 x 12.5", "CINECA, HPC System: two dual-port HDR adapters, 400 Gb/s"),
    _node("juwels-booster", "a100", 4, "4 x 25", "JSC documentation, JUWELS Booster: 4 HDR200 adapters"),
    _node("jupiter", "gh200", 6, "4 x 25", "JSC, JUPITER Hardware: 150 GB/s each way a pair, 4 NDR200"),
)
