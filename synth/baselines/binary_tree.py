r"""The double binary tree: two trees, each with half of the data, each rank a leaf in at least one.

A rank that is inside one tree sends twice and receives once there and only receives in the other, so both
directions of its links are used (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", 2009). For n = 8 the first tree and the second, its mirror image, are

       0                    7
       |                    |
       4                    3
     /   \                /   \
    2     6              5     1
   / \   / \            / \   / \
  1   3 5   7          6   4 2   0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from arborcast.synth.baselines.pattern import Pattern
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Transfer

ParentOf = Mapping[int, int | None]


def double_tree(kind: Kind, count: int, method: str = "binary-tree") -> Pattern:
    """The pattern for broadcast and reduce (a root at position 0 above both trees) and for allreduce."""
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for parents in _two_trees(count) if kind is Kind.ALLREDUCE else _two_trees_below_a_root(count):
        top = next(position for position, parent in parents.items() if parent is None)
        if kind.reduces:
            transfers += _up(parents, len(chunks))
        after = max((transfer.step + 1 for transfer in transfers if transfer.chunk == len(chunks)), default=0)
        if kind is not Kind.REDUCE:
            transfers += _down(parents, len(chunks), after)
        chunks.append(Chunk(Fraction(1, 2), top))
    pinned = None if kind is Kind.ALLREDUCE else 0
    return Pattern(method, count, pinned, tuple(chunks), tuple(transfers))


def _two_trees(count: int) -> tuple[ParentOf, ParentOf]:
    """Odd positions are leaves of the first tree; mirrored or shifted, even ones are of the second."""
    first = _tree(count)

    def image(position: int) -> int:
        return count - 1 - position if count % 2 == 0 else (position + 1) % count

    second = {image(child): None if up is None else image(up) for child, up in first.items()}
    return first, second


def _two_trees_below_a_root(count: int) -> tuple[ParentOf, ParentOf]:
    if count == 2:
        return {0: None, 1: 0}, {0: None, 1: 0}
    first, second = _two_trees(count - 1)

    def below(tree: ParentOf) -> ParentOf:
        return {0: None} | {child + 1: 0 if up is None else up + 1 for child, up in tree.items()}

    return below(first), below(second)


def _tree(count: int) -> ParentOf:
    """The in-order binary tree under position 0: the lowest set bit says how high a position stands."""
    parents: dict[int, int | None] = {0: None}
    for position in range(1, count):
        height = position & -position
        above = (position - height) | (2 * height)
        # On the ragged right side the higher parent may not exist; the lower one always does.
        parents[position] = above if above < count else position - height
    return parents


def _down(parents: ParentOf, chunk: int, after: int) -> Iterator[Transfer]:
    def depth(position: int) -> int:
        parent = parents[position]
        return 0 if parent is None else 1 + depth(parent)

    for child, parent in parents.items():
        if parent is not None:
            yield Transfer(chunk, parent, child, after + depth(parent))


def _up(parents: ParentOf, chunk: int) -> Iterator[Transfer]:
    """A position sends when all below it have: in the step of its height."""

    def height(position: int) -> int:
        return max((1 + height(child) for child, parent in parents.items() if parent == position), default=0)

    for child, parent in parents.items():
        if parent is not None:
            yield Transfer(chunk, child, parent, height(child), reduce=True)
