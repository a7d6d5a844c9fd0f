"""How near devices are over PCIe, to a tree of switches and CPUs.

The tools of vendors show words for each pair: one switch (PIX), several (PXB), one host bridge (PHB), one
NUMA node (NODE), farther (SYS). The tree has a switch for each of the first two, as far as several GPUs are
under it, and a CPU for each NUMA node; CPUs are joined pairwise, as NCCL has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product, starmap

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Vertex
from arborcast.topologies.builders import assuming, cable
from arborcast.topologies.gpus import GIGATRANSFERS, Gpu
from arborcast.topologies.processors import Crossing
from arborcast.topologies.rates import PCIE_HOP, PCIE_HOP_US, Rates, pcie_rate
from arborcast.topologies.readers.options import Said
from arborcast.topologies.readers.sockets import Sockets, sockets_of
from arborcast.topologies.readers.text.pasted import crossing_of, lines_of, sockets_counted
from arborcast.topologies.readers.text.said import said_slot

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""The ways over PCIe from near to far."""

MAX_SOCKETS = 64


HIDDEN_SLOT = "PCIe 3.0 with 16 lanes, as the GPUs are unknown"
"""Why the rates of slots are assumed where neither GPUs nor words tell them."""


def assumed_slot(rates: Rates) -> str:
    """The note on what is assumed of GPUs that are unknown."""
    rate = float(pcie_rate(GIGATRANSFERS[3], 16, rates))
    return (
        f"does not say which GPUs these are: PCIe 3.0 with 16 lanes assumed ({rate:.4g} GB/s each way); "
        "--gpu says otherwise"
    )


@dataclass(frozen=True, slots=True)
class PathTree:
    """The tree over the GPUs.

    Attributes:
        links: of the tree; GPU i is vertex i.
        names: of its switches and CPUs.
        near: the vertices that each NIC hangs on.
        notes: what was assumed.
    """

    links: list[Link]
    names: list[str]
    near: dict[str, tuple[Vertex, ...]]
    notes: list[str]


def pcie_tree(
    text: str,
    said: Said,
    gpus: Sequence[str],
    nics: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    kinds: Sequence[Gpu | None],
    *,
    assumed: str,
    together: Callable[[str, str], bool | None],
    first: Vertex,
    nodes: tuple[Mapping[str, int], int],
    are_sockets: bool = False,
) -> PathTree:
    """The tree that the words for pairs of devices describe, with what the rest of a tool's text says of it.

    Where NVLinks hide the path of two GPUs, NICs that are near to both tell it, then `together`; where that
    knows nothing either, the two count as near unless something near to them is far from the other.

    What was assumed is noted in the tree.

    Args:
        text: all of it: slots, sockets and the way between CPUs are what it says of them.
        said: what else is said.
        gpus: names of the GPUs.
        nics: names of the other devices.
        cells: the word of each ordered pair of devices; anything else than a level is hidden.
        kinds: what each GPU is; None where that is unknown. A switch has a slot like that of its fastest GPU.
        assumed: why they are taken for these; empty where the text says it.
        together: whether two GPUs are at one NUMA node; None where that is not known.
        first: the number of the first vertex of the tree.
        nodes: NUMA nodes of GPUs, as far as they are known, and how many the host has at least.
        are_sockets: whether each of these is a socket.

    Raises:
        TopologyError: more CPUs than `MAX_SOCKETS`.
    """
    lines = lines_of(text)
    slot = said_slot(lines)
    are_known = None not in kinds or slot.generation is not None
    growing = _Growing(gpus, nics, cells, [slot.rate(kind, said.rates) for kind in kinds], first)
    for level, name in (("PIX", "pcie"), ("PXB", "bridges")):
        growing.merge_all([level])
        growing.add_where_several(name)
        growing.place_nics()
    growing.merge_all(["PHB", "NODE"])
    growing.merge_hidden(together)
    at, total = nodes
    sockets = Sockets()
    if not are_sockets or said.numa_per_socket is not None:
        counted = sockets_counted(lines)
        sockets = sockets_of(at.values(), stated=said.numa_per_socket, counted=counted, total=total)
    merged = growing.merge_sockets(at, sockets)
    cpus = growing.distinct()
    if len(cpus) > MAX_SOCKETS:
        raise TopologyError(f"must have at most {MAX_SOCKETS} CPUs with GPUs, got {len(cpus)}")
    for group in cpus:
        if len(cpus) > 1 or len(group.tops) > 1:
            growing.add(group, "cpu")
    growing.place_nics()
    tops = [group.tops[0] for group in cpus]
    stated = said.between_sockets
    way = crossing_of(lines, said.rates) if stated is None else Crossing(stated, "")
    joined = [link for pair in combinations(tops, 2) for link in cable(*pair, way.rate, PCIE_HOP_US)]
    near = {nic: growing.near.get(nic, tuple(tops)) for nic in nics}
    hidden = assumed if are_known else HIDDEN_SLOT
    links = [*assuming(growing.links, rate=hidden), *assuming(joined, rate=way.assumed)]
    notes = [slot.note] if slot.note else [] if are_known else [assumed_slot(said.rates)]
    notes += [*dict.fromkeys(filter(None, map(slot.holds_back, kinds))), *merged]
    notes += [way.note] if joined and stated is None else []
    return PathTree(assuming(links, latency=PCIE_HOP), growing.names, near, notes)


@dataclass(slots=True)
class _Group:
    """Devices that are near each other, and the top vertices of what joins the GPUs among them."""

    devices: list[str]
    tops: list[Vertex]


class _Growing:
    """A tree that grows upwards: groups of devices merge, and get a vertex above those that they had."""

    def __init__(
        self,
        gpus: Sequence[str],
        nics: Sequence[str],
        cells: Mapping[tuple[str, str], str],
        slots: Sequence[Fraction],
        first: Vertex,
    ) -> None:
        self.gpus, self.nics, self.cells, self.first = gpus, nics, cells, first
        self.groups = {nic: _Group([nic], []) for nic in nics}
        self.vertex = {gpu: vertex for vertex, gpu in enumerate(gpus)}
        self.groups.update((gpu, _Group([gpu], [vertex])) for gpu, vertex in self.vertex.items())
        self.speed = dict(enumerate(slots))
        self.pairs: dict[str, list[tuple[str, str]]] = {}
        for pair, cell in cells.items():
            self.pairs.setdefault(cell, []).append(pair)
        self.links: list[Link] = []
        self.names: list[str] = []
        self.near: dict[str, tuple[Vertex, ...]] = {}

    def merge(self, one: str, other: str) -> None:
        kept, gone = self.groups[one], self.groups[other]
        if kept is gone:
            return
        if len(kept.devices) < len(gone.devices):
            kept, gone = gone, kept
        kept.devices += gone.devices
        kept.tops += gone.tops
        self.groups.update(dict.fromkeys(gone.devices, kept))

    def merge_all(self, levels: Sequence[str]) -> None:
        """Merge what is this near, GPUs first; NICs join no GPUs that are farther by their own cells."""
        pairs = [pair for level in levels for pair in self.pairs.get(level, ())]
        own = [pair for pair in pairs if self.gpus_of(*pair)]
        for pair in own:
            self.merge(*pair)
        farther = LEVELS[LEVELS.index(levels[-1]) + 1 :]
        for pair in pairs:
            if not self.gpus_of(*pair) and not any(starmap(self.gpus_of, self._pairs_at(farther, *pair))):
                self.merge(*pair)

    def merge_hidden(self, together: Callable[[str, str], bool | None]) -> None:
        """Merge the GPUs whose way is hidden, by what is known otherwise; first what is sure."""
        hidden = [pair for pair in combinations(self.gpus, 2) if self.cells.get(pair) not in LEVELS]
        known = {pair: together(*pair) for pair in hidden}
        for pair, near in known.items():
            if near:
                self.merge(*pair)
        for pair, near in known.items():
            if near is None and not any(self._pairs_at(["SYS"], *pair)):
                self.merge(*pair)

    def merge_sockets(self, nodes: Mapping[str, int], sockets: Sockets) -> list[str]:
        """Merge what is at NUMA nodes of one socket, and where all GPUs show SYS what is at one node.

        Virtual machines show SYS for every pair; then affinities alone tell the sockets. Where some pairs are
        nearer than SYS, the words count between GPUs at one node.
        """
        own = list(combinations(self.gpus, 2))
        are_far = [pair for pair in own if self.cells.get(pair) == "SYS"]
        notes: dict[str, None] = {}
        for one, other in are_far:
            if one not in nodes or other not in nodes or sockets.of(nodes[one]) != sockets.of(nodes[other]):
                continue
            if nodes[one] != nodes[other]:
                notes[sockets.note] = None
            elif len(are_far) == len(own):
                notes["shows SYS between all GPUs: those with one affinity count as at one CPU"] = None
            else:
                continue
            self.merge(one, other)
        return [note for note in notes if note]

    def gpus_of(self, one: str, other: str) -> bool:
        return one in self.vertex and other in self.vertex

    def _pairs_at(self, levels: Sequence[str], one: str, other: str) -> Iterator[tuple[str, str]]:
        """The pairs between the groups of these two that show one of the levels."""
        here, there = self.groups[one], self.groups[other]
        between = () if here is there else product(here.devices, there.devices)
        return (pair for pair in between if self.cells.get(pair) in levels)

    def distinct(self) -> list[_Group]:
        """The groups with GPUs, by the first GPU of each."""
        return list({id(self.groups[gpu]): self.groups[gpu] for gpu in self.gpus}.values())

    def add(self, group: _Group, name: str) -> None:
        """Put a vertex above a group, with a link as fast as the slot from each that was on top."""
        vertex = self.first + len(self.names)
        self.names.append(f"{name}{sum(known.startswith(name) for known in self.names)}")
        for top in sorted(group.tops):
            self.links += cable(top, vertex, self.speed[top], PCIE_HOP_US)
        self.speed[vertex] = max(self.speed[top] for top in group.tops)
        group.tops = [vertex]

    def add_where_several(self, name: str) -> None:
        for group in self.distinct():
            if len(group.tops) > 1:
                self.add(group, name)

    def place_nics(self) -> None:
        """Hang NICs that now are in a group with GPUs on what is on top of it."""
        for nic in self.nics:
            tops = self.groups[nic].tops
            if nic not in self.near and tops:
                self.near[nic] = tuple(tops)
