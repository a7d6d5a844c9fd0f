"""AMD's boxes: MI250 in a partial mesh of Infinity Fabric, MI300X and later all joined to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import assuming, cable, check_size, rotation
from arborcast.topologies.cluster import even_nics
from arborcast.topologies.entries import BOTH, Entry
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.machine import Machine
from arborcast.topologies.machines.boxes import BOXES, box_entry, several
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US, Rates
from arborcast.topologies.wirings import MI250_BOX

MI250_MIRROR = (3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12)


def _mi250(*, name: str, boxes: int, rates: Rates) -> Machine:
    """Boxes of 16 dies, each with 16 GB/s to the fabric, its share of the box's NICs."""
    rate = GPUS["mi250"].rate(rates)
    check_size(name, 16 * boxes + 1, 4 * len(MI250_BOX) * boxes)
    links: list[Link] = []
    for first, second, count in MI250_BOX:
        links += cable(first, second, rate * count, NVLINK_LATENCY_US)
    links = assuming(links, latency=NOT_NVLINK)
    topology = Topology.build(name, 16, links, symmetries=(rotation(16, 8), MI250_MIRROR))
    nics = even_nics(16, Fraction(16), 16)
    machine = several(
        name, topology, nics, gpu="mi250", boxes=boxes, rails=1, rates=rates, network="its fabric"
    )
    if boxes == 1:
        return machine
    # Which of equally good trees solvers take depends on the order: it stays, with the boxes' rotation first.
    *within, among = machine.topology.symmetries
    return replace(machine, topology=replace(machine.topology, symmetries=(among, *within)))


def _mesh(gpu: str, source: str, nics_assumed: str = "") -> Entry:
    return box_entry(
        gpu,
        f"boxes of 8 {gpu.upper()}, each joined to each by Infinity Fabric, NICs to a fabric",
        gpu,
        "8 x 50",
        vendor="AMD",
        source=source,
        shape="mesh",
        network="Ethernet",
        nics_assumed=nics_assumed,
    )


ENTRIES: Sequence[Entry] = (
    Entry(
        "mi250",
        "boxes of 16 MI250 dies, NICs to a fabric",
        _mi250,
        (BOXES,),
        BOTH,
        "mi250",
        "AMD",
        f"{GPUS['mi250'].source}; wiring, and 16 GB/s a die to the fabric: ForestColl's topologies.py",
    ),
    box_entry(
        "mi300a",
        "nodes of 4 MI300A with two links between each two, 4 NICs to a fabric",
        "mi300a",
        "4 x 25",
        vendor="AMD",
        source="wiring: arXiv 2508.11298, 128 GB/s each way between two; RCCL's model of 4: NICs of 200 Gb/s",
        gpus=4,
        shape="mesh",
        of_pair=2,
        network="Slingshot",
    ),
    _mesh("mi300x", "8 NICs of 400 Gb/s as in Azure's ND MI300X v5 and OCI's BM.GPU.MI300X.8"),
    _mesh("mi325x", "ROCm documentation, vLLM with MoRI: 8 ConnectX-7, one for each GPU"),
    _mesh("mi350x", "NICs not found published, assumed as for MI355X", "of NICs: as for MI355X"),
    _mesh("mi355x", "ROCm documentation, SGLang with MoRI: 8 Pollara 400, one for each GPU"),
)
