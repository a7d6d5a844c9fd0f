"""HPE Cray EX machines: nodes with four NICs in a dragonfly of Slingshot switches (Perlmutter, Frontier).

A chassis holds 16 nodes and four switches; NIC i of each node is taken to go to switch i of its chassis. The
switches of a group are joined pairwise, groups by bundles of links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Topology
from arborcast.topologies import cluster
from arborcast.topologies.builders import assuming, cable, check_size
from arborcast.topologies.entries import BOTH, Entry, Parameter, bandwidth, count
from arborcast.topologies.fabrics import Wiring
from arborcast.topologies.gpus import GPUS
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.machines.boxes import meshed, several
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US, Rates
from arborcast.topologies.wirings import FRONTIER_NODE

_CHASSIS, _NICS, _GROUP = 16, 4, 128
_PORT = Fraction(25)  # GB/s each way of every link: 200 Gb/s

_AS_FRONTIER = "between switches of Slingshot: as on Frontier"


@dataclass(frozen=True, slots=True)
class Dragonfly:
    """Groups of equally many nodes, with as many chassis as hold them.

    Attributes:
        nodes: in each group.
        bundle: GB/s each way between two groups. That which leads `distance` groups onward leaves from the
            group's switch number distance - 1, counted round.
    """

    nodes: int
    bundle: Fraction

    def wire(self, name: str, nics: Sequence[Sequence[Fraction]]) -> Wiring:
        """See `Fabric`."""
        groups = len(nics) // self.nodes
        each = _NICS * -(-self.nodes // _CHASSIS)  # switches of a group

        def port(node: int, nic: int) -> int:
            group, own = divmod(node, self.nodes)
            return group * each + own // _CHASSIS * _NICS + nic

        cables = [
            (group * each + one, group * each + other, _PORT)
            for group in range(groups)
            for one, other in combinations(range(each), 2)
        ]
        for first, second in combinations(range(groups), 2):
            onward, back = second - first, groups - (second - first)
            here, there = first * each + (onward - 1) % each, second * each + (back - 1) % each
            cables.append((here, there, self.bundle))
        names = tuple(f"group{group}.switch{index}" for group in range(groups) for index in range(each))
        return Wiring(names, port, tuple(cables), (min(_CHASSIS, self.nodes), self.nodes))


def _cray(*, name: str, nodes: int, groups: int, bundle: Fraction, rates: Rates, gpu: str) -> Machine:
    """So many nodes in each of some groups; a node alone has no switches."""
    if nodes > _GROUP:
        raise TopologyError(f"{name}: nodes must be at most {_GROUP}, those of a group, got {nodes}")
    check_size(name, nodes * groups * 8, nodes * groups * 64)
    node = (_perlmutter if gpu == "a100" else _frontier)(name, rates)
    if nodes * groups == 1:
        return node
    wires = Dragonfly(nodes, bundle)
    machine = cluster.join(name, [node] * nodes * groups, wires, word="node", network="Slingshot").machine
    if gpu != "a100":
        return machine
    ends = range(machine.topology.ranks, machine.topology.size)
    links = (
        replace(link, rate_assumed=_AS_FRONTIER) if link.src in ends and link.dst in ends else link
        for link in machine.topology.links
    )
    return replace(machine, topology=replace(machine.topology, links=tuple(links)))


def _perlmutter(name: str, rates: Rates) -> Machine:
    """Four A100 with four NVLinks between each two, a NIC for each."""
    topology = meshed(name, 4, 4 * GPUS["a100"].rate(rates))
    return several(name, topology, cluster.even_nics(4, _PORT, 4), gpu="a100", boxes=1, rails=1)


def _frontier(name: str, rates: Rates) -> Machine:
    """Eight dies of MI250X, the odd ones with a NIC. Symmetries: even dies are alike, and so are odd ones."""
    rate = GPUS["mi250x"].rate(rates)
    links = [
        link
        for first, second, number in FRONTIER_NODE
        for link in assuming(cable(first, second, number * rate, NVLINK_LATENCY_US), latency=NOT_NVLINK)
    ]
    turns = [tuple(die ^ bits for die in range(8)) for bits in (2, 6)]
    nics = tuple(Nic(f"nic{index}", _PORT, (2 * index + 1,)) for index in range(_NICS))
    return several(
        name, Topology.build(name, 8, links, symmetries=turns), nics, gpu="mi250x", boxes=1, rails=1
    )


def _entry(name: str, gpu: str, description: str, source: str, groups: str) -> Entry:
    return Entry(
        name,
        description,
        partial(_cray, gpu=gpu),
        (
            Parameter("nodes", "N", count, 1),
            Parameter("groups", "N", count, 1),
            Parameter("global", "GB/s", bandwidth, Fraction(100), keyword="bundle", needs="groups"),
        ),
        BOTH,
        gpu=gpu,
        vendor="HPE Cray",
        source=f"{GPUS[gpu].source}; {source}; Frontier's groups have 32 switches, joined pairwise by "
        f"links of 200 Gb/s, and 4 to each other group (G. Lockwood's notes); {groups}",
    )


ENTRIES: Sequence[Entry] = (
    _entry(
        "perlmutter",
        "a100",
        "nodes of 4 A100 with 4 NICs, nodes= of each of groups= of a Slingshot dragonfly",
        "NERSC documentation, Perlmutter Architecture: GPUs all joined (12 links to 3), 4 NICs, groups of 8 "
        "chassis with 16 nodes and 4 switches",
        "links between its own groups not found published, assumed alike",
    ),
    _entry(
        "frontier",
        "mi250x",
        "nodes of 8 MI250X dies with 4 NICs, nodes= of each of groups= of a Slingshot dragonfly",
        "Frontier user guide, node diagram: links of 50 GB/s each way, which pairs, NICs on odd dies",
        "57 % of what its nodes can send",
    ),
)
