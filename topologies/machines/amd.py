"""AMD's boxes: MI250 in a partial mesh of Infinity Fabric, MI300X and later all joined to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import combinations

from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import assuming, cable, check_size, grid_images, rotation, side_by_side
from arborcast.topologies.cluster import even_nics
from arborcast.topologies.entries import BOTH, Entry, Parameter, one_of
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.machine import Machine, Nic
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
    whole: Callable[..., Machine],
) -> Machine:
    """Boxes of 8 GPUs, each one rank (SPX), or with a rank for each of its 8 compute dies (CPX).

    The dies of a package share its Infinity Fabric links, which lead from one vertex; each reaches that at
    its share of the package's memory. With NPS4 two dies have a quadrant of it, whose vertex is between.
    """
    if partition == "spx":
        return whole(name=name, boxes=boxes, nic=nic, rails=rails, rates=rates)
    share, dies = Fraction(memory, 8), 64
    quads = 32 if partition == "cpx-nps4" else 0
    check_size(name, boxes * (dies + quads + 9), boxes * 600)
    over = [dies + die // 2 if quads else dies + die // 8 for die in range(dies)]
    inside = [link for die in range(dies) for link in cable(die, over[die], share, NVLINK_LATENCY_US / 2)]
    package = dies + quads
    for quad in range(quads):
        inside += cable(dies + quad, package + quad // 4, 2 * share)
    links = assuming(inside, rate=_SHARE)
    for one, other in combinations(range(package, package + 8), 2):
        links += cable(one, other, GPUS[gpu].rate(rates))
    names = [f"quadrant{quad}" for quad in range(quads)] + [f"package{number}" for number in range(8)]
    shape = (8, 4, 2)
    symmetries = [
        side_by_side(
            grid_images(shape, at, rotation(shape[at]).__getitem__),
            grid_images(shape[:2], at, rotation(shape[at]).__getitem__) if quads and at < 2 else range(quads),
            rotation(8) if at == 0 else range(8),
        )
        for at in range(3)
    ]
    topology = Topology.build(name, dies, assuming(links, latency=NOT_NVLINK), names, symmetries=symmetries)
    nics = tuple(Nic(f"nic{number}", nic, (package + number,)) for number in range(8))
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
