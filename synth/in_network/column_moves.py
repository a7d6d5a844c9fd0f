"""What is sent when along the trees of a column: gathered level by level up to the root, then spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from arborcast.synth.in_network.steiner_tree import SteinerColumn, SteinerTree
from arborcast.synth.topology import Vertex

Move = tuple[Vertex, Vertex, int, bool, tuple[Vertex, ...]]
"""From, to, step, whether it is added, through."""


def moves_of(column: SteinerColumn) -> Iterator[Move]:
    """What is sent along the trees of a column: first gathered, then spread."""
    gathered = 0
    if column.into is not None:
        moves, gathered = _gathering(column.into)
        yield from moves
    if column.out is not None:
        yield from _spreading(column.out, gathered)


def _gathering(tree: SteinerTree) -> tuple[list[Move], int]:
    """The transfers of an in-tree, and the step before which the root has the sum."""
    below = defaultdict(list)
    for edge in tree.edges:
        below[edge.parent].append(edge)
    back = {edge.parent: edge for edge in tree.returns}
    moves: list[Move] = []
    ready: dict[Vertex, int] = {}
    for vertex in (*(edge.child for edge in reversed(tree.edges)), tree.root):
        now = 0
        # First what comes without a loop: what is sent into a loop must be all there is.
        for edge in sorted(below[vertex], key=lambda edge: (edge.child in back, ready[edge.child])):
            step = ready[edge.child]
            if edge.child in back:
                way = back[edge.child].via[::-1]
                moves.append((vertex, edge.child, now, True, way))
                step = max(now + 1, step)
            moves.append((edge.child, vertex, step, edge.child not in back, edge.via[::-1]))
            now = max(now, step + 1)
        ready[vertex] = now
    return moves, ready[tree.root]


def _spreading(tree: SteinerTree, start: int) -> Iterator[Move]:
    """The transfers of an out-tree from a step on."""
    ready = {tree.root: start}
    for edge in tree.edges:
        yield edge.parent, edge.child, ready[edge.parent], False, edge.via
        ready[edge.child] = ready[edge.parent] + 1
    taken: set[tuple[Vertex, int]] = set()
    for edge in tree.returns:  # one copy a step: a rank may have several such switches below it
        step = ready[edge.parent]
        while (edge.child, step) in taken:
            step += 1
        taken.add((edge.child, step))
        yield edge.parent, edge.child, step, False, edge.via
