"""AMD's boxes: MI250 in a partial mesh of Infinity Fabric, MI300X and later all joined to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import assuming, cable, check_size, rotation
from arborcast.topologies.cluster import even_nics
from arborcast.topologies.entries import BOTH, Entry, Parameter, one_of
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.machines.boxes import BOXES, Nested, box_entry, several
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


def _parts(
    *,
    name: str,
    boxes: int,
    nic: Fraction,
    rails: int,
    rates: Rates,
    partition: str,
    gpu: str,
    memory: int,
    whole: Callable[..., Any],
) -> Machine:
    """Boxes of 8 GPUs, each one rank (SPX), or with a rank for each of its 8 compute dies (CPX).

    The dies of a package share its Infinity Fabric links, which lead from one vertex; each reaches that at
    its share of the package's memory. With NPS4 two dies have a quadrant of it, whose vertex is between.
    """
    if partition == "spx":
        box: Machine = whole(name=name, boxes=boxes, nic=nic, rails=rails, rates=rates)
        return box
    share, dies = Fraction(memory, 8), 2 if partition == "cpx-nps4" else 1
    check_size(name, boxes * 128, boxes * 512)
    rates_inside = (share, dies * share, GPUS[gpu].rate(rates))
    hops = (NVLINK_LATENCY_US / 2, Fraction(0))
    tree = Nested(8, 8 // dies, dies, rates_inside, hops, ("quadrant", "package"))
    topology = tree.topology(name, assuming(tree.links(why_inside=_SHARE), latency=NOT_NVLINK))
    packages = range(tree.ranks + tree.between, topology.size)
    nics = tuple(Nic(f"nic{number}", nic, (package,)) for number, package in enumerate(packages))
    return several(name, topology, nics, gpu=None, boxes=boxes, rails=rails, rates=rates, network="Ethernet")


_SHARE = "of a compute die: its share of the memory's rate, as all dies of a package are at work"


def _with_parts(entry: Entry, memory: int, sheet: str) -> Entry:
    """The entry with the compute partitions of its GPUs, whose memory has so many GB/s."""
    builder = partial(_parts, gpu=entry.gpu or "", memory=memory, whole=entry.builder)
    modes = ("spx", "cpx-nps1", "cpx-nps4")
    parameter = Parameter("partition", "|".join(modes), one_of(*modes), "spx")
    source = f"{entry.source}; partitions: AMD SMI documentation; memory: {sheet}"
    return replace(entry, builder=builder, parameters=(*entry.parameters, parameter), source=source)


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
    _with_parts(
        _mesh("mi300x", "8 NICs of 400 Gb/s as in Azure's ND MI300X v5 and OCI's BM.GPU.MI300X.8"),
        5300,
        "MI300X data sheet, 5.3 TB/s",
    ),
    _with_parts(
        _mesh("mi325x", "ROCm documentation, vLLM with MoRI: 8 ConnectX-7, one for each GPU"),
        6000,
        "MI325X data sheet, 6 TB/s",
    ),
    _mesh("mi350x", "NICs not found published, assumed as for MI355X", "of NICs: as for MI355X"),
    _mesh("mi355x", "ROCm documentation, SGLang with MoRI: 8 Pollara 400, one for each GPU"),
)
