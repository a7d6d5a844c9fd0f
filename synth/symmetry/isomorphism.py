"""Are two topologies one by renumbering, and how: colours refined along a base, then each link checked.

Automorphisms (`synth.symmetry.automorphisms`) are about one topology; this is about two, such as an
allocation that a scheduler handed out and the fragment for which a schedule was found before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from arborcast.synth.errors import TopologyError
from arborcast.synth.symmetry.refinement import BaseVertex, OrderedPartition, Refiner, SpentError, around
from arborcast.synth.topology import Hop, LinkKind, Permutation, Topology

_EFFORT = 10_000_000  # ends of links that one comparison may look at: far more than 32 vertices can need


class ComparableTopology:
    """A topology prepared for comparisons.

    Args:
        topology: the graph.
        latencies: whether links must be alike in latency too, not only in bandwidth.
        colours: one for each vertex, which renumbering must keep, such as that of a root; None for no rule.

    Raises:
        TopologyError: the topology is too large to be compared; `isomorphism` raises the same.
    """

    def __init__(
        self, topology: Topology, *, latencies: bool = False, colours: Sequence[int] | None = None
    ) -> None:
        self.topology = topology
        kinds = topology.link_kinds if latencies else topology.link_kinds_without_latency
        # In order of their kind, so that alike links have the same number in alike topologies.
        waits = topology.latency_us if latencies else dict.fromkeys(kinds, 0)
        ordered = sorted(kinds, key=lambda hop: (topology.bandwidth[hop], waits[hop], kinds[hop]))
        self._kinds: dict[Hop, LinkKind] = {hop: kinds[hop] for hop in ordered}
        self._refiner = Refiner(around(topology.size, self._kinds), _EFFORT)
        self._colours = [
            (
                topology.is_switch(vertex),
                topology.abilities(vertex),
                0 if colours is None else colours[vertex],
            )
            for vertex in range(topology.size)
        ]
        with self._bounded():
            self._start = self._refiner.refined(OrderedPartition.of(self._colours))

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Say of what a comparison is that takes more than its effort."""
        try:
            yield
        except SpentError as error:
            raise TopologyError(
                f"topology {self.topology.name}: to be compared with others it must take at most {_EFFORT} "
                f"looks at ends of links, its {len(self.topology.links)} links take more"
            ) from error

    @cached_property
    def invariant(self) -> Any:
        """The same for topologies that are alike, and for few others."""
        colours = self._start.colours
        links = sorted((colours[src], colours[dst], kind) for (src, dst), kind in self._kinds.items())
        return tuple(sorted(zip(colours, self._colours, strict=True))), tuple(links)

    @cached_property
    def _base(self) -> tuple[list[BaseVertex], OrderedPartition]:
        return self._refiner.base(self._start)

    def isomorphism(self, other: ComparableTopology) -> Permutation | None:
        """The vertex of the other topology that each of this one becomes; None where they are not alike."""
        if self.invariant != other.invariant:
            return None
        with self._bounded():
            levels, last = self._base
            images = other._refiner.matchings(other._start, levels, last)
            return next((image for image in images if self._becomes(other, image)), None)

    def _becomes(self, other: ComparableTopology, image: Permutation) -> bool:
        """Whether every link becomes one like it."""
        return all(
            other._kinds.get((image[src], image[dst])) == kind for (src, dst), kind in self._kinds.items()
        )
