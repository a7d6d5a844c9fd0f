"""The time-expanded graph of a topology: what can be where after which step, as arrays for flows and cuts.

Each rank has a vertex for every time 0..S, each switch one within every step; a link leads from the time
before a step to the time after it, and waiting costs nothing. So a way through the graph is a sequence of
waits and of routes in the sense of `synth.chunks.problem.instance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.kernels.max_flow import by_vertex, link_arrays
from arborcast.synth.topology import Topology

WAIT = -1
"""Stands for the link of an arc that no link carries: a rank keeps what it has."""


@dataclass(frozen=True)
class TimeExpanded:
    """Vertices and arcs; the vertex of rank r at time t is `t * topology.size + r`.

    A switch has a vertex of the same form for each step; those of the last time are not used.

    Attributes:
        topology: the fabric.
        steps: S.
        tail: the vertex that each arc leaves, in order of steps; those of links come first in each step.
        head: the vertex that it enters.
        link: the index in `topology.links` of the link that carries it, or `WAIT`.
        step: in which it can be used.
    """

    topology: Topology
    steps: int
    tail: Ints
    head: Ints
    link: Ints
    step: Ints

    @classmethod
    def of(cls, topology: Topology, steps: int) -> TimeExpanded:
        """The graph of so many steps."""
        src, dst = link_arrays(topology)
        waiting = np.arange(topology.ranks, dtype=np.int64)
        arriving = topology.size * (dst < topology.ranks)  # at a switch a step has not ended yet
        tail, head = np.concatenate([src, waiting]), np.concatenate([dst + arriving, waiting + topology.size])
        link = np.concatenate([np.arange(len(src)), np.full(topology.ranks, WAIT)])
        starts = topology.size * np.arange(steps, dtype=np.int64)[:, None]
        return cls(
            topology,
            steps,
            (tail + starts).ravel(),
            (head + starts).ravel(),
            np.tile(link, steps),
            np.repeat(np.arange(steps, dtype=np.int64), len(tail)),
        )

    @property
    def size(self) -> int:
        """Number of vertices."""
        return (self.steps + 1) * self.topology.size

    def at_end(self, rank: int) -> int:
        """The vertex of a rank after the last step."""
        return self.steps * self.topology.size + rank

    @cached_property
    def capacity(self) -> Ints:
        """Chunks per round on each arc, 0 where it waits."""
        of_link = np.array([*self.topology.capacities, 0], dtype=np.int64)  # WAIT is the last entry
        return of_link[self.link]

    def after(self, vertices: NDArray[np.int64]) -> Flags:
        """The vertices that can be reached from some vertices."""
        return _closure(vertices, self.tail, self.head, self.size)

    def before(self, vertices: NDArray[np.int64]) -> Flags:
        """The vertices from which some vertices can be reached."""
        return _closure(vertices, self.head, self.tail, self.size)


def _closure(origins: NDArray[np.int64], tail: Ints, head: Ints, size: int) -> Flags:
    start, arcs = by_vertex(tail, size)
    found = np.zeros(size, dtype=np.bool_)
    found[origins] = True
    stack = origins.tolist()
    while stack:
        vertex = stack.pop()
        for arc in arcs[start[vertex] : start[vertex + 1]].tolist():
            if not found[head[arc]]:
                found[head[arc]] = True
                stack.append(int(head[arc]))
    return found
