"""Spanning trees with weights as values, to be written down and read.

`synth.packing.weighted_tree` has them as arrays.

A tree's edges join ranks; each edge passes the switches of `via`. `Tree` is always read as an out-tree
(root to leaves); an in-tree is an out-tree of the reversed topology and is turned round by whoever lifts
it into a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.topology import Vertex


@dataclass(frozen=True, slots=True)
class TreeEdge:
    """From parent to child, through switches."""

    parent: int
    child: int
    via: tuple[Vertex, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """A spanning arborescence of the ranks.

    Attributes:
        root: where it starts.
        weight: the GB/s that it carries.
        edges: parents before children.
    """

    root: int
    weight: Fraction
    edges: tuple[TreeEdge, ...]

    @property
    def depth(self) -> dict[int, int]:
        """Edges between the root and each rank."""
        depth = {self.root: 0}
        for edge in self.edges:
            depth[edge.child] = depth[edge.parent] + 1
        return depth

    @property
    def height(self) -> int:
        """The largest depth."""
        return max(self.depth.values())
