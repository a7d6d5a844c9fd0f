"""PCIe paths between pairs of devices to a tree of switches.

Pairs whose path crosses one PCIe bridge (PIX) hang on one switch; those are joined by several bridges
(PXB), by the host bridge (PHB), inside a NUMA domain (NODE), and all by the host (SYS). The links of the
tree are shared, which links from each GPU to each other would hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from arborcast.synth.topology import Link, Vertex
from arborcast.topologies.builders import cable
from arborcast.topologies.rates import BETWEEN_SOCKETS, PCIE_HOP_US

LEVELS = {"PIX": "pcie", "PXB": "bridges", "PHB": "hostbridge", "NODE": "numa", "SYS": "host"}
"""The ways over PCIe from near to far, with what the switch that stands for each is called."""


def pcie_tree(
    gpus: Sequence[str],
    nics: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    rate: Fraction,
    *,
    first: Vertex,
) -> tuple[list[Link], list[str]]:
    """Links and names of the switches of the tree over the GPUs; its switches are `first` and on.

    NICs only help to find it: two GPUs near one NIC are near each other. Where NVLinks hide the path of a
    pair and no NIC tells it, the pair counts as far apart (SYS).

    Args:
        gpus: names of the GPUs; the vertex of each is its place here.
        nics: names of the other devices.
        cells: the connection of each ordered pair of devices.
        rate: GB/s each way of one PCIe link; links up to the host get no more than the way between sockets.
        first: the number of the first switch.
    """
    devices = [*gpus, *nics]
    group = {device: device for device in devices}
    members = {device: [device] for device in devices}
    # What stands for a group in the tree so far: the GPU, the switch above, or nothing (NICs only).
    top: dict[str, Vertex | None] = {
        device: index if index < len(gpus) else None for index, device in enumerate(devices)
    }
    links: list[Link] = []
    names: list[str] = []
    for level, word in LEVELS.items():
        pairs = [pair for pair, cell in cells.items() if cell == level]
        if level == "SYS":
            pairs += [(gpus[0], gpu) for gpu in gpus[1:]]
        children: dict[str, list[Vertex]] = {}
        for one, other in pairs:
            kept, gone = group[one], group[other]
            if kept == gone:
                continue
            if len(members[kept]) < len(members[gone]):
                kept, gone = gone, kept
            under = [children.pop(side, _listed(top[side])) for side in (kept, gone)]
            children[kept] = [*under[0], *under[1]]
            for device in members[gone]:
                group[device] = kept
            members[kept] += members.pop(gone)
        counted = 0
        for kept, vertices in children.items():
            if len(vertices) < 2:
                top[kept] = vertices[0] if vertices else None
                continue
            switch = first + len(names)
            names.append(f"{word}{counted}")
            counted += 1
            offered = min(rate, BETWEEN_SOCKETS) if level == "SYS" else rate
            for vertex in sorted(vertices):
                links += cable(vertex, switch, offered, PCIE_HOP_US)
            top[kept] = switch
    return links, names


def _listed(vertex: Vertex | None) -> list[Vertex]:
    return [] if vertex is None else [vertex]
