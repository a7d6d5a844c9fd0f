"""A machine as a file or the catalog describes it: the graph, and what is known of its ranks and NICs.

Solvers need the graph alone (`Machine.topology`). The rest is for those who cost a model on the machine,
join several machines to a cluster, or ask which of their GPUs a rank is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.synth.topology import Topology, Vertex


@dataclass(frozen=True, slots=True)
class Nic:
    """A port to a network that the topology does not show.

    Attributes:
        name: as the file calls it.
        rate: GB/s each way; None where the file does not say it.
        near: the vertices of the topology that it hangs on: one switch of a PCIe tree, or, where PCIe is
            left out, the ranks that are nearest to it.
        assumed: why its rate is assumed; empty where it is not.
    """

    name: str
    rate: Fraction | None
    near: tuple[Vertex, ...]
    assumed: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """One host, or several that a file shows together.

    Attributes:
        topology: its graph.
        gpus: what each rank is, by the names of `topologies.GPUS`; None where that is unknown.
        devices: what the file calls each rank, such as "dev 0 (0000:c1:00.0)"; empty where nothing.
        hosts: the host of each rank, counted from 0.
        nics: ports to a network, none of them vertices.
        notes: what was assumed, one line each, with the option that states it.
    """

    topology: Topology
    gpus: tuple[str | None, ...]
    devices: tuple[str, ...]
    hosts: tuple[int, ...]
    nics: tuple[Nic, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, topology: Topology, *, gpu: str | None = None) -> Machine:
        """A machine of which the graph alone is known, and perhaps what all of its ranks are."""
        ranks = topology.ranks
        return cls(topology, (gpu,) * ranks, ("",) * ranks, (0,) * ranks)

    @property
    def gpu(self) -> str | None:
        """What all ranks are; None where they differ or are unknown."""
        return self.gpus[0] if len(set(self.gpus)) == 1 else None

    def reordered(self, ranks: Sequence[int], *, relays: bool = False) -> Machine:
        """The machine with these ranks as 0, 1, 2...; see `topologies.load`.

        NICs stay where a vertex that they hang on is left.
        """
        topology = self.topology.reordered(ranks) if relays else self.topology.subset(ranks)
        kept = list(ranks)
        if relays:
            kept += sorted(set(range(self.topology.ranks)) - set(ranks))
        moved = {old: new for new, old in enumerate(kept)}
        switches = {switch.name: index for index, switch in enumerate(topology.switches, topology.ranks)}
        for index, switch in enumerate(self.topology.switches, self.topology.ranks):
            if switch.name in switches:
                moved[index] = switches[switch.name]
        nics = []
        for nic in self.nics:
            near = tuple(moved[vertex] for vertex in nic.near if vertex in moved)
            if near:
                nics.append(replace(nic, near=near))
        return Machine(
            topology,
            gpus=tuple(self.gpus[rank] for rank in kept),
            devices=tuple(self.devices[rank] for rank in kept),
            hosts=tuple(self.hosts[rank] for rank in kept),
            nics=tuple(nics),
            notes=self.notes,
        )
