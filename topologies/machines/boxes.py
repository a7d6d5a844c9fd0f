"""Boxes of accelerators: around a switch or fully joined, alone or several of them on a fabric."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import cluster
from arborcast.topologies.builders import (
    assumed,
    assuming,
    cable,
    check_size,
    grid_images,
    holding,
    rotation,
    side_by_side,
    without_identity,
)
from arborcast.topologies.entries import BOTH, IN_NETWORK, Entry, Parameter, bandwidth, count, one_of
from arborcast.topologies.fabrics import Rails
from arborcast.topologies.gpus import GPUS, NVIDIA
from arborcast.topologies.grids import full, star
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.rates import INFINIBAND, NOT_NVLINK, NVLINK_LATENCY_US, NVSWITCH_HOP_US, Rates

BOXES = Parameter("boxes", "N", count, 1)
FABRIC = Parameter("fabric", "plain|sharp", one_of("plain", "sharp"), "plain", needs="boxes")
"""Whether the switches between boxes reduce, multicast and turn, as those of InfiniBand with SHARP."""


def rails(default: int) -> Parameter:
    """How many switches the NICs of boxes are dealt to."""
    return Parameter("rails", "N", count, default, needs="boxes")


def nic(default: Fraction | None) -> Parameter:
    """GB/s each way of every NIC."""
    return Parameter("nic", "GB/s", bandwidth, default, needs="boxes")


def switched(name: str, gpus: int, rate: Fraction, in_network: str = "none") -> Topology:
    """A box whose GPUs reach one switch that blocks nothing, at so many GB/s each way.

    All NVSwitch chips of a box, or of a rack, carry every pair of GPUs at full rate together: one vertex.
    What it can do beside is a word of `IN_NETWORK`.
    """
    hop = NVSWITCH_HOP_US
    return star(name=name, ranks=gpus, in_network=in_network, bandwidth=rate, latency=hop, switch="nvswitch")


def meshed(name: str, gpus: int, rate: Fraction) -> Topology:
    """A box whose GPUs all have a link to each other, of so many GB/s each way."""
    return full(name=name, ranks=gpus, bandwidth=rate, latency=NVLINK_LATENCY_US)


@dataclass(frozen=True, slots=True)
class Nested:
    """Ranks in equal parts under tops that are joined pairwise, straight or through branches of some each.

    Attributes:
        tops: how many.
        branches: under each top.
        leaves: under each branch; where this is 1, ranks stand in place of branches.
        rates: GB/s each way of a leaf, a branch, and between two tops.
        latencies: of what leads from leaves and branches, and of what joins tops.
        names: what branches and tops are called, before their number.
    """

    tops: int
    branches: int
    leaves: int
    rates: tuple[Fraction, Fraction, Fraction]
    latencies: tuple[Fraction, Fraction]
    names: tuple[str, str]

    @property
    def ranks(self) -> int:
        return self.tops * self.branches * self.leaves

    @property
    def between(self) -> int:
        """Branches that are vertices."""
        return self.tops * self.branches if self.leaves > 1 else 0

    def links(self, why_inside: str = "", why_across: str = "") -> list[Link]:
        """All of them, with why their rates inside and across tops are assumed."""
        inside: list[Link] = []
        ranks, between = self.ranks, self.between
        for rank in range(ranks if between else 0):
            inside += cable(rank, ranks + rank // self.leaves, self.rates[0], self.latencies[0])
        for branch in range(self.tops * self.branches):
            child, top = ranks + branch if between else branch, ranks + between + branch // self.branches
            inside += cable(child, top, self.rates[1], self.latencies[0])
        across = [
            link
            for pair in combinations(range(ranks + between, ranks + between + self.tops), 2)
            for link in cable(*pair, self.rates[2], self.latencies[1])
        ]
        return [*assuming(inside, rate=why_inside), *assuming(across, rate=why_across)]

    def topology(self, name: str, links: Iterable[Link]) -> Topology:
        """The graph of these links, with those symmetries of the tree that they keep."""
        shape = (self.tops, self.branches, self.leaves)
        turns = [rotation(extent) for extent in shape]
        symmetries = [
            side_by_side(
                grid_images(shape, at, turn.__getitem__),
                grid_images(shape[:2], at, turn.__getitem__)
                if self.between and at < 2
                else range(self.between),
                turns[0] if at == 0 else range(self.tops),
            )
            for at, turn in enumerate(turns)
        ]
        counts = zip(self.names, (self.between, self.tops), strict=True)
        graph = Topology.build(
            name, self.ranks, links, [f"{word}{index}" for word, count in counts for index in range(count)]
        )
        return replace(graph, symmetries=tuple(holding(graph, without_identity(symmetries))))


def several(
    name: str,
    topology: Topology,
    nics: tuple[Nic, ...],
    *,
    gpu: str | None,
    boxes: int,
    rails: int,
    rates: Rates = Rates.DATASHEET,
    host: int | None = None,
    fabric: str = "plain",
    network: str = INFINIBAND,
) -> Machine:
    """One box with its NICs, or as many as are asked for on a fabric of `rails` switches.

    `host` is the number of ranks of one host, where a box is several; `fabric` as `FABRIC` reads it;
    `network` is what the fabric is (see `cluster.join`).
    """
    switches = Rails(rails, "turn" if fabric == "sharp" else "none")
    box = Machine.of(topology, gpu=gpu)
    ranks = topology.ranks
    per_host = host or ranks
    box = Machine(topology, box.gpus, box.devices, tuple(rank // per_host for rank in range(ranks)), nics)
    switches.wire(name, cluster.speeds_by_host(box))  # a rule that holds for one box, too
    if boxes == 1:
        return box
    check_size(name, boxes * topology.size, boxes * len(topology.links))
    return cluster.join(name, [box] * boxes, switches, word="box", rates=rates, network=network).machine


def box_entry(
    name: str,
    description: str,
    gpu: str,
    nics: str,
    *,
    vendor: str,
    source: str,
    gpus: int = 8,
    shape: str = "switch",
    deal: int = 1,
    infiniband: bool = False,
    network: str = INFINIBAND,
    nics_assumed: str = "",
    of_pair: int = 0,
    tray: int = 0,
) -> Entry:
    """An entry for boxes in which all links of a GPU go to one switch, or an equal share to each other GPU.

    Args:
        name: of the entry.
        description: in one line.
        gpu: whose links count, as in `topologies.GPUS`.
        nics: of a box, as "8 x 50": how many, and GB/s each way of each; GPUs own or share them evenly.
        vendor: the heading.
        source: where the NICs stand; that of the GPU's links is added.
        gpus: in a box.
        shape: "switch" or "mesh".
        deal: number of fabric switches that NICs are dealt to, unless told.
        infiniband: whether that fabric can have SHARP.
        network: what that fabric is.
        nics_assumed: why NICs are assumed to be so fast, unless told.
        of_pair: links of each pair of a mesh; 0 where all links of a GPU are shared by the others.
        tray: GPUs of a host, where a box is several, and may be had with fewer of them, or with fewer `links`
            of each GPU; a NIC for each GPU.

    Raises:
        TopologyError: when built, GPUs that are not whole trays.
    """
    ports, _, speed = nics.partition(" x ")
    most = gpus

    def build(
        *,
        name: str,
        boxes: int,
        nic: Fraction,
        rails: int,
        rates: Rates,
        fabric: str = "plain",
        gpus: int = gpus,
        links: int = GPUS[gpu].links,
    ) -> Machine:
        if tray and (gpus % tray or gpus > most):
            rule = f"must be a multiple of {tray} (a tray) of at most {most}"
            raise TopologyError(f"{name}: gpus {rule}, got {gpus}")
        if links > GPUS[gpu].links:
            raise TopologyError(f"{name}: links must be at most the {GPUS[gpu].links} of a GPU, got {links}")
        rate = links * GPUS[gpu].rate(rates)
        if shape == "switch":
            topology = switched(name, gpus, rate, GPUS[gpu].in_network)
        else:
            each = of_pair * GPUS[gpu].rate(rates) if of_pair else rate / (gpus - 1)
            unlike = "" if GPUS[gpu].vendor == NVIDIA else NOT_NVLINK
            topology = assumed(meshed(name, gpus, each), latency=unlike)
        topology = assumed(topology, rate=GPUS[gpu].assumed)
        hung = cluster.even_nics(gpus, nic, gpus if tray else int(ports))
        if nic == Fraction(speed):
            hung = tuple(replace(each, assumed=nics_assumed) for each in hung)
        return several(
            name,
            topology,
            hung,
            gpu=gpu,
            boxes=boxes,
            rails=rails,
            rates=rates,
            host=tray or None,
            fabric=fabric,
            network=network,
        )

    slices = [Parameter("gpus", "N", count, most), Parameter("links", "N", count, GPUS[gpu].links)]
    return Entry(
        name,
        description,
        build,
        (
            *(slices if tray else ()),
            BOXES,
            nic(Fraction(speed)),
            rails(deal),
            *([FABRIC] if infiniband else []),
        ),
        BOTH,
        gpu,
        vendor,
        f"{GPUS[gpu].source}; {source}",
    )


def _boxes(
    *,
    name: str,
    boxes: int,
    gpus: int,
    inside: Fraction,
    nic: Fraction | None,
    nics: int | None,
    rails: int,
    links: str,
    in_network: str,
    fabric: str,
) -> Machine:
    """Boxes of no vendor: each GPU has `inside` GB/s each way, to the switch of its box or to all others.

    With links=mesh that is divided by the number of others: a link of inside / (gpus - 1) to each.
    """
    if gpus * boxes < 2:
        raise TopologyError(f"{name}: gpus must be at least 2 in one box, got {gpus}")
    ports = nics or gpus
    if gpus % ports and ports % gpus:
        raise TopologyError(
            f"{name}: nics must divide the {gpus} GPUs of a box or be a multiple, got {ports}"
        )
    if links == "mesh" and in_network != "none":
        raise TopologyError(f"{name}: in-network goes with links=switch, got mesh")
    if boxes > 1 and nic is None:
        raise TopologyError(f"{name}: several boxes need nic=GB/s of each NIC")
    if gpus == 1:
        topology = Topology.build(name, 1, [])
    elif links == "switch":
        topology = switched(name, gpus, inside, in_network)
    else:
        topology = meshed(name, gpus, inside / (gpus - 1))
    topology = assumed(topology, latency=NOT_NVLINK)
    hung = () if nic is None else cluster.even_nics(gpus, nic, ports)
    if boxes == 1:
        return Machine(topology, (None,) * gpus, ("",) * gpus, (0,) * gpus, hung)
    network = "a fabric of no product"
    return several(name, topology, hung, gpu=None, boxes=boxes, rails=rails, fabric=fabric, network=network)


GENERIC = Entry(
    "boxes",
    "boxes of GPUs, inside= GB/s each way from each to its box's switch (links=mesh: to all others)",
    _boxes,
    (
        Parameter("boxes", "N", count, required=True),
        Parameter("gpus", "N", count, required=True),
        Parameter("inside", "GB/s", bandwidth, required=True),
        Parameter("nic", "GB/s", bandwidth),
        Parameter("nics", "N", count),
        rails(1),
        Parameter("links", "switch|mesh", one_of("switch", "mesh"), "switch"),
        IN_NETWORK,
        FABRIC,
    ),
)
"""Boxes that stand for no product."""
